"""The rules of `samples`: for each op, how its outputs depend on the samples if its inputs do."""
import numpy as np
import theano
import theano.tensor as T
from theano import sparse
from theano.compile import ops as compile_ops
from theano.gradient import DisconnectedGrad, GradClip, ZeroGrad
from theano.ifelse import IfElse
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.scalar import basic as scalar
from theano.scan_module.scan_op import Scan
from theano.tensor import basic, blas, elemwise, extra_ops, opt, subtensor
from theano.tensor.nnet import abstract_conv, bn, neighbours, nnet
from theano.tensor.raw_random import RandomFunction
from theano.tensor.signal import pool
from theano.tensor.sort import ArgSortOp, SortOp, TopKOp
from theano.tensor.type_other import NoneTypeT, SliceType

from .dependence import (
    CONSTANT,
    COUNT,
    COUPLED,
    DRAWN,
    MEAN,
    MIXED,
    NUMBER,
    PLACES,
    ROWS,
    SIZES,
    STATISTICS,
    SUM,
    UNIFORM,
    rows,
    sizes,
)

LINEAR = (scalar.Add, scalar.Sub)
# What may take the places of samples: each sample picks of its own row.
INDEXING = (subtensor.AdvancedSubtensor, subtensor.AdvancedIncSubtensor, compile_ops.Shape, compile_ops.Shape_i)
# What may take whole numbers that are no multiples of the number of samples: sizes of what is drawn.
SIZING = (elemwise.Elemwise, elemwise.DimShuffle, opt.MakeVector, basic.Join, basic.ScalarFromTensor,
          basic.TensorFromScalar, subtensor.Subtensor, mrg_uniform_base, RandomFunction)
# What may take rows that are filled with a statistic.
KEEPS_FILLED = (elemwise.Elemwise, elemwise.DimShuffle, elemwise.CAReduce, basic.Reshape, basic.Flatten,
                basic.Rebroadcast, basic.Alloc, subtensor.Subtensor, compile_ops.Shape, compile_ops.Shape_i)
_RULES = {}


def outcome(analysis, node, inputs):
    """Dependence of a node's outputs: one for all, or a list."""
    if all(d.kind == CONSTANT for d in inputs):
        return UNIFORM[CONSTANT]
    if any(d.kind == PLACES for d in inputs) and not isinstance(node.op, INDEXING):
        return analysis.couple(node, 'computes with the places of samples in the batch')
    if any(d.kind == DRAWN for d in inputs):
        return _of_drawn(analysis, node, inputs)
    if any(d.kind == NUMBER for d in inputs) and not isinstance(node.op, SIZING):
        return analysis.couple(node)
    if any(d.filled in STATISTICS for d in inputs) and not isinstance(node.op, KEEPS_FILLED):
        return analysis.couple(node)
    for cls in type(node.op).__mro__:
        if cls in _RULES:
            return _RULES[cls](analysis, node, inputs)
    if isinstance(node.op, (nnet.Softmax, nnet.LogSoftmax)):
        return _along_last_axis(analysis, node, inputs)
    found = analysis.couple(node, 'is computed by %s, of which it is not known whether it mixes samples'
                            % type(node.op).__name__)
    ndim = getattr(node.outputs[0].type, 'ndim', 0)
    return rows() if ndim and any(d.kind == ROWS for d in inputs) else found


def rule(*classes):
    """Register a function ``(analysis, node, inputs) -> Dependence or list`` for ops of these classes."""
    def register(function):
        _RULES.update(dict.fromkeys(classes, function))
        return function
    return register


def constant(variable):
    """The number that a scalar is known to be, else None: also index arithmetic that Theano folds only to optimise."""
    try:
        return T.get_scalar_constant_value(variable)
    except (T.NotScalarConstantError, TypeError):
        pass
    if not variable.owner or getattr(variable.type, 'ndim', 0):
        return None
    op, inputs = variable.owner.op, variable.owner.inputs
    if isinstance(op, (opt.Assert, basic.ScalarFromTensor, basic.TensorFromScalar)):
        return constant(inputs[0])
    if isinstance(op, elemwise.Elemwise):
        return _computed(op.scalar_op, [lambda v=v: constant(v) for v in inputs])
    if isinstance(op, subtensor.Subtensor) and inputs[0].ndim == 1:
        place = constant(_indices(variable.owner, 1)[0])
        return None if place is None else _element(inputs[0], int(place))
    return None


