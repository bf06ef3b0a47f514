"""Theano 1.0.5's inference of contexts, and the state that it shares between functions for several contexts."""
from __future__ import annotations

import contextlib
import copy
from typing import Any, Iterator, List

from ..utils.attributes import temporarily
from .named_contexts import replace_in_gpuarray
from .wrapping import wrap

_pinned: List[Any] = [None]  # the context that a graph is being compiled for, innermost last


@contextlib.contextmanager
def compiling_for(context: Any) -> Iterator[None]:
    """Pin a context in a ``with`` block in which graphs are compiled for it: ops whose inputs imply none are on it."""
    _pinned.append(context)
    try:
        yield
    finally:
        _pinned.pop()


def pinned() -> Any:
    """Return the context of the innermost `compiling_for`; None outside of such a block."""
    return _pinned[-1]


def infer_contexts_from_all_ancestors() -> None:
    """Replace Theano 1.0.5's ``infer_context_name``, which walks up through nodes of one input only.

    Without this, every conv2d with ``filter_flip=True`` fails on a named context: "Could not infer context from
    inputs".
    """
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
    if _pinned[-1] is not None and _pinned[-1].kind != 'cpu':
        return _pinned[-1].name
    return infer_context_name.original(*variables)  # type: ignore[attr-defined]  # the patch has set it


def keep_optimizers_from_host_nodes() -> None:
    """Apply some of Theano 1.0.5's optimisers to nodes on a GPU only.

    They infer the node's context first, and then do nothing unless the first input is on a GPU. Without this, where
    there is no default context, each function with a random draw logs "Could not infer context from inputs" and a
    traceback: every Keras layer that initialises a weight does.
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
            if _pinned[-1] is None:
                return original(self, node, *args, **kwargs)
            node.op = copy.copy(self)  # each compiled function has nodes of its own
            node.op.__dict__.pop('fn', None)
            return original(node.op, node, *args, **kwargs)


def lift_graphs_to_named_contexts() -> None:
    """Keep Theano 1.0.5's ``GraphToGPU`` from failing, and logging it, where there is no default context.

    It infers the context of a graph's inputs even if no variable of the graph is on a GPU, and lifts an Alloc that
    comes before the first GPU variable to context ``None``: "context name None not defined". With this, a graph without
    a GPU variable stays on the host, and in any other graph None means the context of its first GPU variable.
    """
    from theano.gpuarray.opt import GraphToGPU
    from theano.gpuarray.type import GpuArrayType, list_contexts

    @wrap(GraphToGPU)
    def apply(original, self, fgraph):
        if _pinned[-1] is not None and _pinned[-1].kind == 'cpu':
            return None
        if None in list_contexts():
            return original(self, fgraph)
        placed = [v.type.context_name for v in fgraph.variables if isinstance(v.type, GpuArrayType)]
        if not placed:
            return None
        lifters = {key: [_LifterTo(placed[0], lifter) for lifter in those_of_op]
                   for key, those_of_op in self.local_optimizers_map.items()}
        with temporarily(self, 'local_optimizers_map', lifters):
            return original(self, fgraph)


class _LifterTo:
    """A local optimiser of GraphToGPU that lifts to a named context instead of to None."""

    def __init__(self, context_name, lifter):
        self.context_name, self.lifter = context_name, lifter

    def transform(self, op, context_name, inputs, outputs):
        return self.lifter.transform(op, context_name or self.context_name, inputs, outputs)
