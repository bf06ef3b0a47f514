"""Indexing, joining and splitting."""
import theano
from theano.gof.graph import ancestors
from theano.tensor import basic, extra_ops, subtensor
from theano.tensor.type_other import NoneTypeT, SliceType

from ..dependence import CONSTANT, COUNT, PLACES, ROWS, SIZES, STATISTICS, UNIFORM, rows, sizes
from .base import DRAWS, aligned, combined, constant, elements_of, indices, rule


def _is_whole(entry):
    return isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None and entry.step in (None, 1)


@rule(subtensor.Subtensor)
def _subtensor(analysis, node, inputs):
    x, entries = inputs[0], indices(node, 1)
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
        if all(d.kind == CONSTANT for d in inputs[1:]):
            return x
        # As many of the random numbers as there are samples: any would do.
        return rows() if x.kind == CONSTANT and _takes_first(entries, inputs[1:]) and _is_drawn(node.inputs[0]) \
            else analysis.couple(node)
    if any(d.kind != CONSTANT for d in inputs[1:]):
        return analysis.couple(node)
    if x.axis < len(entries) and not _is_whole(entries[x.axis]):
        return analysis.couple(node, 'picks samples by their place in the batch')
    return x._replace(axis=x.axis - sum(not isinstance(entry, slice) for entry in entries[:x.axis]))


def _takes_first(entries, numbers):
    """Whether an index is ``[:n]`` with a multiple n of the number of samples."""
    first = entries[0]
    return [d.kind for d in numbers] == [COUNT] and isinstance(first, slice) and first.start in (None, 0) \
        and isinstance(first.stop, theano.Variable) and first.step in (None, 1) and all(map(_is_whole, entries[1:]))


def _is_drawn(variable):
    return any(v.owner and isinstance(v.owner.op, DRAWS) for v in ancestors([variable]))


@rule(subtensor.IncSubtensor)
def _inc_subtensor(analysis, node, inputs):
    x, y, entries = inputs[0], inputs[1], indices(node, 2)
    kinds = [x.kind, y.kind]
    if set(kinds) <= set(STATISTICS + (CONSTANT,)) and all(d.kind == CONSTANT for d in inputs[2:]):
        return UNIFORM[combined(kinds)]
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
    if any(d.kind != ROWS for d in varying) or varying and not aligned(varying):
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
        if not aligned(with_rows) or axis is None or int(axis) % node.outputs[0].ndim == with_rows[0].axis \
                or any(d.kind not in (ROWS, CONSTANT) for d in parts):
            return analysis.couple(node)
        return rows(with_rows[0].axis, merged=with_rows[0].merged)
    if node.outputs[0].ndim == 1:
        pieces = [elements_of(v, d) for v, d in zip(node.inputs[1:], parts)]
        if None not in pieces:
            return sizes([d for piece in pieces for d, _ in piece])
    kinds = [d.kind for d in parts]
    return UNIFORM[combined(kinds)] if set(kinds) <= set(STATISTICS + (CONSTANT,)) else analysis.couple(node)


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