def _computed(op, inputs):
    """A scalar op's output, from functions that return its inputs or None; None if it is not known."""
    if isinstance(op, scalar.Switch):
        condition = inputs[0]()
        return None if condition is None else inputs[1 if condition else 2]()
    values = [value() for value in inputs]
    return None if any(value is None for value in values) else op.impl(*values)


def _element(vector, i):
    """What an element of a vector is known to be, else None."""
    length = _length(vector)
    if length is None or not -length <= i < length:
        return None
    i %= length
    op, inputs = (vector.owner.op, vector.owner.inputs) if vector.owner else (None, ())
    if isinstance(vector, theano.Constant):
        return vector.data[i]
    if isinstance(op, opt.MakeVector):
        return constant(inputs[i])
    if isinstance(op, compile_ops.Shape):
        return _length(inputs[0]) if inputs[0].ndim == 1 else None
    if isinstance(op, elemwise.Elemwise):
        return _computed(op.scalar_op, [lambda v=v: _element(v, i) if _length(v) == length else constant(v)
                                        for v in inputs])
    if isinstance(op, basic.Join):
        for piece in inputs[1:]:
            if i < _length(piece):
                return _element(piece, i)
            i -= _length(piece)
    return None


def _length(vector):
    """The length that a vector is known to have, else None."""
    try:
        return T.get_vector_length(vector)
    except (ValueError, TypeError):
        pass
    lengths = [_length(v) for v in vector.owner.inputs if v.ndim == 1] if vector.owner else []
    if not lengths or None in lengths:
        return None
    if isinstance(vector.owner.op, elemwise.Elemwise):
        return max(lengths)
    return sum(lengths) if isinstance(vector.owner.op, basic.Join) else None


# --- elementwise ---------------------------------------------------------------------------------

@rule(compile_ops.Rebroadcast, compile_ops.SpecifyShape, compile_ops.ViewOp, compile_ops.DeepCopyOp,
      basic.ScalarFromTensor, basic.TensorFromScalar, theano.printing.Print, opt.Assert, DisconnectedGrad, GradClip,
      ZeroGrad, sparse.DenseFromSparse, sparse.SparseFromDense)
def _first(analysis, node, inputs):
    return inputs[0]


@rule(bn.AbstractBatchNormInference)
def _normalisation_by_given(analysis, node, inputs):
    return inputs[0] if all(d.kind == CONSTANT for d in inputs[1:]) else analysis.couple(node)


@rule(elemwise.Elemwise)
def _elemwise(analysis, node, inputs):
    op = node.op.scalar_op
    if isinstance(op, scalar.Second):  # fill: the second input, in the shape of the first
        return _filled(analysis, node, inputs) if inputs[0].kind == ROWS else inputs[1]
    if isinstance(op, (scalar.Identity, scalar.Cast)) and not _rounds(node, inputs[0]):
        return inputs[0]
    with_rows = [d for d in inputs if d.kind == ROWS]
    if with_rows:
        return _elemwise_of_rows(analysis, node, inputs, with_rows)
    if any(d.kind == SIZES for d in inputs):
        return _elemwise_of_sizes(analysis, node, inputs)
    return _of_statistics(analysis, node, inputs)


def _filled(analysis, node, inputs):
    shaped, value = inputs
    if value.kind == ROWS:
        return _elemwise_of_rows(analysis, node, inputs, [value, shaped])
    if value.kind in (SIZES, NUMBER):
        return analysis.couple(node)
    if node.inputs[1].type.broadcastable[shaped.axis]:
        return shaped._replace(filled=value.kind)
    return shaped._replace(filled=None) if value.kind == CONSTANT else analysis.couple(node)


def _rounds(node, x):
    """Whether a cast does not keep every number: to whole numbers of others, or to booleans; counts are whole."""
    if isinstance(node.op.scalar_op, scalar.Identity):
        return False
    kinds = [np.dtype(v.dtype).kind for v in (node.inputs[0], node.outputs[0])]
    return kinds[0] == 'f' and kinds[1] != 'f' and x.kind not in (COUNT, SIZES) or kinds[0] != 'b' and kinds[1] == 'b'


