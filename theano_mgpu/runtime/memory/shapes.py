"""The shapes of all values in a compiled function, for inputs of given shapes."""
from __future__ import annotations

from typing import Any, Callable, Collection, List, Mapping, NamedTuple, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.compile.ops import DeepCopyOp, Shape, Shape_i
from theano.gof.graph import Apply, io_toposort
from theano.gpuarray import basic_ops, blas, extra_ops, nnet, subtensor
from theano.gpuarray.elemwise import GpuCAReduceCuda, GpuDimShuffle, GpuElemwise
from theano.gpuarray.type import GpuArrayType
from theano.ifelse import IfElse
from theano.sandbox import rng_mrg
from theano.tensor.elemwise import CAReduceDtype, DimShuffle, Elemwise
from theano.tensor.nnet.abstract_conv import get_conv_output_shape
from theano.tensor.opt import Assert

from ...graph.theano_functions import plain_function

# Ops whose first output has the values of their first input.
COPIES = basic_ops.GpuFromHost, basic_ops.HostFromGpu, basic_ops.GpuToGpu, DeepCopyOp, Assert
Symbolic = List[Any]  # for each value the symbolic sizes, or None


class Shapes(NamedTuple):
    """The shapes of all values; None where they depend on unknown values. And the values of some whole numbers."""

    of: dict[theano.Variable, Any]
    numbers: dict[theano.Variable, np.ndarray]


class ShapesOf:
    """The shapes of the values in a graph, as functions of the shapes of its inputs.

    They follow from the graph itself: nothing is computed on a device.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those whose shapes are given.
    numbers : collection of theano.Variable
        Those among the inputs whose values are given: see `are_numbers`.
    wanted : list of theano.Variable
        Values that are asked for, as far as they follow from the given ones: see `are_numbers`.
    known : dict of theano.Variable to (ndarray or tuple of int)
        For each other input its value, if it is small and on the host, or else its shape.
    nodes : list of Apply
        All ops, in an order in which they can be computed.
    """

    def __init__(self, inputs: Sequence[theano.Variable], numbers: Collection[theano.Variable],
                 wanted: Sequence[theano.Variable], known: Mapping[theano.Variable, Any],
                 nodes: Sequence[Apply]) -> None:
        self._symbolic: dict[theano.Variable, Any] = {}  # a tuple of sizes; None if it has no shape
        self._values: dict[theano.Variable, theano.Variable] = {}  # the value, as an expression of the sizes of inputs
        self._given: list[Any] = []
        for variable in inputs:
            self._add_input(variable, variable in numbers)
        for variable, value in known.items():
            is_value = isinstance(value, np.ndarray)
            self._values[variable] = T.constant(value) if is_value else variable.type()
            self._symbolic[variable] = tuple(map(_constant, value.shape if is_value else value))
        for node in nodes:
            self._add(node)
        self._compile(set().union(*self._given), [variable for variable in wanted if are_numbers(variable)])

    def __call__(self, given: Sequence[Any]) -> Shapes:
        """Return the shapes of all values.

        Parameters
        ----------
        given : list of (tuple of int, or ndarray)
            For each input its shape, or its value.
        """
        arguments: list[Any] = []
        for value in given:
            arguments += value if isinstance(value, tuple) else [value]
        results = self._evaluate(*arguments)
        return Shapes({variable: None if positions is None else tuple(int(results[i]) for i in positions)
                       for variable, positions in self._positions.items()},
                      {variable: results[i] for variable, i in self._numbers.items()})

    def _add_input(self, variable, is_number):
        """Make symbolic sizes for an input, or a symbolic value."""
        value, ndim = variable.type(), getattr(variable, 'ndim', None)
        if is_number:
            value = _host_variable(variable)
        sizes = tuple(value.shape[i] if is_number else T.lscalar() for i in range(ndim or 0))
        self._given.append([value] if is_number else list(sizes))
        self._values[variable], self._symbolic[variable] = value, sizes if ndim is not None else None

    def _add(self, node):
        """Add the shapes of a node's outputs."""
        inputs = [self._value(variable) for variable in node.inputs]
        shapes = [self._symbolic.get(variable) for variable in node.inputs]
        copy = Apply(node.op, inputs, [output.type() for output in node.outputs])
        values = copy.outputs
        if _is_on_device(node) or getattr(node.op, 'destroy_map', None):
            values = are_numbers(node.outputs[0]) and _on_host(node.op, inputs, node.outputs) or \
                [output.type() for output in node.outputs]
        for output, value, shape in zip(node.outputs, values, _shapes(copy, shapes)):
            self._symbolic[output], self._values[output] = shape, value
        if shapes and shapes[0] is not None:  # these values follow from shapes alone
            if isinstance(node.op, Shape_i):
                self._values[node.outputs[0]] = T.cast(shapes[0][node.op.i], 'int64')
            elif isinstance(node.op, Shape):
                self._values[node.outputs[0]] = T.cast(T.stack(shapes[0]), 'int64') if shapes[0] else \
                    T.constant(np.empty(0, 'int64'))

    def _value(self, variable):
        if variable not in self._values:  # a constant
            self._values[variable] = variable
            data = variable.data
            self._symbolic[variable] = tuple(map(_constant, data.shape)) if hasattr(data, 'shape') else None
        return self._values[variable]

    def _compile(self, given, wanted):
        """Compile a function of the given sizes which returns all sizes and wanted values that follow from them."""
        every = [each for shape in self._symbolic.values() for each in shape or ()]
        whole = {variable: self._value(variable) for variable in wanted}
        follows = dict.fromkeys(given, True)

        def is_known(variable):
            return follows.get(variable, isinstance(variable, theano.Constant))
        for node in io_toposort([], every + list(whole.values())):
            follows.update(dict.fromkeys(node.outputs, all(map(is_known, node.inputs))))
        numbers: dict[theano.Variable, int] = {}
        self._positions: dict[theano.Variable, list[int] | None] = {}
        for variable, shape in self._symbolic.items():
            self._positions[variable] = None if shape is None or not all(map(is_known, shape)) else \
                [numbers.setdefault(each, len(numbers)) for each in shape]
        self._numbers = {variable: numbers.setdefault(value, len(numbers)) for variable, value in whole.items()
                         if is_known(value)}
        self._evaluate = plain_function(sum(self._given, []), list(numbers), mode=theano.Mode('py', None),
                                        on_unused_input='ignore')


