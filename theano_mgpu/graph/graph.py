"""Theano graphs: their variables and the bytes of these, the order of their outputs, and their copies on the host."""
from __future__ import annotations

import re
from typing import Any, Iterable, Mapping, Sequence, TypeVar

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.gpuarray.basic_ops import GpuFromHost, HostFromGpu, host_from_gpu
from theano.gpuarray.type import GpuArrayType, gpu_supported
from theano.scan_module.scan_op import Scan
from theano.tensor.sharedvar import TensorSharedVariable

from ..errors import GraphError, named
from ..utils import values
from .rewrites import inlined, inner_inputs, inner_outputs, rebuilt
from .traces import keep_trace

Name = TypeVar('Name')
LOOP = 'tap_array', 'mit_mot_out_slices', 'n_seqs', 'n_shared_outs', 'truncate_gradient', 'as_while'  # of a scan


def shared_variables(outputs: Sequence[theano.Variable]) -> list[SharedVariable]:
    """Return the shared variables that a graph reads, also in their default updates.

    Returns
    -------
    list of theano.compile.SharedVariable
        Each one once, in the order in which the graph meets them.
    """
    shared: dict[SharedVariable, None] = {}
    pending = list(outputs)
    while pending:
        new = [v for v in ancestors(pending) if isinstance(v, SharedVariable) and v not in shared]
        shared.update(dict.fromkeys(new))
        pending = [v.default_update for v in new if getattr(v, 'default_update', None) is not None]
    return list(shared)


def shared_ancestors(variables: Sequence[theano.Variable]) -> set[SharedVariable]:
    """Return the shared variables that variables are made of."""
    return {v for v in ancestors(variables) if hasattr(v, 'container')}


def check_inputs(inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable]) -> None:
    """Raise a GraphError where `inputs` are not the ones that `outputs` need."""
    if len(set(inputs)) < len(inputs):
        raise GraphError('an input is named twice in %s' % named(inputs))
    missing = [v for v in ancestors(outputs) if v.owner is None and v not in inputs and
               not isinstance(v, (SharedVariable, theano.Constant))]
    if missing:
        raise GraphError('the graph needs %s, which %s not among the inputs %s: add %s to them'
                         % (named(missing), 'are' if len(missing) > 1 else 'is', named(inputs),
                            'them' if len(missing) > 1 else 'it'))


def checksum(inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
             shared: Sequence[SharedVariable]) -> int:
    """Return a number that tells graphs apart: their ops, constants, and the shapes of their shared variables.

    Returns
    -------
    int
        The same in each process that builds the same graph.
    """
    numbers = {variable: i for i, variable in enumerate(dict.fromkeys([*inputs, *shared]))}
    shapes = [getattr(variable.container.storage[0], 'shape', None) for variable in shared]
    return values.checksum([fingerprints(outputs, numbers), shapes])


def fingerprints(outputs: Sequence[theano.Variable], numbers: Mapping[theano.Variable, int]) -> list[tuple[str, str]]:
    """Return two digests of the graph of each output: of its ops alone, and with its constants.

    They are the same in each process that builds the graph, on the host or on a GPU. The numbers tell inputs and shared
    variables apart; those without a number are told apart by their types.
    """
    found: dict[theano.Variable, Any] = {}

    def of(variable):
        if variable not in found:
            own = [numbers.get(variable), *(getattr(variable.type, name, None) for name in ('dtype', 'broadcastable'))]
            found[variable] = values.digest(own), values.digest([own, getattr(variable, 'data', None)])
        return found[variable]
    for node in io_toposort([], list(outputs)):
        op, inputs = node.op, list(map(of, node.inputs))
        if isinstance(op, (GpuFromHost, HostFromGpu)):
            found[node.outputs[0]] = inputs[0]
            continue
        # An op without a text of its own shows its address.
        text, props = re.sub('0x[0-9a-f]+', '', str(op)), getattr(op, '__props__', None) or ()
        own = [text, [getattr(op, name) for name in props], [getattr(op, 'info', {}).get(name) for name in LOOP]]
        inner = fingerprints(inner_outputs(op), {variable: i for i, variable in enumerate(inner_inputs(op))})
        both = [values.digest(each) for each in zip((own, own), *inputs, *inner)]
        found.update((output, [each + str(i) for each in both]) for i, output in enumerate(node.outputs))
    return list(map(of, outputs))