def _elemwise_of_rows(analysis, node, inputs, with_rows):
    axis, varying = with_rows[0].axis, [d for d in with_rows if d.filled != CONSTANT] or with_rows
    merged = varying[0].merged
    aligned = _aligned(varying) and all(d.axis == axis for d in with_rows)
    if aligned and all(d.filled or d.kind not in (ROWS, SIZES) and v.type.broadcastable[axis]
                       for d, v in zip(inputs, node.inputs)):
        found = _of_statistics(analysis, node, [UNIFORM[d.filled or d.kind] for d in inputs])
        return rows(axis, found.kind if found.kind in UNIFORM else COUPLED, merged)
    if not aligned or any(d.filled in STATISTICS or d.kind in STATISTICS + (SIZES, NUMBER) for d in inputs):
        # Pairs of samples, or rows against a number that is another one on each replica.
        analysis.couple(node)
    return rows(axis, None, merged)


def _aligned(dependences):
    """Whether samples lie along the same axis of all, and in the same order."""
    return len({(d.axis, d.merged) for d in dependences}) == 1


def _elemwise_of_sizes(analysis, node, inputs):
    lengths = {len(d.elements) for d in inputs if d.kind == SIZES}
    if len(lengths) > 1 or node.outputs[0].ndim != 1:
        return analysis.couple(node)
    elements = [[d.elements[i] if d.kind == SIZES else d for d in inputs] for i in range(lengths.pop())]
    return sizes([_of_statistics(analysis, node, element) for element in elements])


def _of_statistics(analysis, node, inputs):
    """Dependence of an elementwise function of sums, means and constants."""
    op, kinds = node.op.scalar_op, [d.kind for d in inputs]
    if set(kinds) == {CONSTANT}:
        return UNIFORM[CONSTANT]
    found = None
    if COUPLED in kinds:
        return UNIFORM[COUPLED]
    if NUMBER in kinds:
        found = None
    elif isinstance(op, LINEAR):
        found = _combined(kinds, node.inputs)
    elif isinstance(op, scalar.Neg):
        found = kinds[0]
    elif isinstance(op, scalar.Second):
        found = kinds[1]
    elif isinstance(op, scalar.Switch) and kinds[0] == CONSTANT:
        condition = constant(node.inputs[0])
        found = _combined(kinds[1:], node.inputs[1:]) if condition is None else kinds[1 if condition else 2]
    elif isinstance(op, scalar.Mul):
        found = _product(kinds)
    elif isinstance(op, scalar.TrueDiv):
        found = {(SUM, COUNT): MEAN, (COUNT, COUNT): CONSTANT}.get(tuple(kinds), kinds[0] if kinds[1] == CONSTANT
                                                                   else None)
    if found is None and set(kinds) <= {CONSTANT, COUNT, NUMBER} \
            and all(np.dtype(v.dtype).kind in 'iu' for v in node.inputs + node.outputs):
        return UNIFORM[NUMBER]
    return UNIFORM[found] if found else analysis.couple(node)


def _combined(kinds, variables=None):
    """Kind of a sum or difference; zeros do not count."""
    if variables:
        kinds = [kind for kind, v in zip(kinds, variables) if kind != CONSTANT or constant(v) != 0]
    kinds = set(kinds)
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= {MEAN, CONSTANT}:
        return MEAN
    return SUM if kinds <= {SUM, COUNT} else MIXED


def _product(kinds):
    varying = [kind for kind in kinds if kind != CONSTANT]
    if len(varying) == 1:
        return varying[0]
    return SUM if sorted(varying) == [COUNT, MEAN] else None


# --- shapes --------------------------------------------------------------------------------------

