"""The rules of `samples`: for each op, how its outputs depend on the samples if its inputs do."""
import numpy as np
import theano
import theano.tensor as T
from theano import sparse
from theano.compile import ops as compile_ops
from theano.gof.graph import ancestors
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

from . import graph
from .dependence import CONSTANT, COUNT, COUPLED, MEAN, MIXED, ROWS, SIZES, SUM, UNIFORM, rows, sizes

STATISTICS = (COUNT, SUM, MEAN, MIXED)
LINEAR = (scalar.Add, scalar.Sub)
_RULES = {}


def outcome(analysis, node, inputs):
    """Dependence of a node's outputs: one for all, or a list."""
    if all(d.kind == CONSTANT for d in inputs):
        return UNIFORM[CONSTANT]
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
    """The number that a variable is known to be, else None."""
    try:
        return T.get_scalar_constant_value(variable)
    except (T.NotScalarConstantError, TypeError):
        return _folded(variable) if variable.owner else None


def _folded(variable):
    """The value of index arithmetic that Theano folds only when it optimises; None if it is not constant."""
    lengths = {v: T.constant([_vector_length(v.owner.inputs[0])], dtype=v.dtype) for v in ancestors([variable])
               if v.owner and isinstance(v.owner.op, compile_ops.Shape) and _vector_length(v.owner.inputs[0])}
    variable, = graph.substitute([variable], lengths)
    if not all(v.owner or isinstance(v, theano.Constant) for v in ancestors([variable])):
        return None
    return theano.function([], variable, mode=theano.Mode('py', None))()


def _vector_length(variable):
    """Length of a vector that was made of scalars, else None."""
    while variable.owner and isinstance(variable.owner.op, elemwise.Elemwise):
        variable = variable.owner.inputs[0]
    return len(variable.owner.inputs) if variable.owner and isinstance(variable.owner.op, opt.MakeVector) else None


# --- elementwise ---------------------------------------------------------------------------------

@rule(compile_ops.Rebroadcast, compile_ops.SpecifyShape, compile_ops.ViewOp, compile_ops.DeepCopyOp,
      basic.ScalarFromTensor, basic.TensorFromScalar, theano.printing.Print, opt.Assert, DisconnectedGrad, GradClip,
      ZeroGrad, sparse.DenseFromSparse, sparse.SparseFromDense, bn.AbstractBatchNormInference)
def _first(analysis, node, inputs):
    return inputs[0]


@rule(elemwise.Elemwise)
def _elemwise(analysis, node, inputs):
    op = node.op.scalar_op
    if isinstance(op, scalar.Second):  # fill: the second input, in the shape of the first
        return _filled(inputs, node.inputs) if inputs[0].kind == ROWS else inputs[1]
    if isinstance(op, (scalar.Identity, scalar.Cast)) and (inputs[0].kind in (COUNT, SIZES) or not _rounds(node)):
        return inputs[0]
    with_rows = [d for d in inputs if d.kind == ROWS]
    if with_rows:
        return _elemwise_of_rows(analysis, node, inputs, with_rows)
    if any(d.kind == SIZES for d in inputs):
        return _elemwise_of_sizes(analysis, node, inputs)
    return _of_statistics(analysis, node, inputs)


def _filled(inputs, variables):
    rows_, value = inputs
    if value.kind == ROWS:
        return value
    return rows_._replace(filled=value.kind if variables[1].type.broadcastable[rows_.axis] else None)


def _rounds(node):
    """Whether a cast makes whole numbers of others; counts are whole."""
    if isinstance(node.op.scalar_op, scalar.Identity):
        return False
    kinds = [np.dtype(v.dtype).kind for v in (node.inputs[0], node.outputs[0])]
    return kinds[0] == 'f' and kinds[1] != 'f'


