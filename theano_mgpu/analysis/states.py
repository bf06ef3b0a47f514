"""What a replica has of a variable that one device would compute from the whole batch."""
from collections import namedtuple

from .reductions import SUM

ROWS = 'rows'          # the part of it that belongs to the replica's own samples, which lie along `axis`
PARTIAL = 'partial'    # its share of a sum, maximum or minimum over the replicas, see `reduction`
CONSTANT = 'constant'  # all of it: the same on every replica
REFUSED = 'refused'    # nothing: it cannot be computed from shards, and is an error where it is used

# How a CONSTANT whole number, or each element of a vector, depends on the number of samples N; None if it does not.
COUNT = 'count'        # a multiple of N
NUMBER = 'number'      # any other function of N

# What alone may be done with a value, but for asking for its shape.
BACKWARDS = 'backwards'  # rows, the last sample first: to loop over them in any order, and to turn them round again
LAST = 'last'            # a sum that grows with each sample: to take the last one, which is a share of the sum

FREE = -1              # the stage of what needs neither samples nor an exchange: every stage computes it for itself


class State(namedtuple('State', 'kind axis outer reduction size reason only')):
    """One of the three states.

    Attributes
    ----------
    kind : {ROWS, PARTIAL, CONSTANT, REFUSED}
    axis : int or None
        Of ROWS: where the samples lie. Each sample may own several rows in succession.
    outer : integer scalar theano.Variable or None
        Of ROWS: the length of what was merged into the axis ahead of the samples, such as the time of a time-major
        tensor that was flattened. Then the rows of one sample lie apart.
    reduction : Elementwise or None
        Of PARTIAL.
    size : {COUNT, NUMBER, None} or tuple of these
        Of CONSTANT.
    reason : str or None
        Of REFUSED, and of what something else is done with than `only`.
    only : {BACKWARDS, LAST, None}
    """

    def __new__(cls, kind, axis=None, outer=None, reduction=None, size=None, reason=None, only=None):
        return super().__new__(cls, kind, axis, outer, reduction, size, reason, only)


WHOLE = State(CONSTANT)


def rows(axis=0, outer=None):
    return State(ROWS, axis=axis, outer=outer)


def partial(reduction=SUM):
    return State(PARTIAL, reduction=reduction)


class Value(namedtuple('Value', 'variable state stage')):
    """A variable of the graph that replicas compute, its state, and the number of its stage."""

    @property
    def kind(self):
        return self.state.kind

    @property
    def axis(self):
        return self.state.axis
