"""Nodes of the graph that replicas compute on their shards, with the stage of each, and exchanges between stages."""
import theano.tensor as T
from theano.tensor.elemwise import Elemwise
from theano.tensor.opt import Assert

from ..errors import GraphError
from .reductions import STACK, Elementwise
from .sizes import size_of
from .states import CONSTANT, FREE, NUMBER, ROWS, WHOLE, State, Value, rows

NOT_DIVISIBLE = 'this batch cannot be divided: '  # how the message of a check begins that fails in a step
OTHER_LENGTH = NOT_DIVISIBLE + 'a value that meets the samples has not as many rows as there are samples'


class CannotCut(GraphError):
    """A graph cannot be computed exactly from shards; the text names the op and the reason."""


class ShardGraph:
    """The graph that replicas compute, as it is built.

    Attributes
    ----------
    total, own, first : int64 scalar theano.Variable
        Further inputs of the replicas: samples of the whole batch, those of the replica, and the place of the first
        one.
    stages : dict of theano.Variable to int
        The stage that computes a variable of this graph.
    constants : set of theano.Variable
        Those of this graph that each replica computes alike.
    exchanges : dict of theano.Variable to (theano.Variable, Reduction)
        The placeholder of each exchanged value, to the value that each replica gives, and how they are reduced.
    carried : dict of theano.Variable to theano.Variable
        What stands for a value in a later stage, to the value of the stage that computes it.
    """

    def __init__(self, numbers=None):
        self.numbers = numbers or [T.lscalar(name) for name in ('samples', 'own samples', 'first sample')]
        self.total, self.own, self.first = self.numbers
        self.exchanges, self.carried, self.stages, self.constants = {}, {}, {}, set()
        self._placeholders = {}   # of exchanged and of carried values
        self._portion = None      # Value of the replica's portion of the samples
        self._everywhere = set(self.numbers)

    def constant(self, node, values):
        """The Values of a node of constants, computed whole by every replica."""
        sizes = [value.state.size for value in values]
        size = size_of(node, sizes) if any(size is not None for size in sizes) else None
        return self.apply(node, values, State(CONSTANT, size=size))

    def apply(self, node, values, state):
        """The Values of a node's op on these values, all of one state or each of its own."""
        stage = max([value.stage for value in values], default=FREE)
        inputs = [self.at(value, stage) for value in values]
        if inputs == node.inputs:
            outputs = node.outputs
        else:
            outputs = [_of_type(new, old) for new, old in
                       zip(node.clone_with_new_inputs(inputs, strict=False).outputs, node.outputs)]
        states = state if isinstance(state, list) else [state] * len(outputs)
        return [self._made(variable, each, stage) for variable, each in zip(outputs, states)]

    def make(self, function, values, state, like=None):
        """The Value of ``function(*variables)``; `like` is the variable of the given graph whose type it has."""
        stage = max([value.stage for value in values], default=FREE)
        variable = function(*[self.at(value, stage) for value in values])
        return self._made(variable if like is None else _of_type(variable, like), state, stage)

    def make_all(self, function, values, states):
        """The Values of what a function makes, each of its own state."""
        stage = max([value.stage for value in values], default=FREE)
        return [self._made(variable, state, stage)
                for variable, state in zip(function(*[self.at(value, stage) for value in values]), states)]

    def _made(self, variable, state, stage):
        self.stages.setdefault(variable, stage)
        if state.kind == CONSTANT:
            self.constants.add(variable)
        return Value(variable, state, stage)

    def at(self, value, stage):
        """A variable for a value in a stage: itself, or a placeholder for what an earlier stage has computed."""
        if value.stage in (FREE, stage) or self.is_everywhere(value.variable):
            return value.variable
        key = value.variable, stage
        if key not in self._placeholders:
            placeholder = self._placeholders[key] = value.variable.type(value.variable.name)
            self.carried[placeholder] = value.variable
            self.stages[placeholder] = stage
        return self._placeholders[key]

    def is_everywhere(self, variable):
        """Whether a variable of the new graph is known in each stage."""
        stage = self.stages.get(variable)  # None within an expression that a rule has made
        return variable in self._everywhere or stage == FREE or stage is None and variable.owner is None

    def shaped_like(self, value):
        """A value that may hold other numbers, but has the shape of this one, as early as can be.

        It is rows if this one is, else CONSTANT.
        """
        variable = self._earliest(value.variable)
        state = value.state if value.kind == ROWS else WHOLE
        return Value(variable, state, self.stages.get(variable, value.stage))

    def _earliest(self, variable):
        if variable in self.carried:
            return self._earliest(self.carried[variable])
        if variable in self.exchanges and isinstance(self.exchanges[variable][1], Elementwise):
            return self._earliest(self.exchanges[variable][0])
        if variable.owner and isinstance(variable.owner.op, Elemwise):
            alike = [self._earliest(v) for v in variable.owner.inputs if v.broadcastable == variable.broadcastable]
            return min(alike + [variable], key=lambda v: self.stages.get(v, FREE if v.owner is None else 0))
        return variable

    def stacked(self, value):
        """What each shard has, along a new axis 0 in the order of the samples, as a CONSTANT."""
        return self.exchange(value, STACK)

    def portions(self):
        """Of the samples of the whole batch, the portion that each shard has: a vector of float64, as a CONSTANT."""
        if self._portion is None:
            self._portion = self._made(self.portion, WHOLE, 0)
        return self.stacked(self._portion)

    @property
    def portion(self):
        """The portion of the samples of the whole batch that the replica has."""
        return T.cast(self.own, 'float64') / T.cast(self.total, 'float64')

    def exchange(self, value, reduction):
        """A CONSTANT made of what all replicas have of a value, reduced or gathered."""
        key = value.variable, reduction
        if not isinstance(value.variable.type, T.TensorType):
            raise CannotCut('%s: only tensors are exchanged, not %s' % (value.variable, value.variable.type))
        if key not in self._placeholders:
            kind = value.variable.type
            if reduction == STACK:
                kind = kind.clone(broadcastable=(False,) + kind.broadcastable)
            placeholder = self._placeholders[key] = kind(value.variable.name)
            self.exchanges[placeholder] = key
            self.stages[placeholder] = value.stage + 1
        placeholder = self._placeholders[key]
        # It, or its length, may depend on the number of samples.
        return Value(placeholder, State(CONSTANT, size=NUMBER), self.stages[placeholder])

    def length(self, variable):
        """Return the Value of the `outer` length of rows."""
        return Value(variable, WHOLE, self.stages.get(variable, FREE))

    def cut(self, value, axis, outer=None, widens=False):
        """The replica's rows of a CONSTANT that has the whole batch along an axis; or one row for all, if it `widens`.

        A CONSTANT of another length is an error when the batch comes, as it is on one device.
        """
        if outer is not None:
            return self.make(lambda variable, blocks: _cut_inner(variable, axis, blocks, self),
                             [value, self.length(outer)], rows(axis, outer), like=value.variable)

        def cut(variable):
            length = variable.shape[axis]
            each = length // self.total
            fits, stop = T.eq(each * self.total, length), (self.first + self.own) * each
            if widens:  # NumPy broadcasts a length of 1 that Theano does not know of
                fits, stop = T.or_(fits, T.eq(length, 1)), T.switch(T.eq(each, 0), length, stop)
            first = Assert(OTHER_LENGTH)(self.first * each, fits)
            return variable[(slice(None),) * axis + (slice(first, stop),)]
        return self.make(cut, [value], rows(axis, outer), like=value.variable)


