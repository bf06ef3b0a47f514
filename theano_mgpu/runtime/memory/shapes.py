"""The shapes of the values in a compiled function, for given inputs."""
from __future__ import annotations

from typing import Any, Callable, List, Mapping, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.compile.ops import DeepCopyOp, Shape, Shape_i
from theano.gof.graph import Apply
from theano.gpuarray import basic_ops, blas, extra_ops, nnet, subtensor
from theano.ifelse import IfElse
from theano.sandbox import rng_mrg
from theano.tensor.blas import Dot22
from theano.tensor.nnet import corr, corr3d
from theano.tensor.nnet.nnet import CrossentropySoftmax1HotWithBiasDx, CrossentropySoftmaxArgmax1HotWithBias
from theano.tensor.opt import Assert

from ...errors import named
from .arrays import Shape as Sizes

# Ops whose first output has the values of their first input.
COPIES = basic_ops.GpuFromHost, basic_ops.HostFromGpu, basic_ops.GpuToGpu, DeepCopyOp, Assert
OF_GPUS = 'theano.gpuarray'
SMALL = 1000  # elements of an array whose values may be sizes
Symbolic = List[Any]  # for each value the symbolic sizes, or None


class UnknownShape(Exception):
    """The shape of a value does not follow from the shapes of the inputs."""


class Shapes:
    """The shapes of the values in a graph; each is found when it is asked for, and no device computes anything.

    Parameters
    ----------
    symbolic : dict of theano.Variable to list
        For outputs of the graph's ops the sizes, as expressions of the sizes and values of the inputs of the op; None
        where they are not known. It grows.
    given : dict of theano.Variable to (Array or ndarray or object)
        The inputs; of an array of NumPy the values count, too.
    """

    def __init__(self, symbolic: dict[theano.Variable, Any], given: Mapping[theano.Variable, Any]) -> None:
        self._symbolic = symbolic
        self._of: dict[theano.Variable, Sizes] = {v: getattr(each, 'shape', ()) for v, each in given.items()}
        self._values: dict[theano.Variable, Any] = {variable: content(each) for variable, each in given.items()}

    def of(self, variable: theano.Variable) -> Sizes:
        """Return the shape of a value, of no axes if it is no array; raise an UnknownShape."""
        if variable not in self._of:
            if isinstance(variable, theano.Constant) or not hasattr(variable.type, 'broadcastable'):
                return np.shape(getattr(variable, 'data', ()))
            if variable.owner and variable not in self._symbolic:
                self._symbolic.update(zip(variable.owner.outputs, _symbolic(variable.owner)))
            sizes = self._symbolic.get(variable)
            if sizes is None:
                raise UnknownShape('%s, of %s' % (named(variable), named(variable.owner)))
            self._of[variable] = tuple(1 if one else int(self._value(size))
                                       for size, one in zip(sizes, variable.broadcastable))
        return self._of[variable]

    def number(self, variable: theano.Variable) -> Any:
        """Return the value of a whole number, or of a vector of them, if it is known; else None."""
        try:
            return self._value(variable) if getattr(variable, 'dtype', '') in T.discrete_dtypes else None
        except UnknownShape:
            return None

    def _value(self, variable):
        if not isinstance(variable, theano.Variable):
            return variable
        if variable not in self._values:
            self._values[variable] = self._computed(variable)
        if self._values[variable] is None:
            raise UnknownShape('the value of ' + named(variable))
        return self._values[variable]

    def _computed(self, variable):
        """Return a value that follows from sizes, else None; matrices, and vectors of floats, are no sizes."""
        node = variable.owner
        if isinstance(variable, theano.Constant):
            return np.asarray(variable.data)
        if node is None or getattr(variable, 'ndim', 0) > (getattr(variable, 'dtype', '') in T.discrete_dtypes):
            return None
        if isinstance(node.op, (Shape, Shape_i)):
            shape = np.array(self.of(node.inputs[0]), 'int64')
            return shape if isinstance(node.op, Shape) else shape[node.op.i]
        if isinstance(node.op, IfElse):
            return self._value(taken(node, self._value(node.inputs[0]))[node.outputs.index(variable)])
        values = list(map(self._value, node.inputs))
        if isinstance(node.op, COPIES):
            return values[0]
        return _computed_on_host(node, values)[node.outputs.index(variable)]


