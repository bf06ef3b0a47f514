"""The shapes of all values in a compiled function, for inputs of given shapes."""
from __future__ import annotations

from typing import Any, Callable, Collection, List, Mapping, NamedTuple, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.compile.function_module import orig_function
from theano.compile.ops import Shape, Shape_i, deep_copy_op
from theano.gof.graph import Apply, io_toposort
from theano.gpuarray import basic_ops, blas, extra_ops, nnet, reduction, subtensor
from theano.sandbox import rng_mrg
from theano.tensor.nnet.abstract_conv import get_conv_output_shape

from ...compat.theano_functions import plain_functions

Symbolic = List[Any]  # for each value the symbolic sizes, or None


class Shapes(NamedTuple):
    """The shapes of values, and the values of whole numbers on the host; None where they depend on unknown values."""

    of: dict[theano.Variable, Any]
    numbers: dict[theano.Variable, Any]


class ShapesOf:
    """The shapes of the values in a graph, as functions of the shapes of its inputs.

    They follow from the graph itself: nothing is computed on a device.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those whose shapes are given.
    numbers : collection of theano.Variable
        Those among the inputs whose values are given: whole numbers, without axes.
    known : dict of theano.Variable to (ndarray or tuple of int)
        For each other input its value, if it is small and on the host, or else its shape.
    nodes : list of Apply
        All ops, in an order in which they can be computed.
    """

    def __init__(self, inputs: Sequence[theano.Variable], numbers: Collection[theano.Variable],
                 known: Mapping[theano.Variable, Any], nodes: Sequence[Apply]) -> None:
        self._symbolic: dict[theano.Variable, Any] = {}  # a tuple of sizes; None if it has no shape
        self._values: dict[theano.Variable, theano.Variable] = {}  # the value, as an expression of the sizes of inputs
        self._given: list[Any] = []
        for variable in inputs:
            self._add_input(variable, variable in numbers)
        for variable, value in known.items():
            self._values[variable] = T.constant(value) if isinstance(value, np.ndarray) else variable.type()
            self._symbolic[variable] = tuple(map(_constant, np.shape(value) if isinstance(value, np.ndarray) else value))
        for node in nodes:
            self._add(node)
        self._compile(set().union(*self._given))

    def __call__(self, given: Sequence[Any]) -> Shapes:
        """Return the shapes of all values.

        Parameters
        ----------
        given : list of (tuple of int, or int)
            For each input its shape, or its value.
        """
        arguments: list[int] = []
        for value in given:
            arguments += value if isinstance(value, tuple) else [value]
        results = [int(each) for each in self._evaluate(*arguments)]
        return Shapes({variable: None if positions is None else tuple(results[i] for i in positions)
                       for variable, positions in self._positions.items()},
                      {variable: results[i] for variable, i in self._numbers.items()})

    def _add_input(self, variable, is_number):
        """Make symbolic sizes for an input, or a symbolic value."""
        ndim = getattr(variable, 'ndim', None)
        sizes = tuple(T.lscalar() for _ in range(ndim or 0))
        self._values[variable] = T.lscalar() if is_number else variable.type()
        self._given.append([self._values[variable]] if is_number else list(sizes))
        self._symbolic[variable] = sizes if ndim is not None else None

    def _add(self, node):
        """Add the shapes of a node's outputs."""
        overwritten = set().union(*(getattr(node.op, 'destroy_map', None) or {}).values())
        inputs = [self._value(variable) for variable in node.inputs]
        # Sizes are computed in another order than the function's: each stays as it is.
        inputs = [deep_copy_op(value) if i in overwritten else value for i, value in enumerate(inputs)]
        shapes = [self._symbolic.get(variable) for variable in node.inputs]
        copy = Apply(node.op, inputs, [output.type() for output in node.outputs])
        for output, its_copy, shape in zip(node.outputs, copy.outputs, _shapes(copy, shapes)):
            self._symbolic[output], self._values[output] = shape, its_copy
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

    def _compile(self, given):
        """Compile a function of the given sizes which returns all sizes that follow from them."""
        every = [each for shape in self._symbolic.values() for each in shape or ()]
        whole = {variable: value for variable, value in self._values.items()
                 if isinstance(variable.type, T.TensorType) and not variable.ndim and variable.dtype in T.discrete_dtypes}
        follows = {each: True for each in given}

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
        with plain_functions():
            self._evaluate = orig_function([theano.In(variable) for variable in sum(self._given, [])],
                                           list(map(theano.Out, numbers)), theano.Mode('py', None),
                                           accept_inplace=True, on_unused_input='ignore')


def _shapes(node: Apply, shapes: Symbolic) -> Symbolic:
    """Return the symbolic shapes of a node's outputs, of those of its inputs; new variables where no rule is known."""
    rule = next((RULES[cls] for cls in type(node.op).__mro__ if cls in RULES), None) or \
        (_infer_shape if hasattr(node.op, 'infer_shape') else None)
    try:
        found: Any = rule(node, shapes) if rule else [None] * len(node.outputs)
    except Exception:  # ops raise many kinds, such as ShapeError, where they do not know the shape
        found = [None] * len(node.outputs)
    results = []
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


def _padding(op, axis):
    """Return the padding of an axis, both sides together; for 'half', Theano gives the size of the result instead."""
    pad = op.border_mode[axis] if isinstance(op.border_mode, tuple) else 0
    return sum(pad) if isinstance(pad, tuple) else 2 * pad


def _groups(op):
    return getattr(op, 'num_groups', 1)  # only in two dimensions


def _drawn(node, shapes):
    return [shapes[0], tuple(node.inputs[1][i] for i in range(node.outputs[1].ndim))]


def _largest(node, shapes):
    axes = node.op.axis
    kept = tuple(size for i, size in enumerate(shapes[0]) if i not in axes)
    return [kept, kept]


RULES: dict[type, Callable[[Apply, Symbolic], Symbolic]] = {
    basic_ops.GpuContiguous: _of_input(0),
    blas.GpuGemv: _of_input(0), blas.GpuGemm: _of_input(0), blas.GpuGer: _of_input(0), blas.GpuGemmBatch: _of_input(0),
    blas.GpuDot22: lambda node, shapes: [(shapes[0][0], shapes[1][1])],
    blas.GpuCorrMM: _convolution, blas.GpuCorr3dMM: _convolution,
    blas.GpuCorrMM_gradWeights: _of_weights, blas.GpuCorr3dMM_gradWeights: _of_weights,
    blas.GpuCorrMM_gradInputs: _of_images, blas.GpuCorr3dMM_gradInputs: _of_images,
    extra_ops.GpuCumOp: _of_input(0),
    nnet.GpuCrossentropySoftmaxArgmax1HotWithBias: _of_input(2, 0, 2),
    nnet.GpuCrossentropySoftmax1HotWithBiasDx: _of_input(1),
    reduction.GpuMaxAndArgmax: _largest,
    rng_mrg.mrg_uniform_base: _drawn,
    subtensor.GpuAdvancedIncSubtensor1: _of_input(0)}