def listing(shared: Sequence[SharedVariable], at_most: int = 8) -> str:
    """Return the names, dtypes and shapes of shared variables, for messages."""
    texts = ['%s %s%s' % (named(v), getattr(v.type, 'dtype', ''), tuple(getattr(v.container.storage[0], 'shape', ())))
             for v in shared]
    return ', '.join(texts[:at_most]) + (', and %d more' % (len(texts) - at_most) if len(texts) > at_most else '')


def on_host(variable: theano.Variable) -> theano.Variable:
    """Return a variable as a host expression: itself, or its transfer from a GPU."""
    return host_from_gpu(variable) if isinstance(variable.type, GpuArrayType) else variable


def from_gpu(variable: theano.Variable) -> theano.Variable:
    """Return the host expression whose transfer to a GPU a variable is; `on_host` of any other variable.

    The gradient of a parameter on a GPU is such a transfer.
    """
    if variable.owner and isinstance(variable.owner.op, GpuFromHost):
        return variable.owner.inputs[0]
    return on_host(variable)


def n_axes(variable: theano.Variable) -> int:
    """Return the number of axes of a variable; 0 for one that is no array, such as a slice or a random state."""
    return getattr(variable, 'ndim', 0)


def fits_gpu(variable: theano.Variable) -> bool:
    """Return whether a variable's values can lie on a GPU: tensors of any dtype but complex."""
    return isinstance(variable.type, theano.tensor.TensorType) and gpu_supported(variable.type)


def taken_on_device(variable: theano.Variable) -> bool:
    """Return whether functions on a GPU take an input there: floating arrays, and states of random streams.

    Indices and labels stay on the host.
    """
    return fits_gpu(variable) and variable.ndim > 0 and (
        variable.dtype.startswith('float') or getattr(variable.tag, 'is_rng', False))


def is_sparse(variable: theano.Variable) -> bool:
    """Return whether the values of a variable are matrices of scipy.sparse."""
    return hasattr(variable.type, 'format')


def host_view(variable: SharedVariable) -> SharedVariable:
    """Return a shared variable as the host sees it: itself, or for one on a GPU a stand-in over its container."""
    if not isinstance(variable.type, GpuArrayType):
        return variable
    if not hasattr(variable.tag, 'host_view'):
        view = TensorSharedVariable(variable.name, host_type(variable), None, None, container=variable.container)
        if hasattr(variable, 'default_update'):
            view.default_update = variable.default_update
        view.tag.stands_for, variable.tag.host_view = variable, view
    return variable.tag.host_view


def seen_on(context_name: str, replica: SharedVariable) -> SharedVariable:
    """Return a replica as graphs of its context see it: Theano has no name for the device of the flag ``device``."""
    if not isinstance(replica.type, GpuArrayType) or replica.type.context_name == context_name:
        return replica
    named_type = GpuArrayType(replica.type.dtype, replica.type.broadcastable, context_name=context_name)
    return replica.__class__(replica.name, named_type, None, None, container=replica.container)


def fetched_values(outputs: Sequence[theano.Variable]) -> dict[theano.Variable, theano.Variable]:
    """Return for each `host_view` in a graph the value on the host that is fetched from its device."""
    return {v: on_host(v.tag.stands_for) for v in shared_variables(outputs) if hasattr(v.tag, 'stands_for')}


def host_type(variable: theano.Variable) -> theano.tensor.TensorType:
    """Return the type of a tensor's values on the host."""
    return theano.tensor.TensorType(variable.type.dtype, variable.type.broadcastable)