def _is_on_device(node: Apply) -> bool:
    """Return whether a node runs on a device, or copies to or from it."""
    return any(isinstance(variable.type, GpuArrayType) for variable in [*node.inputs, *node.outputs])


def _on_host(op: Any, inputs: Sequence[Any], outputs: Sequence[theano.Variable]) -> list[Any] | None:
    """Return what an op computes from whole numbers, on the host and not in place; None if that is not known.

    Theano computes shapes on a device, too, where a part before has left some of the sizes there. Sizes are computed
    in another order than the function's, so each has to stay as it is.
    """
    if isinstance(op, COPIES):
        return [inputs[0]]
    if any(isinstance(each.type, GpuArrayType) and not isinstance(each, theano.Constant) for each in inputs):
        return None
    inputs = [T.constant(np.asarray(each.data)) if isinstance(each.type, GpuArrayType) else each for each in inputs]
    make = HOST_OPS.get(type(op))
    return make and Apply(make(op), inputs, list(map(_host_variable, outputs))).outputs


HOST_OPS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys([Elemwise, GpuElemwise], lambda op: Elemwise(op.scalar_op)),
    **dict.fromkeys([T.IncSubtensor, subtensor.GpuIncSubtensor],
                    lambda op: T.IncSubtensor(op.idx_list, set_instead_of_inc=op.set_instead_of_inc)),
    GpuDimShuffle: lambda op: DimShuffle(op.input_broadcastable, op.new_order),
    GpuCAReduceCuda: lambda op: CAReduceDtype(op.scalar_op, op.axis, op.dtype, op.acc_dtype),
    basic_ops.GpuJoin: lambda op: T.Join(),
    basic_ops.GpuReshape: lambda op: T.Reshape(op.ndim),
    subtensor.GpuSubtensor: lambda op: T.Subtensor(op.idx_list)}


def _host_variable(variable: theano.Variable) -> theano.Variable:
    """Return a variable like one on a device for a value on the host."""
    return T.TensorType(variable.dtype, variable.broadcastable)()


def are_numbers(variable: theano.Variable) -> bool:
    """Return whether a value is a whole number, or a vector of them: it may be a size, or sizes."""
    return isinstance(variable.type, (T.TensorType, GpuArrayType)) and variable.ndim < 2 and \
        variable.dtype in T.discrete_dtypes