def _elemwise_of_rows(analysis, node, inputs, with_rows):
    axis, merged = with_rows[0].axis, max(d.merged for d in with_rows)
    same_axis = len({d.axis for d in with_rows}) == 1
    if same_axis and all(d.filled or d.kind != ROWS and v.type.broadcastable[axis]
                         for d, v in zip(inputs, node.inputs)):
        kinds = [UNIFORM[d.filled or d.kind] for d in inputs if (d.filled or d.kind) != SIZES]
        return rows(axis, _of_statistics(analysis, node, kinds).kind, merged)
    if not same_axis or any(d.filled in STATISTICS or d.kind in STATISTICS + (SIZES,) for d in inputs):
        # Pairs of samples, or rows against a number that is another one on each replica.
        analysis.couple(node)
    return rows(axis, None, merged)


def _elemwise_of_sizes(analysis, node, inputs):
    lengths = {len(d.elements) for d in inputs if d.kind == SIZES}
    if len(lengths) > 1 or node.outputs[0].ndim != 1:
        return UNIFORM[COUPLED]
    elements = [[d.elements[i] if d.kind == SIZES else d for d in inputs] for i in range(lengths.pop())]
    return sizes([_of_statistics(None, node, element) for element in elements])


def _of_statistics(analysis, node, inputs):
    """Dependence of an elementwise function of sums, means and constants."""
    op, kinds = node.op.scalar_op, [d.kind for d in inputs]
    if set(kinds) == {CONSTANT}:
        return UNIFORM[CONSTANT]
    found = None
    if COUPLED in kinds:
        return UNIFORM[COUPLED]
    if isinstance(op, LINEAR):
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
    if found is None and analysis is not None and any(np.dtype(v.dtype).kind == 'f' for v in node.inputs):
        return analysis.couple(node)
    return UNIFORM[found or COUPLED]


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
    if x.kind == SIZES or x.kind != ROWS:
        return UNIFORM[CONSTANT]
    return sizes([UNIFORM[COUNT if i == x.axis else CONSTANT] for i in range(node.inputs[0].ndim)])


@rule(compile_ops.Shape_i)
def _shape_i(analysis, node, inputs):
    return UNIFORM[COUNT if inputs[0].kind == ROWS and node.op.i == inputs[0].axis else CONSTANT]


@rule(opt.MakeVector)
def _make_vector(analysis, node, inputs):
    if any(d.kind == ROWS for d in inputs):
        return analysis.couple(node)
    return sizes(inputs)


def _elements(variable, dependence, length=None):
    """(Dependence, number or None) of each element of a vector of sizes; None if its length is not known."""
    try:
        length = length or len(dependence.elements) or T.get_vector_length(variable)
    except ValueError:
        return None
    found = dependence.elements if dependence.kind == SIZES else [dependence] * length
    return [(d, constant(variable[i]) if d.kind == CONSTANT else None) for i, d in enumerate(found)]


@rule(basic.Reshape)
def _reshape(analysis, node, inputs):
    x, shape = inputs
    if x.kind != ROWS:
        return analysis.couple(node) if x.kind == CONSTANT and shape.kind == COUPLED else x
    if node.op.ndim == 0:
        return analysis.couple(node)
    elements = _elements(node.inputs[1], shape, node.op.ndim)
    # The first size that stands for samples: a multiple of their number, or -1 for what is left.
    axis = next((i for i, (d, n) in enumerate(elements) if d.kind == COUNT or n == -1), None)
    before = [n for _, n in elements[:axis]]
    if axis is None:
        return rows(x.axis, x.filled, x.merged) if node.op.ndim == 1 and x.axis == 0 else analysis.couple(node)
    if all(n == 1 for n in before) and x.axis == 0 and not x.merged:
        return rows(axis, x.filled)
    if axis == x.merged or axis > 0 and x.axis > 0:
        return rows(axis, x.filled)
    if axis == 0:
        return rows(0, x.filled, x.merged or x.axis)
    return analysis.couple(node)