@rule(compile_ops.Shape)
def _shape(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS:
        return UNIFORM[COUNT if x.kind == PLACES else CONSTANT]
    return sizes([UNIFORM[COUNT if i == x.axis else CONSTANT] for i in range(node.inputs[0].ndim)])


@rule(compile_ops.Shape_i)
def _shape_i(analysis, node, inputs):
    x = inputs[0]
    return UNIFORM[COUNT if x.kind == PLACES or x.kind == ROWS and node.op.i == x.axis else CONSTANT]


@rule(opt.MakeVector)
def _make_vector(analysis, node, inputs):
    if any(d.kind == ROWS for d in inputs):
        return analysis.couple(node)
    return sizes(inputs)


def _elements(variable, dependence, length=None):
    """(Dependence, number or None) of each element of a vector of sizes; None if its length is not known."""
    length = length or len(dependence.elements) or _length(variable)
    if length is None:
        return None
    found = dependence.elements if dependence.kind == SIZES else [dependence] * length
    return [(d, constant(variable[i]) if d.kind == CONSTANT else None) for i, d in enumerate(found)]


@rule(basic.Reshape)
def _reshape(analysis, node, inputs):
    x, shape = inputs
    if x.kind != ROWS:
        return x if shape.kind == CONSTANT else analysis.couple(node)
    elements = _elements(node.inputs[1], shape, node.op.ndim)
    # The size that stands for samples: a multiple of their number, else -1 for what is left.
    # That the other sizes keep each sample's elements together cannot be seen here.
    counts = [i for i, (d, _) in enumerate(elements) if d.kind == COUNT]
    axes = counts or [i for i, (_, n) in enumerate(elements) if n == -1]
    if len(axes) != 1 or any(d.kind not in (CONSTANT, COUNT) for d, _ in elements):
        return analysis.couple(node)
    axis, = axes
    before = [i for i in range(x.axis) if not _is_single(node.inputs[0], i)]
    kept = [n for _, n in elements[:axis] if n != 1]
    if not before and not kept and not x.merged:
        return rows(axis, x.filled)
    split = x.merged and node.op.ndim > node.inputs[0].ndim
    if kept and (split or len(kept) >= len(before) > 0 or x.axis > 0 and _is_single(node.inputs[0], x.axis - 1)):
        return rows(axis, x.filled)
    # Axes before that of the samples are merged into it; sizes after it must not grow.
    if axis == 0 and node.op.ndim <= node.inputs[0].ndim - x.axis:
        return rows(0, x.filled, x.merged or x.axis)
    return analysis.couple(node)


def _is_single(variable, axis):
    """Whether the length of an axis is known to be 1."""
    if variable.type.broadcastable[axis]:
        return True
    node = variable.owner
    if node and isinstance(node.op, elemwise.DimShuffle):
        return _is_single(node.inputs[0], node.op.new_order[axis])
    return bool(node) and isinstance(node.op, basic.Alloc) and constant(node.inputs[1 + axis]) == 1


@rule(basic.Flatten)
def _flatten(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or x.axis < node.op.outdim - 1:
        return x
    if node.op.outdim > 1 and x.axis > node.op.outdim - 1:
        return analysis.couple(node)
    return rows(node.op.outdim - 1, x.filled, x.merged or x.axis)


@rule(elemwise.DimShuffle)
def _dimshuffle(analysis, node, inputs):
    x, order = inputs[0], list(node.op.new_order)
    if x.kind == SIZES:
        return x if order == [0] else analysis.couple(node)
    if x.kind != ROWS:
        return x
    return x._replace(axis=order.index(x.axis)) if x.axis in order else analysis.couple(node)


@rule(basic.Alloc, basic.AllocEmpty)
def _alloc(analysis, node, inputs):
    value, shape = (inputs[0], inputs[1:]) if isinstance(node.op, basic.Alloc) else (UNIFORM[CONSTANT], inputs)
    axes = [i for i, d in enumerate(shape) if d.kind != CONSTANT]
    if value.kind == ROWS:
        axis = value.axis + node.outputs[0].ndim - node.inputs[0].ndim
        return value._replace(axis=axis) if axes == [axis] else analysis.couple(node)
    if not axes:
        return value
    if len(axes) > 1 or shape[axes[0]].kind != COUNT or value.kind != CONSTANT:
        return analysis.couple(node)
    broadcastable = node.inputs[0].type.broadcastable if isinstance(node.op, basic.Alloc) else ()
    own_axis = axes[0] - len(shape) + len(broadcastable)
    return rows(axes[0], CONSTANT if own_axis < 0 or broadcastable[own_axis] else None)


@rule(basic.ARange)
def _arange(analysis, node, inputs):
    from_0_by_1 = constant(node.inputs[0]) == 0 and constant(node.inputs[2]) == 1
    return UNIFORM[PLACES] if inputs[1].kind == COUNT and from_0_by_1 else analysis.couple(node)


@rule(mrg_uniform_base, RandomFunction)
def _draw(analysis, node, inputs):
    elements = inputs[1].elements if inputs[1].kind == SIZES else [inputs[1]] * node.outputs[1].ndim
    axes = [i for i, d in enumerate(elements) if d.kind == COUNT] + [d.axis for d in inputs[2:] if d.kind == ROWS]
    if any(d.kind not in (CONSTANT, ROWS) for d in inputs[2:]) \
            or any(d.kind not in (CONSTANT, COUNT, NUMBER) for d in elements):
        return [UNIFORM[CONSTANT], analysis.couple(node)]
    if len(axes) == 1 and all(d.kind != NUMBER for d in elements):
        return [UNIFORM[CONSTANT], rows(axes[0])]
    return [UNIFORM[CONSTANT], UNIFORM[DRAWN] if all(d.kind == CONSTANT for d in inputs[2:]) else analysis.couple(node)]


def _of_drawn(analysis, node, inputs):
    """What is made of random numbers, which belong to no sample before they are put into rows."""
    others = [d for d in inputs if d.kind != DRAWN]
    if isinstance(node.op, (elemwise.Elemwise, basic.Join)) and all(d.kind == CONSTANT for d in others) \
            or isinstance(node.op, subtensor.Subtensor) and all(d.kind in (CONSTANT, COUNT, NUMBER) for d in others):
        return UNIFORM[DRAWN]
    if isinstance(node.op, basic.Reshape):
        elements = _elements(node.inputs[1], inputs[1], node.op.ndim)
        counts = [i for i, (d, _) in enumerate(elements) if d.kind == COUNT]
        if len(counts) == 1 and all(d.kind in (CONSTANT, COUNT) for d, _ in elements):
            return rows(counts[0])
    return analysis.couple(node)


# --- reductions ----------------------------------------------------------------------------------

@rule(elemwise.CAReduce)
def _reduce(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis] if ndim else []
    adds = isinstance(node.op.scalar_op, scalar.Add)
    if x.kind == SIZES:
        kinds = [d.kind for d in x.elements]
        return UNIFORM[(_combined(kinds) if adds else _product(kinds)) or COUPLED]
    if x.kind == COUNT and len(axes):  # a vector of sizes that are all multiples
        length = len(_elements(node.inputs[0], x) or ())
        return x if adds or length == 1 else analysis.couple(node)
    if x.kind != ROWS:
        return x if adds or not len(axes) or x.kind in (CONSTANT, COUPLED) else analysis.couple(node)
    if x.axis not in axes:
        if x.filled in STATISTICS and not adds:
            analysis.couple(node)
            x = x._replace(filled=COUPLED)
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes))
    if not adds:
        analysis.couple(node, 'takes the %s over samples' % type(node.op.scalar_op).__name__.lower())
        return UNIFORM[COUPLED]
    if not x.filled or x.filled == COUPLED:
        return UNIFORM[COUPLED if x.filled else SUM]
    found = _product([x.filled, COUNT])
    return UNIFORM[found] if found else analysis.couple(node)._replace(kind=COUPLED, axis=None)


