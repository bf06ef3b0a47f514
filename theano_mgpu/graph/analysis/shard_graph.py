"""Nodes of the graph that replicas compute on their shards, with the stage of each, and exchanges between stages."""
from __future__ import annotations

import functools
from typing import Any, Callable

import theano
import theano.tensor as T
from theano.tensor.elemwise import Elemwise
from theano.tensor.nnet.nnet import LogSoftmax, Softmax
from theano.tensor.opt import Assert

from ...errors import NOT_DIVISIBLE, GraphError, named
from ..traces import keep_trace
from .reductions import STACK, Elementwise, Reduction
from .sizes import size_of
from .states import CONSTANT, DEPENDENT, FREE, ROWS, WHOLE, State, Value, rows

# A condition on labels must not read the shape of a softmax: Theano makes one op of both and the cross-entropy.
SOFTMAX = Softmax, LogSoftmax
OTHER_LENGTH = NOT_DIVISIBLE + 'a value that meets the samples has not as many rows as there are samples'


class CannotCut(GraphError):
    """A graph cannot be computed exactly from shards; the text names the op and the reason."""


class ShardGraph:
    """The graph of the replicas while it is built.

    Attributes
    ----------
    total, own, first : int64 scalar theano.Variable
        Further inputs of the replicas: samples of the whole batch, samples of the replica, and the place of the first
        one.
    stages : dict of theano.Variable to int
        The stage that computes a variable of this graph.
    constants : set of theano.Variable
        The variables of this graph that each replica computes alike.
    exchanges : dict of theano.Variable to (theano.Variable, Reduction)
        The placeholder of each exchanged value, to the value of each replica, and its reduction.
    saved : dict of theano.Variable to theano.Variable
        The placeholder of a value in a later stage, to the value in the stage that computes it.
    """

    def __init__(self, numbers: list[theano.Variable] | None) -> None:
        self.numbers = numbers or [T.lscalar(name) for name in ('samples', 'own samples', 'first sample')]
        self.total, self.own, self.first = self.numbers
        self.exchanges: dict[theano.Variable, tuple[theano.Variable, Reduction]] = {}
        self.saved: dict[theano.Variable, theano.Variable] = {}
        self.stages: dict[theano.Variable, int] = {}
        self.constants: set[theano.Variable] = set()
        self._placeholders: dict[Any, theano.Variable] = {}  # of exchanged and of saved values
        self._everywhere = set(self.numbers)

    def constant(self, node: theano.Apply, values: list[Value]) -> list[Value]:
        """Return the Values of a node of constants, computed whole by every replica."""
        sizes = [value.state.size for value in values]
        size = size_of(node, sizes) if any(size is not None for size in sizes) else None
        return self.apply(node, values, State(CONSTANT, size=size))

    def apply(self, node: theano.Apply, values: list[Value], state: State | list[State]) -> list[Value]:
        """Return the Values of a node's op on these values, all of one state or each of its own."""
        states = state if isinstance(state, list) else [state] * len(node.outputs)

        def outputs(*inputs):
            if list(inputs) == node.inputs:
                return node.outputs
            return map(_of_type, node.clone_with_new_inputs(list(inputs), strict=False).outputs, node.outputs)
        return self.make_all(outputs, values, states)

    def make(self, function: Callable[..., Any], values: list[Value], state: State,
             like: theano.Variable | None = None) -> Value:
        """Return the Value of ``function(*variables)``; `like` is the variable of the given graph whose type it has."""
        def outputs(*inputs):
            variable = function(*inputs)
            return [variable if like is None else _of_type(variable, like)]
        return self.make_all(outputs, values, [state])[0]

    def make_all(self, function: Callable[..., Any], values: list[Value], states: list[State]) -> list[Value]:
        """Return the Value of each result of a function, each with its own state."""
        stage = max([self.stage(value.variable) for value in values], default=FREE)
        new = list(map(Value, function(*[self.at(value.variable, stage) for value in values]), states))
        for variable, state in new:
            self.stages.setdefault(variable, stage)
            if state.kind == CONSTANT:
                self.constants.add(variable)
        return new

    def stage(self, variable: theano.Variable) -> int:
        """Return the stage that computes a variable of this graph."""
        return self.stages.get(variable, FREE)

    def at(self, variable: theano.Variable, stage: int) -> theano.Variable:
        """Return a variable as a stage has it: itself, or a placeholder where an earlier stage computes it."""
        if self.stage(variable) in (FREE, stage) or self.is_everywhere(variable):
            return variable
        key = variable, stage
        if key not in self._placeholders:
            placeholder = self._placeholders[key] = variable.type(variable.name)
            keep_trace([placeholder], variable)
            self.saved[placeholder] = variable
            self.stages[placeholder] = stage
        return self._placeholders[key]

    def is_everywhere(self, variable: theano.Variable) -> bool:
        """Return whether a variable of the new graph is known in each stage."""
        stage = self.stages.get(variable)  # None within an expression that a rule has made
        return variable in self._everywhere or stage == FREE or stage is None and variable.owner is None

    def shaped_like(self, value: Value) -> Value:
        """Return the earliest value that has the shape of this one, whatever its numbers: ROWS, or else CONSTANT."""
        variable = self._earliest(value.variable)
        return Value(variable, value.state if value.kind == ROWS else WHOLE)

    def _earliest(self, variable):
        if variable in self.saved:
            return self._earliest(self.saved[variable])
        if variable in self.exchanges and isinstance(self.exchanges[variable][1], Elementwise):
            return self._earliest(self.exchanges[variable][0])
        if variable.owner and isinstance(variable.owner.op, SOFTMAX):
            return self._earliest(variable.owner.inputs[0])
        if variable.owner and isinstance(variable.owner.op, Elemwise):
            alike = [self._earliest(v) for v in variable.owner.inputs if v.broadcastable == variable.broadcastable]
            return min(alike + [variable], key=lambda v: self.stages.get(v, FREE if v.owner is None else 0))
        return variable

    @functools.cached_property
    def portion(self) -> theano.Variable:
        """The portion of the samples of the whole batch that the replica has, as float64."""
        return T.cast(self.own, 'float64') / T.cast(self.total, 'float64')

    def exchange(self, value: Value, reduction: Reduction) -> Value:
        """Return the values of all replicas, reduced or gathered, as a CONSTANT."""
        key = value.variable, reduction
        if not isinstance(value.variable.type, T.TensorType):
            raise CannotCut('%s: only tensors are exchanged, not %s' % (named(value.variable), value.variable.type))
        if key not in self._placeholders:
            source = value.variable if reduction != STACK else \
                self.make(lambda v: T.unbroadcast(T.shape_padleft(v), 0), [value], value.state).variable
            placeholder = self._placeholders[key] = source.type(value.variable.name)
            keep_trace([placeholder], value.variable)
            self.exchanges[placeholder] = source, reduction
            self.stages[placeholder] = max(0, self.stage(value.variable)) + 1
        # The value, or its length, may depend on the number of samples.
        return Value(self._placeholders[key], DEPENDENT)

    def outer(self, value: Value) -> list[Value]:
        """Return the Value of the `outer` length of rows in a list, which is empty for rows without one."""
        return [] if value.state.outer is None else [Value(value.state.outer, WHOLE)]

    def whole_length(self, x: theano.Variable, axis: int) -> theano.Variable:
        """Return the length of the axis of the samples of rows for the whole batch."""
        return x.shape[axis] // self.own * self.total

    def length(self, value: Value) -> Value:
        """Return the length of rows along their axis for the whole batch, as a CONSTANT."""
        return self.make(lambda x: self.whole_length(x, value.axis), [self.shaped_like(value)], WHOLE)

    def cut(self, value: Value, axis: int, outer: theano.Variable | None = None, length: Value | None = None) -> Value:
        """Return the replica's rows of a CONSTANT that has the whole batch along an axis.

        A CONSTANT of another length than `length`, or without as many rows of each sample, refuses the batch when it
        comes. One device raises an error then, takes the first rows, or takes one row for all samples.
        """
        def own_part(variable, *others):
            blocks, whole = 1 if outer is None else others[0], variable.shape[axis]
            each = whole // blocks // self.total
            fits = T.eq(whole, blocks * each * self.total if length is None else others[-1])
            first, stop = self.first * each, (self.first + self.own) * each
            if outer is not None:
                apart = split_axis(variable, axis, Assert(OTHER_LENGTH)(blocks, fits))
                return merge_axis(apart[(slice(None),) * (axis + 1) + (slice(first, stop),)], axis)
            return variable[(slice(None),) * axis + (slice(Assert(OTHER_LENGTH)(first, fits), stop),)]
        others = ([] if outer is None else [Value(outer, WHOLE)]) + ([] if length is None else [length])
        return self.make(own_part, [value] + others, rows(axis, outer), like=value.variable)


def split_axis(variable: theano.Variable, axis: int, blocks: theano.Variable) -> theano.Variable:
    """Split an axis into two: the blocks, and the elements of each."""
    shape = [variable.shape[i] for i in range(variable.ndim)]
    return variable.reshape(shape[:axis] + [blocks, shape[axis] // blocks] + shape[axis + 1:], ndim=variable.ndim + 1)


def turned(variable: theano.Variable, axis: int = 0) -> theano.Variable:
    """Return a variable with the last element of an axis first."""
    return variable[(slice(None),) * axis + (slice(None, None, -1),)]


def merge_axis(variable: theano.Variable, axis: int) -> theano.Variable:
    """Merge an axis with the next one."""
    shape = [variable.shape[i] for i in range(variable.ndim)]
    return variable.reshape(shape[:axis] + [shape[axis] * shape[axis + 1]] + shape[axis + 2:], ndim=variable.ndim - 1)


def _of_type(new, old):
    """Return a rebuilt variable with the static lengths of 1 that sizes computed anew do not show."""
    if not isinstance(old.type, T.TensorType) or new.type == old.type:
        return new
    return T.patternbroadcast(new, old.broadcastable) if new.broadcastable != old.broadcastable else new