@rule(basic.Flatten)
def _flatten(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or x.axis < node.op.outdim - 1:
        return x
    return rows(node.op.outdim - 1, x.filled, x.axis - node.op.outdim + 1 + x.merged)


@rule(elemwise.DimShuffle)
def _dimshuffle(analysis, node, inputs):
    x, order = inputs[0], list(node.op.new_order)
    if x.kind == SIZES:
        return x if order == [0] else UNIFORM[COUPLED]
    if x.kind != ROWS:
        return x
    return x._replace(axis=order.index(x.axis)) if x.axis in order else analysis.couple(node)


@rule(basic.Alloc, basic.AllocEmpty)
def _alloc(analysis, node, inputs):
    value, shape = (inputs[0], inputs[1:]) if isinstance(node.op, basic.Alloc) else (UNIFORM[CONSTANT], inputs)
    if value.kind == ROWS:
        return value._replace(axis=value.axis + node.outputs[0].ndim - node.inputs[0].ndim)
    axes = [i for i, d in enumerate(shape) if d.kind != CONSTANT]
    if not axes:
        return value
    if len(axes) > 1 or shape[axes[0]].kind != COUNT or value.kind != CONSTANT:
        return analysis.couple(node)
    broadcastable = node.inputs[0].type.broadcastable if isinstance(node.op, basic.Alloc) else ()
    own_axis = axes[0] - len(shape) + len(broadcastable)
    return rows(axes[0], CONSTANT if own_axis < 0 or broadcastable[own_axis] else None)


@rule(basic.ARange)
def _arange(analysis, node, inputs):
    return rows() if inputs[1].kind == COUNT and inputs[0].kind == inputs[2].kind == CONSTANT \
        else analysis.couple(node)


@rule(mrg_uniform_base, RandomFunction)
def _draw(analysis, node, inputs):
    elements = inputs[1].elements if inputs[1].kind == SIZES else [inputs[1]] * node.outputs[1].ndim
    axes = [i for i, d in enumerate(elements) if d.kind == COUNT] + [d.axis for d in inputs[2:] if d.kind == ROWS]
    if len(set(axes)) != 1:
        return [UNIFORM[CONSTANT], analysis.couple(node)]
    return [UNIFORM[CONSTANT], rows(axes[0])]


# --- reductions ----------------------------------------------------------------------------------

@rule(elemwise.CAReduce)
def _reduce(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis] if ndim else []
    adds = isinstance(node.op.scalar_op, scalar.Add)
    if x.kind == SIZES:
        kinds = [d.kind for d in x.elements]
        return UNIFORM[(_combined(kinds) if adds else _product(kinds)) or COUPLED]
    if x.kind != ROWS:
        return x if adds or not len(axes) or x.kind in (CONSTANT, COUPLED) else analysis.couple(node)
    if x.axis not in axes:
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes))
    if not adds:
        analysis.couple(node, 'takes the %s over samples' % type(node.op.scalar_op).__name__.lower())
        return UNIFORM[COUPLED]
    return UNIFORM[(_product([x.filled, COUNT]) or COUPLED) if x.filled else SUM]


@rule(basic.MaxAndArgmax, basic.Argmax)
def _argmax(analysis, node, inputs):
    x, ndim = inputs[0], node.inputs[0].ndim
    axes = range(ndim) if node.op.axis is None else [axis % ndim for axis in node.op.axis]
    if x.kind == ROWS and x.axis not in axes:
        return x._replace(axis=x.axis - sum(axis < x.axis for axis in axes), filled=None)
    analysis.couple(node, 'takes the maximum over samples')
    return UNIFORM[COUPLED]


@rule(extra_ops.CumOp, SortOp, ArgSortOp, TopKOp)
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
    return rows() if all(d.kind == CONSTANT or d.kind == ROWS and d.axis == 0 for d in inputs) \
        else analysis.couple(node)


@rule(bn.AbstractBatchNormTrain)
def _batch_normalisation(analysis, node, inputs):
    x = inputs[0]
    if x.kind != ROWS or x.axis not in node.op.axes:
        return x
    analysis.couple(node, 'normalises each sub-batch by its own statistics')
    # Of inverse deviations `statistics.BatchUpdates` makes that of the whole batch.
    return [x, UNIFORM[MEAN]] + [UNIFORM[COUPLED]] * (len(node.outputs) - 2)


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
    return rows(0, None, max(d.merged for d in inputs)) if all(d.kind == ROWS and d.axis == 0 for d in inputs) \
        else analysis.couple(node)


