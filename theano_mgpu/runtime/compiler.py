"""The compilation of a graph for one context."""
from __future__ import annotations

import copy
import logging
from typing import Any, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors
from theano.gof.link import raise_with_op
from theano.gpuarray.basic_ops import as_gpuarray_variable
from theano.gpuarray.type import GpuArrayType

from ..devices.context_map import Context
from ..devices.contexts import type_name
from ..devices.theano_contexts import compiling_for
from ..graph.graph import by_depth, fits_gpu, on_host, taken_on_device
from ..graph.rewrites import substitute
from ..graph.theano_functions import plain_functions
from ..graph.traces import keep_trace
from ..utils.attributes import collector_paused
from ..utils.flag_text import own_flag
from .graph_calls import GraphCalls
from .retarget import CannotRetarget, link, optimise

_logger = logging.getLogger('theano_mgpu')

# The kernel of top-k uses __ballot, which devices from compute capability 7.0 on do not have: it stays on the host. So
# does a maximum with its place: libgpuarray's kernel passes over NaN, which Theano keeps.
NOT_ON_GPU = ('local_gpua_topkop', 'local_gpu_maxandargmax')
# Optimisations that must not be used on OpenCL. Theano 1.0.5 registers them for any GPU, but:
#   the first one's kernel does not build there (clBuildProgram error);
#   scan's pure-Python loop reads CUDA's own attributes ("This is for CUDA arrays");
#   the last one's kernel is CUDA source.
NOT_ON_OPENCL = ('local_gpua_crossentropysoftmaxargmax1hotwithbias', 'local_gpua_scan_to_gpua', 'local_gpua_cumop')
# cuDNN adds the gradients of overlapping windows of max-pooling in any order; Theano's own kernel does not.
NOT_DETERMINISTIC = ('local_gpua_pool_dnn_grad_stride',)
# CLBlast refuses float16 on devices without half arithmetic ("float16 is not supported on this
# device"), and pygpu cannot ask a device whether it has it: products with float16 stay on the host.
NOT_IN_HALF = ('local_gpua_dot22', 'local_gpua_dot22scalar', 'local_gpua_gemm', 'local_gpua_gemv',
               'local_gpua_ger', 'local_gpua_gemmbatch', 'local_gpua_abstractconv',
               'local_gpua_lift_abstractconv_graph')


def compile_for(context: Context, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                updates: dict[SharedVariable, theano.Variable], replicas: dict[SharedVariable, SharedVariable],
                mode: str | theano.Mode | None = None, name: str | None = None, like: Sequence[Any] = ()) -> Any:
    """Compile a graph for one context; its shared variables are replaced by that context's replicas.

    The function takes host arrays, and arrays on the device for inputs that are used there alone: `mgpu_takes` says
    which. It trusts its caller that they have the inputs' types. It changes nothing: the new values of its updates,
    which lie where the updated replicas do, are further results. `mgpu_order` has the positions of the results among
    the outputs and then the updates; without updates, outputs keep their order. Outputs stay on the device.
    ``mgpu_call(*values)`` is the shortest way to call it; the function may write results to the arrays `into` that a
    caller on the CPU gives, or return others. If one of the functions `like` it, of the same graph, is for
    a device of the same type, its optimised graph serves this context, too; see `retarget.link`.
    """
    whole = list(outputs) + list(updates.values())
    order = list(by_depth(dict(enumerate(whole))) if updates else range(len(whole)))
    with collector_paused(), plain_functions():
        function = _linked(context, replicas, name, like) or \
            _compile(context, inputs, outputs, updates, replicas, order, mode, name)
    function.mgpu_order = order
    # The batch is checked once as a whole; Theano's own checks of each input, and of each pair
    # of inputs for shared memory, grow with the square of the number of parameters.
    function.trust_input = True
    function.mgpu_context = context
    explicit = function.maker.fgraph.inputs[:len(inputs)]
    function.mgpu_takes = [isinstance(variable.type, GpuArrayType) for variable in explicit]
    function.mgpu_call = _call_of(function, len(inputs))
    numbers = {i: np.dtype(v.dtype).type for i, v in enumerate(explicit) if isinstance(v.type, theano.scalar.Scalar)}
    if numbers:
        function.mgpu_call = _with_numbers(function.mgpu_call, numbers)
    elif context.kind == 'cuda' and type(function.fn).__name__ == 'CVM' and not function.profile and \
            own_flag('mgpu.cuda_graphs') == 'auto':
        function.mgpu_call = GraphCalls(function, function.mgpu_call, context, len(inputs))
    return function


