"""The states of a variable that one device computes from the whole batch: which part of it a replica has."""
from __future__ import annotations

from typing import Any, NamedTuple

import theano

from .reductions import SUM, Reduction

ROWS = 'rows'          # the part of it that belongs to the replica's own samples, which lie along `axis`
PARTIAL = 'partial'    # its share of a sum, maximum or minimum over the replicas, see `reduction`
CONSTANT = 'constant'  # all of it: the same on every replica
REFUSED = 'refused'    # nothing: it cannot be computed from shards, and is an error where it is used

# How a CONSTANT whole number, or each element of a vector, depends on the number of samples N; None if it does not.
COUNT = 'count'        # a multiple of N
NUMBER = 'number'      # any other function of N

# The only use of a value, beside asking for its shape.
BACKWARDS = 'backwards'  # rows, the last sample first: only a loop in any order, or a second reversal, may use them
LAST = 'last'            # a running sum over samples: only its last element may be used, a share of the sum

FREE = -1              # the stage of a value that needs neither samples nor an exchange: every stage computes it


class State(NamedTuple):
    """The part of a variable that a replica has.

    Attributes
    ----------
    axis : int or None
        For ROWS: where the samples lie. Each sample may own several rows in succession.
    outer : integer scalar theano.Variable or None
        For ROWS: the length of the axes that were merged into the axis ahead of the samples, such as the time of a
        time-major tensor that was flattened. Then the rows of one sample lie apart.
    reduction : Elementwise or None
        For PARTIAL.
    size : {COUNT, NUMBER, None} or tuple of these
        For CONSTANT.
    reason : str or None
        Why a REFUSED variable, or another use than `only`, is an error.
    """

    kind: str
    axis: Any = None
    outer: theano.Variable | None = None
    reduction: Reduction | None = None
    size: Any = None
    reason: str | None = None
    only: str | None = None


WHOLE = State(CONSTANT)
DEPENDENT = State(CONSTANT, size=NUMBER)


def rows(axis: int = 0, outer: theano.Variable | None = None) -> State:
    """Return the state of rows."""
    return State(ROWS, axis=axis, outer=outer)


def partial(reduction: Reduction = SUM) -> State:
    """Return the state of a share of a sum, or of another reduction."""
    return State(PARTIAL, reduction=reduction)


class Value(NamedTuple):
    """A variable of the graph that replicas compute, and its state."""

    variable: Any
    state: Any

    @property
    def kind(self) -> str:
        """The kind of the state."""
        return self.state.kind

    @property
    def axis(self) -> Any:
        """The axis of the state."""
        return self.state.axis


def has_rows(values: list[Value]) -> bool:
    """Return whether any of these values is ROWS."""
    return any(value.kind == ROWS for value in values)