def content(value: Any) -> np.ndarray | None:
    """Return the content of a value, where it is known: an array of NumPy is, as whole numbers that may be sizes."""
    if isinstance(value, np.ndarray):
        return value if value.size <= SMALL and value.dtype.kind in 'iub' else None
    return getattr(value, 'value', None)


def taken(node: Apply, condition: Any) -> Sequence[theano.Variable]:
    """Return the inputs of an IfElse that its outputs are, for a condition; for None, the first branch."""
    n = node.op.n_outs
    return node.inputs[1:1 + n] if condition is None or condition else node.inputs[1 + n:]


def _symbolic(node: Apply) -> Sequence[Any]:
    """Return for each output of an op the sizes, None where they are not known."""
    rule = next((RULES[cls] for cls in type(node.op).__mro__ if cls in RULES), None)
    try:
        shapes = [tuple(T.constant(1, dtype='int64') if one else Shape_i(i)(v) for i, one in enumerate(v.broadcastable))
                  if hasattr(v.type, 'broadcastable') else None for v in node.inputs]
        return rule(node.op, node, shapes) if rule else node.op.infer_shape(node, shapes)
    except Exception:  # ops raise many kinds, such as ShapeError, where they do not know the shape
        return [None] * len(node.outputs)


def _computed_on_host(node: Apply, values: Sequence[Any]) -> list[Any]:
    """Return what an op makes of numbers, on the host; None if that is not known.

    Theano computes shapes on a device, too, where a part before has left some of the sizes there. Such an op is of a
    class of the host's.
    """
    op: Any = node.op
    cls: Any = next(each for each in type(op).__mro__ if 'perform' in vars(each) and
                    not each.__module__.startswith(OF_GPUS))
    storages: list[Any] = [[None] for _ in node.outputs]
    try:
        cls.prepare_node(op, node, None, None, 'py')
        # Sizes are computed in another order than the function's, so each has to stay as it is.
        cls.perform(op, node, [np.array(each) for each in values], storages)
    except Exception:
        return [None] * len(node.outputs)
    return [value for value, in storages]


# --- ops without `infer_shape`

def _of_branches(op, node, shapes):
    """Return the sizes of the values of an IfElse: the larger ones, where its two branches differ."""
    n = op.n_outs
    return [tuple(map(T.maximum, *branches)) for branches in zip(shapes[1:1 + n], shapes[1 + n:])]


def _drawn(op, node, shapes):
    return [shapes[0], tuple(node.inputs[1][i] for i in range(node.outputs[1].ndim))]


def _first(op, node, shapes):
    return [shapes[0]]


RULES: dict[type, Callable[[Any, Apply, Symbolic], Symbolic]] = {
    **dict.fromkeys([basic_ops.GpuContiguous, DeepCopyOp, blas.GpuGemv, blas.GpuGemm, blas.GpuGer, blas.GpuGemmBatch,
                     extra_ops.GpuCumOp, subtensor.GpuAdvancedIncSubtensor1], _first),
    IfElse: _of_branches, rng_mrg.mrg_uniform_base: _drawn,
    # As the op of the host that has the same attributes.
    **{gpu: host.infer_shape for gpu, host in [
        (blas.GpuDot22, Dot22), (blas.GpuCorrMM, corr.CorrMM), (blas.GpuCorr3dMM, corr3d.Corr3dMM),
        (blas.GpuCorrMM_gradWeights, corr.CorrMM_gradWeights), (blas.GpuCorrMM_gradInputs, corr.CorrMM_gradInputs),
        (blas.GpuCorr3dMM_gradWeights, corr3d.Corr3dMM_gradWeights),
        (blas.GpuCorr3dMM_gradInputs, corr3d.Corr3dMM_gradInputs),
        (nnet.GpuCrossentropySoftmaxArgmax1HotWithBias, CrossentropySoftmaxArgmax1HotWithBias),
        (nnet.GpuCrossentropySoftmax1HotWithBiasDx, CrossentropySoftmax1HotWithBiasDx)]}}