def _call_of(function, n_inputs):
    """Return ``call(*values, into=())`` of a function without updates and defaults: `Function` is called without these.

    Of a small function, Theano's own loops over all variables take a fifth of the time.
    """
    fn = function.fn
    if type(fn).__name__ != 'CVM' or function.profile:
        return lambda *values, into=(): function.unwatched_call(*values)
    given = [container.storage for container in function.input_storage[:n_inputs]]
    # An output that is an input has the storage of this.
    made = [[None] if variable.owner is None else container.storage
            for container, variable in zip(function.output_storage, function.maker.fgraph.outputs)]
    emptied = given + made

    def call(*values, into=()):
        for cell, value in zip(given, values):
            cell[0] = value
        for cell, array in zip(made, into):
            cell[0] = array
        try:
            return fn()
        except Exception:
            number = fn.position_of_error
            raise_with_op(fn.nodes[number], fn.thunks[number], storage_map=fn.storage_map)
        finally:
            for cell in emptied:
                cell[0] = None
    return call


def _with_numbers(call, numbers):
    """Return a call that converts some values, by their positions, to numbers of these types.

    An input of Theano's scalar type, such as the bound of a slice, comes from another stage as an array: C code would
    read garbage in the place of the number.
    """
    def converted(*values, **options):
        return call(*[numbers[i](value) if i in numbers else value for i, value in enumerate(values)], **options)
    return converted


def _linked(context, replicas, name, like):
    """Return a function from the graph of another one; None if none is for this type of device, or can be moved."""
    for function in like:
        if function.mgpu_optimised and type_name(function.mgpu_context) == type_name(context):
            try:
                return link(function.mgpu_optimised, context, replicas, name)
            except CannotRetarget as error:
                _logger.warning('%s is compiled once more for context %s: %s', name or 'a function', context.name,
                                error)
                return None
    return None


def _compile(context, inputs, outputs, updates, replicas, order, mode, name):
    whole = list(outputs) + list(updates.values())
    with compiling_for(context):
        local_inputs = [_local_input(variable, context) for variable in inputs]
        replacements = dict(zip(inputs, map(on_host, local_inputs)))
        replacements.update((variable, on_host(replica)) for variable, replica in replicas.items())
        local = substitute(whole, replacements)
        results = [as_gpuarray_variable(output, context.name) if context.kind != 'cpu' and fits_gpu(output) else output
                   for output in local[:len(outputs)]]
        for variable, value in zip(updates, local[len(outputs):]):  # each new value where its replica lies
            kind = replicas[variable].type
            results.append(as_gpuarray_variable(value, kind.context_name) if isinstance(kind, GpuArrayType) else
                           on_host(value))
        results = [results[i] for i in order]
        mode = _compile_mode(context, whole, mode)
        if type(mode) is theano.Mode:
            return link(optimise(context, local_inputs, results, replicas, mode, name), context, replicas, name)
        # Modes that check have makers and linkers of their own.
        function = theano.function(local_inputs, results, mode=mode, no_default_updates=True, on_unused_input='ignore',
                                   name=name)
    function.mgpu_optimised = None
    return function


def _local_input(variable, context):
    if context.kind == 'cpu' or not taken_on_device(variable):
        local = variable.type(variable.name)
        local.tag = copy.copy(variable.tag)
        if context.kind != 'cpu':
            local.tag.target = context.name if fits_gpu(variable) else 'cpu'
        return local
    local = GpuArrayType(variable.dtype, variable.broadcastable, context_name=context.name)(variable.name)
    keep_trace([local], variable)
    return local


def _compile_mode(context, outputs, mode):
    mode = theano.compile.get_mode(mode)
    if not theano.config.cxx:
        # Fused elementwise ops are interpreted element by element; single ones are NumPy's.
        mode = mode.excluding('fusion')
    if context.kind == 'cpu':
        return mode.excluding('gpuarray_opt')
    if context.kind == 'opencl':
        has_half = any(getattr(v.type, 'dtype', None) == 'float16' for v in ancestors(outputs))
        return mode.excluding(*NOT_ON_GPU + NOT_ON_OPENCL + (NOT_IN_HALF if has_half else ()))
    return mode.excluding(*NOT_ON_GPU + (NOT_DETERMINISTIC if theano.config.deterministic == 'more' else ()))
