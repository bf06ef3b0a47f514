"""Contexts: how Theano 1.0.5 infers and uses them."""
import contextlib
import copy
import functools
import sys

_pinned = [None]      # the context that a graph is being compiled for, innermost last


@contextlib.contextmanager
def compiling_for(context):
    """While a graph is built and compiled: where nothing else says so, its context is this one."""
    _pinned.append(context)
    try:
        yield
    finally:
        _pinned.pop()


def install():
    """Mend how Theano 1.0.5 infers contexts; once, after Theano was imported.

    ``infer_context_name`` walks up through nodes of one input only. Without the mend, every conv2d
    with ``filter_flip=True`` fails on a named context: "Could not infer context from inputs".
    """
    from theano.compile.builders import OpFromGraph
    from theano.gpuarray import basic_ops, dnn, opt, rng_mrg
    from theano.scan_module.scan_op import Scan
    original = basic_ops.infer_context_name
    if original is infer_context_name:
        return
    infer_context_name.original = original
    for name, module in list(sys.modules.items()):
        if name.startswith('theano.gpuarray') and getattr(module, 'infer_context_name', None) is original:
            module.infer_context_name = infer_context_name
    _mend_graph_to_gpu(opt.GraphToGPU)
    for optimizer in (rng_mrg.local_gpua_mrg, dnn.local_abstractconv_cudnn, dnn.local_abstractconv_gw_cudnn,
                      dnn.local_abstractconv_gi_cudnn):
        _mend_local_optimizer(optimizer)
    for op_class in (Scan, OpFromGraph):
        _give_each_thunk_its_inner_function(op_class)


def infer_context_name(*variables):
    """Context of an op from its inputs: the nearest GPU ancestor's, else the one compiled for.

    Replaces ``theano.gpuarray.basic_ops.infer_context_name``; breadth first over all ancestors.
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
    return infer_context_name.original(*variables)


def _mend_local_optimizer(optimizer):
    """Keep one of Theano 1.0.5's optimisers from nodes that are not on a GPU.

    It asks for the node's context first, and then does nothing unless the first input lies on a GPU. Without
    this, where there is no default context, each function with a random draw logs "Could not infer context
    from inputs" and a traceback: every Keras layer that initialises a weight does.
    """
    original = optimizer.transform

    @functools.wraps(original)
    def transform(node):
        from theano.gpuarray.type import GpuArrayType
        return original(node) if isinstance(node.inputs[0].type, GpuArrayType) else None

    optimizer.transform = transform


def _give_each_thunk_its_inner_function(op_class):
    """Keep two functions from running one inner function at a time.

    Theano 1.0.5 keeps the compiled inner graph of scan and of OpFromGraph on the op, and functions compiled from
    one graph share the op. Without this, replicas in threads write into each other's inner storage: wrong results,
    "Sequence is shorter then the required number of steps", a segmentation fault.
    """
    original = op_class.make_thunk

    @functools.wraps(original)
    def make_thunk(self, node, *args, **kwargs):
        if _pinned[-1] is None:
            return original(self, node, *args, **kwargs)
        node.op = copy.copy(self)  # each compiled function has nodes of its own
        node.op.__dict__.pop('fn', None)
        return original(node.op, node, *args, **kwargs)

    op_class.make_thunk = make_thunk


def _mend_graph_to_gpu(graph_to_gpu):
    """Keep Theano 1.0.5's ``GraphToGPU`` from failing, and logging it, where there is no default context.

    It asks for the context of a graph's inputs even if nothing of the graph lies on a GPU, and
    lifts an Alloc before it has seen a GPU variable to context ``None``: "context name None not
    defined". A graph without a GPU variable stays on the host; in any other, None means its context.
    """
    original = graph_to_gpu.apply

    @functools.wraps(original)
    def apply(self, fgraph):
        from theano.gpuarray.type import GpuArrayType, list_contexts
        if _pinned[-1] is not None and _pinned[-1].kind == 'cpu':
            return None
        if None in list_contexts():
            return original(self, fgraph)
        placed = [v.type.context_name for v in fgraph.variables if isinstance(v.type, GpuArrayType)]
        if not placed:
            return None
        lifters = self.local_optimizers_map
        self.local_optimizers_map = {key: [_LifterTo(placed[0], lifter) for lifter in found]
                                     for key, found in lifters.items()}
        try:
            return original(self, fgraph)
        finally:
            self.local_optimizers_map = lifters

    graph_to_gpu.apply = apply


class _LifterTo:
    """A local optimiser of GraphToGPU that lifts to a named context instead of to None."""

    def __init__(self, context_name, lifter):
        self.context_name = context_name
        self.lifter = lifter

    def transform(self, op, context_name, inputs, outputs):
        return self.lifter.transform(op, context_name or self.context_name, inputs, outputs)