@rule(abstract_conv.BaseAbstractConv)
def _convolution(analysis, node, inputs):
    backwards = isinstance(node.op, abstract_conv.AbstractConv_gradInputs)
    image, kernel = (inputs[1], inputs[0]) if backwards else inputs[:2]
    if image.kind == ROWS and image.axis == 0 and kernel.kind == CONSTANT:
        return rows(0, None, image.merged)
    return analysis.couple(node)


@rule(pool.Pool, neighbours.Images2Neibs)
def _pool(analysis, node, inputs):
    return rows(0, inputs[0].filled, inputs[0].merged) if inputs[0].kind == ROWS and inputs[0].axis == 0 \
        else analysis.couple(node)


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
            parts = [part if part is None else int(part) for part in (entry.start, entry.stop, entry.step)]
            return sizes(x.elements[slice(*parts)])
        number = constant(entry)
        return UNIFORM[COUPLED] if number is None else x.elements[int(number)]
    if x.kind != ROWS:
        return x if all(d.kind in (CONSTANT, COUNT) for d in inputs[1:]) else analysis.couple(node)
    if any(d.kind != CONSTANT for d in inputs[1:]):
        return analysis.couple(node)
    if x.axis < len(entries) and not _is_whole(entries[x.axis]):
        return analysis.couple(node, 'picks samples by their place in the batch')
    return x._replace(axis=x.axis - sum(not isinstance(entry, slice) for entry in entries[:x.axis]))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(analysis, node, inputs):
    x, y, entries = inputs[0], inputs[1], _indices(node, 2)
    if ROWS not in (x.kind, y.kind) or any(d.kind not in (CONSTANT, ROWS) for d in inputs):
        return analysis.couple(node)
    if y.kind == ROWS:
        kept = [i for i, entry in enumerate(entries) if isinstance(entry, slice)]
        kept += range(len(entries), node.inputs[0].ndim)
        axis = kept[y.axis + len(kept) - node.inputs[1].ndim]
    else:
        axis = x.axis
    if (x.kind == ROWS and x.axis != axis) or (axis < len(entries) and not _is_whole(entries[axis])):
        return analysis.couple(node)
    return rows(axis, None, max(x.merged, y.merged))


@rule(subtensor.AdvancedSubtensor1)
def _take(analysis, node, inputs):
    x, index = inputs
    if x.kind == CONSTANT:
        return index._replace(filled=None)
    if x.kind == ROWS and x.axis > 0 and index.kind == CONSTANT:
        return x
    return analysis.couple(node, 'picks samples by their place in the batch')


@rule(subtensor.AdvancedSubtensor)
def _advanced_subtensor(analysis, node, inputs):
    x, indices = inputs[0], list(zip(node.inputs[1:], inputs[1:]))
    varying = [d for _, d in indices if d.kind != CONSTANT]
    if any(d.kind != ROWS or d.axis != varying[0].axis for d in varying):
        return analysis.couple(node)
    arrays = [i for i, (v, _) in enumerate(indices) if not isinstance(v.type, (SliceType, NoneTypeT))]
    if x.kind == CONSTANT and arrays == list(range(len(arrays))):
        return rows(varying[0].axis)
    if x.kind == ROWS and x.axis == 0 and varying and _counts_samples(indices[0][0]) and varying[0].axis == 0:
        return rows()
    if x.kind == ROWS and not varying and x.axis < len(indices) and _is_whole(_slice_of(indices[x.axis][0])) \
            and x.axis < arrays[0]:
        return x._replace(filled=None)
    return analysis.couple(node, 'picks samples by their place in the batch')


def _counts_samples(index):
    """Whether an index is 0, 1, 2 ..., up to the number of samples."""
    return bool(index.owner) and isinstance(index.owner.op, basic.ARange)


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
    x = inputs[0]
    if x.kind == ROWS and x.axis == 0 and _counts_samples(node.inputs[2]) \
            and all(d.kind == CONSTANT or d.kind == ROWS and d.axis == 0 for d in inputs[1:]):
        return rows()
    return analysis.couple(node)


