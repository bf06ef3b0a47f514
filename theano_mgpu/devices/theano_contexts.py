"""Patches of Theano 1.0.5: it opens contexts on demand, infers them, and keeps functions for several of them apart."""
from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from contextvars import ContextVar
from typing import Any, Callable, Iterator

from ..compat import kept_graphs
from ..compat.wrapping import wrap
from ..utils import flag_text, mpi_environment, rank_process
from .leases import is_child

# The context that a graph is being compiled for; each thread has its own.
_pinned: ContextVar[Any] = ContextVar('_pinned', default=None)


@contextlib.contextmanager
def compiling_for(context: Any) -> Iterator[None]:
    """Pin a context in a ``with`` block in which graphs are compiled for it: ops whose inputs imply none are on it."""
    before = _pinned.set(context)
    try:
        yield
    finally:
        _pinned.reset(before)


def _seen_by_the_optimiser():
    context = _pinned.get()
    return context and (context.kind, context.kind != 'cpu' and context.name)


kept_graphs.further.append(_seen_by_the_optimiser)


def hide_contexts(theanos: dict[str, str]) -> None:
    """Keep Theano from opening the devices of the flag ``contexts``: `open_contexts_on_demand` does so.

    Theano opens them when it is imported, only logs an error where a device cannot be opened, and loses the second name
    of a device.
    """
    theanos['contexts'] = ''


def show_contexts() -> None:
    """Give ``theano.config.contexts`` the user's map, which `hide_contexts` hid: scripts read its names there."""
    import theano.gpuarray  # noqa: F401  which would open these contexts, if it was imported later
    from theano import configparser
    flag, = [flag for flag in configparser._config_var_list if flag.fullname == 'contexts']
    flag.val = flag_text.flag('contexts', '')


def leave_default_device(theanos: dict[str, str]) -> None:
    """Keep a process from opening the device of the flag ``device``, where contexts choose another one for it.

    Such a process is one of several in a job, or was started by a script of `run`: it would take the same device as all
    the others, beside its own.
    """
    device = flag_text.flag('device', 'cpu')
    if device != 'cpu' and (mpi_environment.trains_together() or is_child()):
        theanos['device'] = 'cpu'
        rank_process.note('device=%s is the same device for several processes: each computes on its own contexts '
                          'instead' % device)


def let_children_open_gpus() -> None:
    """Remove the mark of Theano 1.0.5 in the environment of a process that has opened a GPU; children inherit it.

    With the mark, every child process, also one started afresh, refuses a GPU: "You can't initialize
    the GPU in a subprocess if the parent process already did it".
    """
    os.environ.pop('THEANO_GPU_IS_ALREADY_ACTIVE', None)


def open_contexts_on_demand(open_context: Callable[[str], bool]) -> None:
    """Open the device of a mapped context when Theano first asks for the context by its name.

    Theano opens all devices of the flag ``contexts`` when it is imported; `hide_contexts` prevents that.
    ``open_context(name)`` returns whether the context has arrays of a GPU; it raises ``ContextNotDefined`` for a name
    that is not mapped.
    """
    from theano import compile, tensor
    from theano.gpuarray import type as gpuarray_type
    from theano.gpuarray.type import ContextNotDefined
    original, registry = gpuarray_type.get_context, gpuarray_type._context_reg

    class OnTheHost(ContextNotDefined, TypeError):
        """The error of an array of a GPU on a context of the CPU; `theano.shared` then tries other constructors."""

    def has_arrays(name):
        return name in registry or open_context(name)

    @functools.wraps(original)
    def get_context(name):
        if name is not None and not has_arrays(name):
            raise OnTheHost('context %s is on the CPU, where no array of a GPU can be' % name)
        return original(name)

    def shared_on_context(value, name=None, strict=False, allow_downcast=None, borrow=False, *, target, **options):
        """Make a shared variable for a target: on a context of the CPU it is a variable of the host."""
        if target == 'cpu':
            raise TypeError('Theano has a constructor for this target')
        if has_arrays(target):
            return gpuarray_type.gpuarray_shared_constructor(value, name, strict, allow_downcast, borrow, target=target,
                                                             **options)
        return compile.shared(value, name, strict, allow_downcast, borrow=borrow, target='cpu', **options)

    def transfer(variable, target):
        """Leave a variable on the host for a context of the CPU; Theano's own function has looked for a GPU before."""
        try:
            return None if has_arrays(target) else variable.transfer('cpu')
        except ContextNotDefined:
            if tensor.basic.transfer._others[-1] is transfer:
                raise
            return None  # a function that the script has registered may know this target

    replace_in_gpuarray('get_context', original, get_context)
    compile.shared_constructor(shared_on_context)
    tensor.basic.register_transfer(transfer)