def _cut_inner(variable, axis, outer, shards):
    """The rows of the samples out of an axis that has `outer` blocks of the whole batch, one after the other."""
    blocks = split_axis(variable, axis, outer)
    each = blocks.shape[axis + 1] // shards.total
    first = Assert(OTHER_LENGTH)(shards.first * each, T.eq(outer * each * shards.total, variable.shape[axis]))
    cut = blocks[(slice(None),) * (axis + 1) + (slice(first, (shards.first + shards.own) * each),)]
    return merge_axis(cut, axis)


def split_axis(variable, axis, blocks):
    """An axis as two: blocks, and what each of them has."""
    shape = [variable.shape[i] for i in range(variable.ndim)]
    return variable.reshape(shape[:axis] + [blocks, shape[axis] // blocks] + shape[axis + 1:], ndim=variable.ndim + 1)


def merge_axis(variable, axis):
    """An axis and the next one as one."""
    shape = [variable.shape[i] for i in range(variable.ndim)]
    return variable.reshape(shape[:axis] + [shape[axis] * shape[axis + 1]] + shape[axis + 2:], ndim=variable.ndim - 1)


def _of_type(new, old):
    """A rebuilt variable with the static lengths of 1 that sizes computed anew do not show."""
    if not isinstance(old.type, T.TensorType) or new.type == old.type:
        return new
    return T.patternbroadcast(new, old.broadcastable) if new.broadcastable != old.broadcastable else new