@rule(basic.Join)
def _join(analysis, node, inputs):
    axis, parts = constant(node.inputs[0]), inputs[1:]
    if any(d.kind == ROWS for d in parts):
        axes = {d.axis for d in parts if d.kind == ROWS}
        if len(axes) > 1 or axis is None or int(axis) % node.outputs[0].ndim in axes \
                or any(d.kind not in (ROWS, CONSTANT) for d in parts):
            return analysis.couple(node)
        return rows(axes.pop(), merged=max(d.merged for d in parts))
    if node.outputs[0].ndim == 1:
        pieces = [_elements(v, d) for v, d in zip(node.inputs[1:], parts)]
        return UNIFORM[COUPLED] if None in pieces else sizes([d for piece in pieces for d, _ in piece])
    kinds = {d.kind for d in parts}
    return parts[0] if len(kinds) == 1 else UNIFORM[_combined([d.kind for d in parts])] \
        if kinds <= set(STATISTICS + (CONSTANT,)) else UNIFORM[COUPLED]


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
    first, second = pair
    if first.kind == second.kind:
        return first._replace(filled=first.filled if first.filled == second.filled else None)
    if ROWS in (first.kind, second.kind):
        return next(d for d in pair if d.kind == ROWS)._replace(filled=None)
    return UNIFORM[COUPLED if COUPLED in (first.kind, second.kind) else _combined([first.kind, second.kind])]


@rule(Scan)
def _scan(analysis, node, inputs):
    """What is inside a loop: slices of the sequences and states have one axis less, the time."""
    op, of = node.op, dict(zip(node.inputs, inputs))

    def step(variable):
        d = of[variable]
        return d._replace(axis=d.axis - 1) if d.kind == ROWS and d.axis > 0 else \
            UNIFORM[COUPLED] if d.kind == ROWS else d
    outer_states = op.outer_mitmot(node) + op.outer_mitsot(node) + op.outer_sitsot(node)
    inner_states = op.inner_mitmot(op.inputs) + op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs)
    known = dict(zip(op.inner_seqs(op.inputs), map(step, op.outer_seqs(node))))
    known.update(zip(op.inner_non_seqs(op.inputs), (of[v] for v in op.outer_non_seqs(node))))
    known.update(zip(op.inner_shared(op.inputs), (of[v] for v in op.outer_shared(node))))
    slices = iter(inner_states)
    groups = [[next(slices) for _ in tap] for tap in op.tap_array[:len(outer_states)]]
    for outer, group in zip(outer_states, groups):
        known.update(dict.fromkeys(group, step(outer)))
    new_states = op.inner_mitsot_outs(op.outputs) + op.inner_sitsot_outs(op.outputs)
    recurrent = groups[len(op.outer_mitmot(node)):]
    for _ in range(len(recurrent) + 2):  # a state depends on what it became a step before
        inside = type(analysis)(op.outputs, known)
        before = dict(known)
        for group, new in zip(recurrent, new_states):
            known.update(dict.fromkeys(group, _grown(known[group[0]], inside.of(new))))
        if known == before:
            break
    for coupling in inside.couplings:
        analysis.couple(node, coupling.reason + ' (inside a loop over time)')
    found = {}
    for outs in (op.inner_mitsot_outs, op.inner_sitsot_outs, op.inner_nitsot_outs):
        for variable in outs(op.outputs):
            d = inside.of(variable)
            found[variable] = d._replace(axis=d.axis + 1) if d.kind == ROWS else d
    ordered = [found[v] for outs in (op.inner_mitsot_outs, op.inner_sitsot_outs, op.inner_nitsot_outs)
               for v in outs(op.outputs)]
    n_mitmot = len(op.outer_mitmot(node))
    shared = [inside.of(v) for v in op.inner_shared_outs(op.outputs)]
    return [UNIFORM[COUPLED]] * n_mitmot + ordered + shared


def _grown(before, new):
    """Dependence of a state that starts as one and becomes another."""
    if before.kind == CONSTANT or before.kind == new.kind:
        return new._replace(filled=new.filled if before.filled == new.filled else None) if new.kind == ROWS else new
    return new if new.kind == ROWS else before