def replace_in_gpuarray(name: str, original: Any, replacement: Any) -> None:
    """Replace a function of theano.gpuarray in each of its modules, since they import one another's functions."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith('theano.gpuarray') and getattr(module, name, None) is original:
            setattr(module, name, replacement)


def infer_contexts_from_all_ancestors() -> None:
    """Replace Theano 1.0.5's ``infer_context_name``, which walks up through nodes of one input only."""
    from theano.gpuarray import basic_ops, dnn, opt, rng_mrg  # noqa: F401  patched below, too
    original = basic_ops.infer_context_name
    infer_context_name.original = original  # type: ignore[attr-defined]  # tests put it back
    replace_in_gpuarray('infer_context_name', original, infer_context_name)


def infer_context_name(*variables: Any) -> Any:
    """Return the name of an op's context: the context of its nearest GPU ancestor, or else `compiling_for`.

    Takes the place of ``theano.gpuarray.basic_ops.infer_context_name``; breadth first over all ancestors.
    """
    from theano.gpuarray.basic_ops import HostFromGpu
    from theano.gpuarray.type import GpuArrayType
    seen, level = set(), list(variables)
    while level:
        for variable in level:
            if isinstance(variable.type, GpuArrayType):
                return variable.type.context_name
            if getattr(variable.tag, 'context_name', None) is not None:
                return variable.tag.context_name
            if variable.owner and isinstance(variable.owner.op, HostFromGpu):
                return variable.owner.inputs[0].type.context_name
        seen.update(level)
        level = [parent for variable in level if variable.owner for parent in variable.owner.inputs
                 if parent not in seen]
    if _pinned.get() is not None and _pinned.get().kind != 'cpu':
        return _pinned.get().name
    return infer_context_name.original(*variables)  # type: ignore[attr-defined]  # the patch has set it


def keep_optimizers_from_host_nodes() -> None:
    """Apply some of Theano 1.0.5's optimisers to nodes on a GPU only.

    They infer the node's context first, and then do nothing unless the first input is on a GPU.
    """
    from theano.gpuarray import dnn, rng_mrg
    from theano.gpuarray.type import GpuArrayType
    for optimizer in (rng_mrg.local_gpua_mrg, dnn.local_abstractconv_cudnn, dnn.local_abstractconv_gw_cudnn,
                      dnn.local_abstractconv_gi_cudnn):
        @wrap(optimizer)
        def transform(original, node):
            return original(node) if isinstance(node.inputs[0].type, GpuArrayType) else None


def give_each_thunk_its_inner_function() -> None:
    """Give each compiled function an inner function of its own for each scan and OpFromGraph.

    Theano 1.0.5 keeps the compiled inner graph on the op, and functions compiled from one graph share the op. Without
    this, replicas in threads write into each other's inner storage: wrong results, "Sequence is shorter then the
    required number of steps", a segmentation fault.
    """
    from theano.compile.builders import OpFromGraph
    from theano.scan_module.scan_op import Scan
    for op_class in (Scan, OpFromGraph):
        @wrap(op_class)
        def make_thunk(original, self, node, *args, **kwargs):
            if _pinned.get() is None:
                return original(self, node, *args, **kwargs)
            node.op = copy.copy(self)  # each compiled function has nodes of its own
            node.op.__dict__.pop('fn', None)
            return original(node.op, node, *args, **kwargs)


def lift_graphs_to_named_contexts() -> None:
    """Keep Theano 1.0.5's ``GraphToGPU`` on the context of its graph, where this is not the default one.

    It infers the context of a graph's inputs even if no variable of the graph is on a GPU, and lifts an Alloc that
    comes before the first GPU variable to context ``None``: "context name None not defined", or, with ``device=cuda0``,
    arrays on this device in a graph for another one. With this, a graph without a GPU variable stays on the host, and
    in any other graph None means the context of its first GPU variable.
    """
    from theano.gpuarray.opt import GraphToGPU
    from theano.gpuarray.type import GpuArrayType, list_contexts

    @wrap(GraphToGPU)
    def apply(original, self, fgraph):
        if _pinned.get() is None and None in list_contexts():
            return original(self, fgraph)
        if _pinned.get() is not None and _pinned.get().kind == 'cpu':
            return None
        placed = [v.type.context_name for v in fgraph.variables if isinstance(v.type, GpuArrayType)]
        if not placed:
            return None
        own = copy.copy(self)  # other threads use the optimiser, too
        own.local_optimizers_map = {key: [_LifterTo(placed[0], lifter) for lifter in those_of_op]
                                    for key, those_of_op in self.local_optimizers_map.items()}
        return original(own, fgraph)


class _LifterTo:
    """A local optimiser of GraphToGPU that lifts to a named context instead of to None."""

    def __init__(self, context_name, lifter):
        self.context_name, self.lifter = context_name, lifter

    def transform(self, op, context_name, inputs, outputs):
        return self.lifter.transform(op, context_name or self.context_name, inputs, outputs)