def _shapes(node: Apply, shapes: Symbolic) -> Symbolic:
    """Return the symbolic shapes of a node's outputs, from the shapes of its inputs; new variables without a rule."""
    rule = next((RULES[cls] for cls in type(node.op).__mro__ if cls in RULES), None) or \
        (_infer_shape if hasattr(node.op, 'infer_shape') else None)
    try:
        found: Any = rule(node, shapes) if rule else [None] * len(node.outputs)
    except Exception:  # ops raise many kinds, such as ShapeError, where they do not know the shape
        found = [None] * len(node.outputs)
    results: Symbolic = []
    for output, shape in zip(node.outputs, found):
        if not hasattr(output.type, 'broadcastable'):
            results.append(None)
        elif shape is None:
            results.append(tuple(_constant(1) if one else T.lscalar() for one in output.type.broadcastable))
        else:
            results.append(tuple(_constant(1) if one else T.as_tensor_variable(size)
                                 for one, size in zip(output.type.broadcastable, shape)))
    return results


def _infer_shape(node, shapes):
    return node.op.infer_shape(node, shapes)


def _constant(size: int) -> Any:
    return T.constant(int(size), dtype='int64')


# --- ops without `infer_shape`

def _of_input(*numbers: int) -> Callable[[Apply, Symbolic], Symbolic]:
    """Return the rule of an op whose outputs have the shapes of some inputs."""
    return lambda node, shapes: [shapes[i] for i in numbers]


def _convolution(node, shapes):
    image, kernel = shapes
    return [get_conv_output_shape(image, kernel, node.op.border_mode, node.op.subsample, node.op.filter_dilation)]


def _of_weights(node, shapes):
    """Return the shape of the gradient of a convolution by its kernel."""
    image, top, op = shapes[0], shapes[1], node.op
    sizes = node.inputs[2:] or [
        (out - size if op.border_mode == 'full' else size + _padding(op, i) - (out - 1) * op.subsample[i] - 1)
        // op.filter_dilation[i] + 1 for i, (size, out) in enumerate(zip(image[2:], top[2:]))]
    return [(top[1], *(top[2:] if getattr(op, 'unshared', False) else ()), image[1] // _groups(op), *sizes)]


def _of_images(node, shapes):
    """Return the shape of the gradient of a convolution by its images."""
    kernel, top, op = shapes[0], shapes[1], node.op
    n = len(op.subsample)
    sizes = node.inputs[2:] or [
        (out - 1) * op.subsample[i] + 1 - _padding(op, i) +
        (size - 1) * op.filter_dilation[i] * (-1 if op.border_mode == 'full' else 1)
        for i, (size, out) in enumerate(zip(kernel[-n:], top[2:]))]
    return [(top[0], kernel[-n - 1] * _groups(op), *sizes)]


def _of_branches(node, shapes):
    """Return the sizes of the values of an IfElse: the larger ones, where its two branches differ."""
    n = node.op.n_outs
    return [tuple(a if a == b else T.maximum(a, b) for a, b in zip(*branches))
            for branches in zip(shapes[1:1 + n], shapes[1 + n:])]


def _padding(op, axis):
    """Return the padding of an axis, both sides together; for 'half', Theano gives the size of the result instead."""
    pad = op.border_mode[axis] if isinstance(op.border_mode, tuple) else 0
    return sum(pad) if isinstance(pad, tuple) else 2 * pad


def _groups(op):
    return getattr(op, 'num_groups', 1)  # only in two dimensions


def _drawn(node, shapes):
    return [shapes[0], tuple(node.inputs[1][i] for i in range(node.outputs[1].ndim))]


RULES: dict[type, Callable[[Apply, Symbolic], Symbolic]] = {
    basic_ops.GpuContiguous: _of_input(0), DeepCopyOp: _of_input(0),
    blas.GpuGemv: _of_input(0), blas.GpuGemm: _of_input(0), blas.GpuGer: _of_input(0), blas.GpuGemmBatch: _of_input(0),
    blas.GpuDot22: lambda node, shapes: [(shapes[0][0], shapes[1][1])],
    blas.GpuCorrMM: _convolution, blas.GpuCorr3dMM: _convolution,
    blas.GpuCorrMM_gradWeights: _of_weights, blas.GpuCorr3dMM_gradWeights: _of_weights,
    blas.GpuCorrMM_gradInputs: _of_images, blas.GpuCorr3dMM_gradInputs: _of_images,
    extra_ops.GpuCumOp: _of_input(0), IfElse: _of_branches,
    nnet.GpuCrossentropySoftmaxArgmax1HotWithBias: _of_input(2, 0, 2),
    nnet.GpuCrossentropySoftmax1HotWithBiasDx: _of_input(1),
    rng_mrg.mrg_uniform_base: _drawn,
    subtensor.GpuAdvancedIncSubtensor1: _of_input(0)}
