"""Compute again in a later stage what is cheaper to compute than to carry there."""
from theano.compile import ops as compile_ops
from theano.gof.graph import io_toposort
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor

from ..analysis import FREE, Value

CHEAP = (elemwise.DimShuffle, subtensor.Subtensor, compile_ops.Shape, compile_ops.Shape_i, opt.MakeVector, opt.Assert,
         basic.ScalarFromTensor, basic.TensorFromScalar, basic.Reshape, basic.Alloc, compile_ops.Rebroadcast)
CHEAP_SCALAR = (scalar.Add, scalar.Sub, scalar.Mul, scalar.TrueDiv, scalar.IntDiv, scalar.Neg, scalar.Sqr, scalar.Sqrt,
                scalar.Inv, scalar.Abs, scalar.Sgn, scalar.Second, scalar.Identity, scalar.Cast, scalar.Switch,
                scalar.Clip, scalar.Maximum, scalar.Minimum, scalar.LogicalComparison, scalar.AND, scalar.OR,
                scalar.Invert)
DEEPEST = 12  # ops in a row that are computed again


def is_cheap(node):
    """Whether a node is a view, a shape, or simple arithmetic of each element."""
    if isinstance(node.op, elemwise.Elemwise):
        return isinstance(node.op.scalar_op, CHEAP_SCALAR)
    return isinstance(node.op, CHEAP)


class Carrying:
    """What a stage computes again from what it has, and what else is carried into it.

    Parameters
    ----------
    shards : Shards
    stage : int
    carried : dict of theano.Variable to theano.Variable
        Placeholders of the stage to the values of earlier stages that they stand for.

    Attributes
    ----------
    carried : dict of theano.Variable to theano.Variable
        Those that remain, and maybe others that several values are made of.
    again : dict of theano.Variable to theano.Variable
        The other placeholders to what the stage computes instead.
    """

    def __init__(self, shards, stage, carried):
        self._shards, self._stage = shards, stage
        self._places = {source: place for place, source in carried.items()}  # of what is carried
        self._removed = []
        order = {variable: i for i, node in enumerate(io_toposort([], list(self._places)))
                 for variable in node.outputs}
        self._latest_first = sorted(self._places, key=lambda v: (shards.stages.get(v, FREE), order.get(v, -1)),
                                    reverse=True)
        self._remove()
        self._carry_what_several_are_made_of()
        self._made = {}
        self.again = {place: self._computed(source) for place, source in self._removed}
        self.carried = {place: source for source, place in self._places.items()}

    def _remove(self):
        for source in self._latest_first:
            if source in self._places and not self._missing(source):
                self._removed.append((self._places.pop(source), source))

    def _carry_what_several_are_made_of(self):
        made_of = {}
        for source in self._places:
            missing = self._missing(source)
            if len(missing) == 1:
                made_of.setdefault(missing.pop(), []).append(source)
        for variable, sources in made_of.items():
            if len(sources) > 1 and variable in self._shards.stages and {v.ndim for v in sources} == {variable.ndim}:
                value = Value(variable, None, self._shards.stages[variable])
                self._places[variable] = self._shards.at(value, self._stage)
        self._remove()

    def _missing(self, source):
        """What would have to be carried for a value to be computed again, itself where that is not cheap."""
        missing, seen = set(), set()
        # What is looked for bit by bit is computed once: compiled with other ops it may round differently.
        again = source.owner and is_cheap(source.owner) and source not in self._shards.compared
        todo = [(v, 1) for v in source.owner.inputs] if again else []
        if not todo:
            return {source}
        while todo:
            variable, depth = todo.pop()
            variable = self._shards.carried.get(variable, variable)
            if variable in seen or self._is_here(variable):
                continue
            seen.add(variable)
            if variable.owner and is_cheap(variable.owner) and depth < DEEPEST:
                todo += [(v, depth + 1) for v in variable.owner.inputs]
            else:
                missing.add(variable)
        return missing

    def _is_here(self, variable):
        return variable in self._places or self._shards.is_everywhere(variable)

    def _computed(self, variable):
        variable = self._shards.carried.get(variable, variable)
        if variable in self._places:
            return self._places[variable]
        if self._shards.is_everywhere(variable):
            return variable
        if variable not in self._made:
            new = variable.owner.clone_with_new_inputs([self._computed(v) for v in variable.owner.inputs])
            for old, made in zip(variable.owner.outputs, new.outputs):
                self._made[old] = made
        return self._made[variable]