@rule(basic.MaxAndArgmax, basic.Argmax)
def _argmax(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis]
    if x.kind == ROWS and x.axis not in axes:
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes), filled=None)
    analysis.couple(node, 'takes the maximum over samples')
    return UNIFORM[COUPLED]


@rule(extra_ops.CumOp, extra_ops.DiffOp, SortOp, ArgSortOp, TopKOp)
def _along_axis(analysis, node, inputs):
    x = inputs[0]
    axis = getattr(node.op, 'axis', None)
    if axis is None and len(node.inputs) > 1:
        axis = constant(node.inputs[1])
    if x.kind == ROWS and axis is not None and int(axis) % node.inputs[0].ndim != x.axis:
        return x._replace(filled=None)
    return analysis.couple(node)


@rule(nnet.SoftmaxWithBias)
def _along_last_axis(analysis, node, inputs):
    x = inputs[0]
    return x if x.kind == ROWS and x.axis < node.inputs[0].ndim - 1 else analysis.couple(node)


@rule(nnet.CrossentropyCategorical1Hot, nnet.CrossentropySoftmaxArgmax1HotWithBias)
def _crossentropy(analysis, node, inputs):
    return rows() if all(d.kind == CONSTANT or d == rows(filled=d.filled) for d in inputs) else analysis.couple(node)