def host_graph(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Return the same graph on the host, with each shared variable that lies on a GPU replaced by its `host_view`.

    So are the graphs within its ops. Transfers to the GPU of the flag ``device`` and back, which gradients of
    parameters have, are left out: they name no context, in contrast to those to a context that the user names.

    Raises
    ------
    GraphError
        If ops of the graph itself bind it to a context.
    """
    outputs = rebuilt(list(map(on_host, inlined(outputs, _is_on_gpu))), _on_host)
    for variable in ancestors(outputs):
        if isinstance(variable.type, GpuArrayType):
            raise GraphError('mixed devices: %s is bound to context %r by the graph itself, which has to run on '
                             'every context. Build the graph from host variables (remove .transfer(%r) and the '
                             'like)' % (named(variable.owner or variable), variable.type.context_name,
                                        variable.type.context_name))
    return outputs


def _on_host(node, inputs):
    """Return the outputs of a node on the host, or None if it is there; a transfer to a named context stays."""
    op, inputs = node.op, [host_view(v) if isinstance(v, SharedVariable) else v for v in inputs]
    if isinstance(op, GpuFromHost) and op.context_name is None or \
            isinstance(op, HostFromGpu) and not isinstance(inputs[0].type, GpuArrayType):
        return inputs
    is_on_gpu = _is_on_gpu(op)
    if inputs == node.inputs and not is_on_gpu:
        return None
    new = Scan(op.inputs, host_graph(op.outputs), op.info).make_node(*inputs) if is_on_gpu else \
        node.clone_with_new_inputs(inputs, strict=False)
    for output, old in zip(new.outputs, node.outputs):
        keep_trace([output], old)
    return new.outputs


def _is_on_gpu(op):
    """Return whether the graph within an op, or within one of its ops, has values on a GPU."""
    return any(isinstance(v.type, GpuArrayType) or v.owner is not None and _is_on_gpu(v.owner.op)
               for v in ancestors(inner_outputs(op)))


def by_depth(graphs: dict[Name, theano.Variable]) -> dict[Name, theano.Variable]:
    """Sort outputs by their depth, the number of ops in the longest chain that an output is computed by.

    Theano's virtual machine computes all ops of the first output, then the further ops of the second one, and so on.
    If outputs of little depth come first, the gradient of a layer's weights is computed, and the saved values of the
    layer are freed, before the backward pass goes on to the layer below. If the gradient of the first layer comes
    first, the whole backward pass is computed before anything is freed: that takes up to twice the memory.

    Examples
    --------
    >>> import theano.tensor as T
    >>> x = T.dvector()
    >>> list(by_depth({'two': T.exp(T.exp(x)), 'none': x, 'one': T.exp(x)}))
    ['none', 'one', 'two']
    """
    depths: dict[theano.Variable, int] = {}
    for node in io_toposort([], list(graphs.values())):
        depth = 1 + max((depths.get(v, 0) for v in node.inputs), default=0)
        depths.update((v, depth) for v in node.outputs)
    return {name: graphs[name] for name in sorted(graphs, key=lambda name: depths.get(graphs[name], 0))}


def bytes_of_shared(variable: SharedVariable) -> int:
    """Return the bytes of the value of a shared variable; 0 for a value that is no array."""
    value = variable.container.storage[0]
    return value.size * np.dtype(value.dtype).itemsize if hasattr(value, 'size') and hasattr(value, 'dtype') else 0


def bytes_of_all(variables: Iterable[SharedVariable]) -> int:
    """Return the bytes of the values of shared variables together."""
    return sum(map(bytes_of_shared, variables))


def parts_by_bytes(sizes: Sequence[int], n: int) -> list[int]:
    """Return the number of one of n parts for each of some sizes, in their order, with about as many bytes a part.

    Examples
    --------
    >>> parts_by_bytes([3, 1, 4], 2)
    [0, 0, 1]
    """
    total, ends = sum(sizes) or 1, np.cumsum(sizes)
    return [min(n - 1, int(n * (end - size / 2) / total)) for size, end in zip(sizes, ends)]
