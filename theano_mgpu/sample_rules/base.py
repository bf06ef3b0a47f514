"""What the rules share: their registry, what is known of a number, sums and products of kinds."""
import theano
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor
from theano.tensor.raw_random import RandomFunction

from ..dependence import CONSTANT, COUNT, MEAN, MIXED, SCALED, SIZES, SUM
from ..op_rules import OpRules

LINEAR = (scalar.Add, scalar.Sub)
DRAWS = (mrg_uniform_base, RandomFunction)
RULES = OpRules()
rule = RULES.rule  # for functions ``(analysis, node, inputs) -> Dependence or list``


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
        place = constant(indices(variable.owner, 1)[0])
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
    length = length_of(vector)
    if length is None or not -length <= i < length:
        return None
    i %= length
    op, inputs = (vector.owner.op, vector.owner.inputs) if vector.owner else (None, ())
    if isinstance(vector, theano.Constant):
        return vector.data[i]
    if isinstance(op, opt.MakeVector):
        return constant(inputs[i])
    if isinstance(op, compile_ops.Shape):
        return length_of(inputs[0]) if inputs[0].ndim == 1 else None
    if isinstance(op, elemwise.Elemwise):
        return _computed(op.scalar_op, [lambda v=v: _element(v, i) if length_of(v) == length else constant(v)
                                        for v in inputs])
    if isinstance(op, basic.Join):
        for piece in inputs[1:]:
            if i < length_of(piece):
                return _element(piece, i)
            i -= length_of(piece)
    return None


def length_of(vector):
    """The length that a vector is known to have, else None."""
    try:
        return T.get_vector_length(vector)
    except (ValueError, TypeError):
        pass
    lengths = [length_of(v) for v in vector.owner.inputs if v.ndim == 1] if vector.owner else []
    if not lengths or None in lengths:
        return None
    if isinstance(vector.owner.op, elemwise.Elemwise):
        return max(lengths)
    return sum(lengths) if isinstance(vector.owner.op, basic.Join) else None


def combined(kinds, variables=None):
    """Kind of a sum or difference; zeros do not count."""
    if variables:
        kinds = [kind for kind, v in zip(kinds, variables) if kind != CONSTANT or constant(v) != 0]
    kinds = set(kinds)
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= {MEAN, CONSTANT}:
        return MEAN
    return SUM if kinds <= {SUM, COUNT} else MIXED


def product(kinds):
    varying = [kind for kind in kinds if kind != CONSTANT]
    if len(varying) == 1:
        return varying[0]
    return {(COUNT, MEAN): SUM, (COUNT, SUM): SCALED}.get(tuple(sorted(varying)))


def elements_of(variable, dependence, length=None):
    """(Dependence, number or None) of each element of a vector of sizes; None if its length is not known."""
    length = length or len(dependence.elements) or length_of(variable)
    if length is None:
        return None
    found = dependence.elements if dependence.kind == SIZES else [dependence] * length
    return [(d, constant(variable[i]) if d.kind == CONSTANT else None) for i, d in enumerate(found)]


def indices(node, skip):
    """Entries of a basic index, numbers where they are known."""
    found = []
    for entry in subtensor.get_idx_list(node.inputs[skip - 1:], node.op.idx_list):
        if isinstance(entry, slice):
            entry = slice(*[part if part is None else constant(part) if constant(part) is not None else part
                            for part in (entry.start, entry.stop, entry.step)])
        found.append(entry)
    return found


def aligned(dependences):
    """Whether samples lie along the same axis of all, and in the same order."""
    return len({(d.axis, d.merged) for d in dependences}) == 1