@rule(bn.AbstractBatchNormTrain)
def _batch_normalisation(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or any(CONSTANT not in (d.kind, d.filled) for d in inputs[1:]):
        return analysis.couple(node)
    if x.axis not in node.op.axes:
        return x
    analysis.couple(node, 'normalises each sub-batch by its own statistics')
    # Mean and inverse deviation, then the running averages of mean and variance.
    # Of inverse deviations `statistics.BatchUpdates` makes that of the whole batch.
    return [x] + [UNIFORM[MEAN], UNIFORM[COUPLED]] * (len(node.outputs) // 2)


# --- products and convolutions -------------------------------------------------------------------

@rule(basic.Dot, sparse.Dot, sparse.StructuredDot)
def _dot(analysis, node, inputs):
    (a, b), a_ndim = inputs, node.inputs[0].ndim
    over_a = a.kind == ROWS and a.axis == a_ndim - 1
    over_b = b.kind == ROWS and b.axis == 0
    if over_a and over_b:
        return UNIFORM[SUM]
    if a.kind == ROWS and b.kind == CONSTANT and not over_a:
        return rows(a.axis, None, a.merged)
    if a.kind == CONSTANT and b.kind == ROWS and not over_b:
        return rows(a_ndim - 1, None, b.merged)
    if ROWS not in (a.kind, b.kind) and CONSTANT in (a.kind, b.kind):
        return b if a.kind == CONSTANT else a
    return analysis.couple(node)


@rule(blas.BatchedDot)
def _batched_dot(analysis, node, inputs):
    a, b = inputs
    if a.kind == b.kind == ROWS and a.axis == 0 and _aligned(inputs):
        return rows(0, None, a.merged)
    if (a.kind, b.kind, a.axis) == (ROWS, CONSTANT, 1) or (a.kind, b.kind, b.axis) == (CONSTANT, ROWS, 2):
        return rows(a.axis or b.axis)
    return analysis.couple(node)


@rule(abstract_conv.BaseAbstractConv)
def _convolution(analysis, node, inputs):
    backwards = isinstance(node.op, abstract_conv.AbstractConv_gradInputs)
    image, kernel = (inputs[1], inputs[0]) if backwards else inputs[:2]
    if image.kind == ROWS and image.axis == 0 and kernel.kind == CONSTANT:
        return rows(0, None, image.merged)
    return analysis.couple(node)


@rule(pool.Pool, neighbours.Images2Neibs)
def _pool(analysis, node, inputs):
    x, pooled = inputs[0], getattr(node.op, 'ndim', 2)
    if x.kind != ROWS or x.axis >= node.inputs[0].ndim - pooled or any(d.kind != CONSTANT for d in inputs[1:]):
        return analysis.couple(node)
    # Neighbourhoods are rows, those of one image in succession.
    return x if isinstance(node.op, pool.Pool) or x.axis == 0 else analysis.couple(node)


# --- indexing and joining ------------------------------------------------------------------------

def _is_whole(entry):
    return isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None and entry.step in (None, 1)


def _indices(node, skip):
    """Entries of a basic index, numbers where they are known."""
    found = []
    for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list):
        if isinstance(entry, slice):
            entry = slice(*[part if part is None else constant(part) if constant(part) is not None else part
                            for part in (entry.start, entry.stop, entry.step)])
        found.append(entry)
    return found


@rule(subtensor.Subtensor)
def _subtensor(analysis, node, inputs):
    x, entries = inputs[0], _indices(node, 1)
    if x.kind == SIZES:
        entry = entries[0]
        if isinstance(entry, slice):
            parts = (entry.start, entry.stop, entry.step)
            if any(isinstance(part, theano.Variable) for part in parts):
                return analysis.couple(node)
            return sizes(x.elements[slice(*[part if part is None else int(part) for part in parts])])
        number = constant(entry)
        return analysis.couple(node) if number is None else x.elements[int(number)]
    if x.kind != ROWS:
        return x if all(d.kind == CONSTANT for d in inputs[1:]) else analysis.couple(node)
    if any(d.kind != CONSTANT for d in inputs[1:]):
        return analysis.couple(node)
    if x.axis < len(entries) and not _is_whole(entries[x.axis]):
        return analysis.couple(node, 'picks samples by their place in the batch')
    return x._replace(axis=x.axis - sum(not isinstance(entry, slice) for entry in entries[:x.axis]))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(analysis, node, inputs):
    x, y, entries = inputs[0], inputs[1], _indices(node, 2)
    kinds = [x.kind, y.kind]
    if set(kinds) <= set(STATISTICS + (CONSTANT,)) and all(d.kind == CONSTANT for d in inputs[2:]):
        return UNIFORM[_combined(kinds)]
    if ROWS not in (x.kind, y.kind) or any(d.kind not in (CONSTANT, ROWS) for d in inputs):
        return analysis.couple(node)
    if y.kind == ROWS:
        kept = [i for i, entry in enumerate(entries) if isinstance(entry, slice)]
        kept += range(len(entries), node.inputs[0].ndim)
        axis = kept[y.axis + len(kept) - node.inputs[1].ndim]
    else:
        axis = x.axis
    merged = (x if x.kind == ROWS else y).merged
    if (x.kind == ROWS and x.axis != axis) or (axis < len(entries) and not _is_whole(entries[axis])) \
            or y.kind == ROWS and y.merged != merged:
        return analysis.couple(node)
    return rows(axis, None, merged)


@rule(subtensor.AdvancedSubtensor1)
def _take(analysis, node, inputs):
    x, index = inputs
    if x.kind == CONSTANT and index.kind == ROWS:
        return index
    if x.kind == ROWS and x.axis > 0 and index.kind == CONSTANT:
        return x
    return analysis.couple(node, 'picks samples by their place in the batch')


@rule(subtensor.AdvancedSubtensor)
def _advanced_subtensor(analysis, node, inputs):
    x, indices = inputs[0], list(zip(node.inputs[1:], inputs[1:]))
    arrays = [i for i, (v, _) in enumerate(indices) if not isinstance(v.type, (SliceType, NoneTypeT))]
    ndim = max(indices[i][0].ndim for i in arrays)
    # As the arrays are broadcast against each other.
    varying = [d._replace(axis=d.axis + ndim - v.ndim, filled=None) if d.kind == ROWS else d
               for v, d in indices if d.kind != CONSTANT]
    if x == rows(filled=x.filled) and varying and varying[0].kind == PLACES and inputs[1].kind == PLACES:
        return rows() if ndim == 1 and all(d == rows() for d in varying[1:]) else analysis.couple(node)
    if any(d.kind != ROWS for d in varying) or varying and not _aligned(varying):
        return analysis.couple(node)
    if x.kind == CONSTANT and arrays == list(range(len(arrays))):
        return varying[0]
    if x.kind == ROWS and not varying and x.axis < len(indices) and _is_whole(_slice_of(indices[x.axis][0])) \
            and x.axis < arrays[0]:
        return x._replace(filled=None)
    return analysis.couple(node, 'picks samples by their place in the batch')


def _slice_of(variable):
    if isinstance(variable, theano.Constant):
        return variable.data
    if variable.owner and isinstance(variable.type, SliceType):
        parts = [None if isinstance(v.type, NoneTypeT) else constant(v) for v in variable.owner.inputs]
        return slice(*parts)
    return None


@rule(subtensor.AdvancedIncSubtensor, subtensor.AdvancedIncSubtensor1)
def _advanced_inc_subtensor(analysis, node, inputs):
    # One-hot codes: each row of zeros gets its 1.
    x, y, place = inputs[:3]
    others = [y] + list(inputs[3:])
    if x == rows(filled=x.filled) and place.kind == PLACES and node.inputs[1].ndim <= 1 \
            and all(d.kind == CONSTANT or d == rows(filled=d.filled) for d in others):
        return rows()
    return analysis.couple(node)


@rule(basic.Join)
def _join(analysis, node, inputs):
    axis, parts = constant(node.inputs[0]), inputs[1:]
    if any(d.kind == ROWS for d in parts):
        with_rows = [d for d in parts if d.kind == ROWS]
        if not _aligned(with_rows) or axis is None or int(axis) % node.outputs[0].ndim == with_rows[0].axis \
                or any(d.kind not in (ROWS, CONSTANT) for d in parts):
            return analysis.couple(node)
        return rows(with_rows[0].axis, merged=with_rows[0].merged)
    if node.outputs[0].ndim == 1:
        pieces = [_elements(v, d) for v, d in zip(node.inputs[1:], parts)]
        if None not in pieces:
            return sizes([d for piece in pieces for d, _ in piece])
    kinds = [d.kind for d in parts]
    return UNIFORM[_combined(kinds)] if set(kinds) <= set(STATISTICS + (CONSTANT,)) else analysis.couple(node)


@rule(basic.Split)
def _split(analysis, node, inputs):
    x, axis = inputs[0], constant(node.inputs[1])
    if x.kind == ROWS and axis is not None and int(axis) % node.inputs[0].ndim != x.axis:
        return x
    return analysis.couple(node)


@rule(extra_ops.RepeatOp)
def _repeat(analysis, node, inputs):
    x = inputs[0]
    return x if x.kind == ROWS and node.op.axis is not None and inputs[1].kind == CONSTANT \
        and (node.op.axis != x.axis or not x.merged) else analysis.couple(node)


# --- control flow --------------------------------------------------------------------------------

@rule(IfElse)
def _if_else(analysis, node, inputs):
    if inputs[0].kind != CONSTANT:
        return analysis.couple(node)
    n = len(node.outputs)
    return [_either(analysis, node, pair) for pair in zip(inputs[1:n + 1], inputs[n + 1:])]


def _either(analysis, node, pair):
    """Dependence of what is the one or the other, the same one on each replica."""
    kinds = {d.kind for d in pair}
    with_rows = [d for d in pair if d.kind == ROWS]
    if pair[0] == pair[1]:
        return pair[0]
    if with_rows and _aligned(with_rows) and kinds <= {ROWS, CONSTANT} \
            and not any(d.filled in STATISTICS for d in pair):
        return with_rows[0]._replace(filled=None)
    return UNIFORM[_combined(kinds)] if kinds <= set(STATISTICS + (CONSTANT,)) else analysis.couple(node)


@rule(Scan)
def _scan(analysis, node, inputs):
    """What is inside a loop: slices of the sequences and states have one axis less, the time."""
    op, of = node.op, dict(zip(node.inputs, inputs))
    sliced = op.outer_seqs(node) + op.outer_mitsot(node) + op.outer_sitsot(node)
    if inputs[0].kind != CONSTANT:
        return analysis.couple(node, 'loops over samples')
    if op.outer_mitmot(node) or any(of[v].kind == ROWS and of[v].axis == 0 for v in sliced):
        return analysis.couple(node, 'loops over samples')

    def step(variable):
        d = of[variable]
        return d._replace(axis=d.axis - 1) if d.kind == ROWS else d

    known = dict(zip(op.inner_seqs(op.inputs), map(step, op.outer_seqs(node))))
    known.update(zip(op.inner_non_seqs(op.inputs), (of[v] for v in op.outer_non_seqs(node))))
    known.update(zip(op.inner_shared(op.inputs), (of[v] for v in op.outer_shared(node))))
    slices = iter(op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs))
    groups = [[next(slices) for _ in taps] for taps in op.tap_array]
    for outer, group in zip(op.outer_mitsot(node) + op.outer_sitsot(node), groups):
        known.update(dict.fromkeys(group, step(outer)))
    new_states = op.inner_mitsot_outs(op.outputs) + op.inner_sitsot_outs(op.outputs)
    while True:  # a state depends on what it became a step before
        inside = type(analysis)(op.outputs, known)
        before = dict(known)
        for group, new in zip(groups, new_states):
            known.update(dict.fromkeys(group, _grown(known[group[0]], inside.of(new))))
        if known == before:
            break
    for coupling in inside.couplings:
        analysis.couple(node, coupling.reason + ' (inside a loop over time)')
    if not inside.couplings and any(known[group[0]].kind == COUPLED for group in groups):
        analysis.couple(node)
    states = [_grown(known[group[0]], inside.of(new)) for group, new in zip(groups, new_states)]
    outputs = states + [inside.of(v) for v in op.inner_nitsot_outs(op.outputs)]
    if any(d.kind == MIXED for d in outputs):  # nobody can tell its terms from outside
        analysis.couple(node)
        outputs = [UNIFORM[COUPLED] if d.kind == MIXED else d for d in outputs]
    return [d._replace(axis=d.axis + 1) if d.kind == ROWS else d for d in outputs] \
        + [inside.of(v) for v in op.inner_shared_outs(op.outputs)]


def _grown(before, new):
    """Dependence of a state that was one thing and becomes another: once COUPLED, it stays so."""
    with_rows = [d for d in (before, new) if d.kind == ROWS]
    kinds = {before.kind, new.kind}
    if before == new:
        return before
    if with_rows and _aligned(with_rows) and COUPLED not in kinds \
            and not any(d.filled in STATISTICS for d in (before, new)):
        return with_rows[0]._replace(filled=None)
    return UNIFORM[_combined(kinds) if kinds <= set(STATISTICS + (CONSTANT,)) else COUPLED]
