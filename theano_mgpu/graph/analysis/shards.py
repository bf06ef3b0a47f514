"""The graph that replicas compute on their shards of a batch, made from the graph of one device, node by node."""
from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Callable, Collection, Mapping, NamedTuple, NoReturn, Sequence

import theano
import theano.tensor as T
from theano.compile.ops import Shape, Shape_i
from theano.gof.graph import io_toposort
from theano.scalar.basic import EQ, GE, GT, LE, LT, NEQ
from theano.scan_module.scan_op import Scan
from theano.tensor.elemwise import DimShuffle, Elemwise
from theano.tensor.opt import Assert
from theano.tensor.signal.pool import DownsampleFactorMaxGradGrad, MaxPoolGrad, MaxPoolRop
from theano.tensor.subtensor import Subtensor

from ...errors import NOT_DIVISIBLE, named
from ..placement.tags import place_of_node, placed_on
from ..repeatable import unrepeatable
from ..traces import keep_trace_above, line_of
from . import touched_rows
from .reductions import Gather
from .shard_graph import CannotCut, ShardGraph, merge_axis, split_axis, turned
from .states import BACKWARDS, CONSTANT, LAST, PARTIAL, REFUSED, ROWS, WHOLE, State, Value, has_rows, rows

COMPARISONS = EQ, NEQ, LT, GT, LE, GE
OF_MATRIX = '%s takes its matrix as a whole, and all samples meet there'
SHOWN = 100  # characters of a node in a message
ALLOWED = {BACKWARDS: (Scan, Subtensor, Shape, Shape_i), LAST: (Subtensor,)}


class Rule(NamedTuple):
    """The `function` of a rule, and when it is called, see `rule`."""

    function: Callable[..., list[Value]]
    of: str
    is_costly: bool
    compares_lengths: bool


RULES: dict[type, Rule] = {}  # by class of op; the rule of the nearest base class counts


def rule(*classes: type, of: str = PARTIAL, is_costly: bool = False,
         compares_lengths: bool = False) -> Callable[[Any], Any]:
    """Register a function ``(shards, node, values) -> list of Value`` for ops of these classes, as a decorator.

    Parameters
    ----------
    of : {ROWS, PARTIAL, CONSTANT}
        The nodes that the function is called for. ROWS: those with samples among their inputs, whose partial inputs
        are exchanged before. PARTIAL: those with partial inputs, too. CONSTANT: all. Other nodes are constants.
    is_costly : bool
        Whether the work of these ops is worth dividing: no replica computes them whole where they are refused.
    compares_lengths : bool
        Whether these ops raise an error where one input has more rows than another one, even if this has one row. For
        others, which take the first rows or one row for all, `same_order` of the rules compares the rows of a sample.
    """
    def register(function):
        RULES.update(dict.fromkeys(classes, Rule(function, of, is_costly, compares_lengths)))
        return function
    return register


class Shards(ShardGraph):
    """The part of a graph that each replica computes, and the values that replicas exchange.

    The given graph has been built for one device and the whole batch. Each of its variables becomes a `Value`: rows,
    partial or constant. A node that needs all of a partial value gets it by an exchange, and lies in a later stage.

    Parameters
    ----------
    inputs : list of theano.Variable
        Leaves that have samples along axis 0. Every other leaf is constant.
    outputs : list of theano.Variable
        Host variables.
    exchanged : collection of theano.Variable
        Variables to exchange as soon as they are partial, because something needs their whole value anyway.
    around : Shards, optional
        Of the graph around a loop, where `outputs` are of the graph inside of it, which has no `inputs`: its leaves are
        `known`. `sources` maps a leaf to the variable around the loop that holds it, and to the number of axes which
        this variable has ahead. `recurrences` maps a state to the variable around it that it begins with, and to its
        next values.
    by_rows : bool
        Whether the rows of large tables that samples touch may be exchanged in place of the tables.

    Attributes
    ----------
    outputs : list of Value
        PARTIAL ones are to be reduced, and ROWS to be gathered, by the caller.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 exchanged: Collection[theano.Variable] = (), around: Shards | None = None,
                 known: Mapping[theano.Variable, Value] = {},
                 sources: Mapping[theano.Variable, tuple[theano.Variable, int]] = {},
                 recurrences: Mapping[theano.Variable, tuple[theano.Variable, list[theano.Variable]]] = {},
                 by_rows: bool = False) -> None:
        super().__init__(around.numbers if around else None)
        self.inputs, self.around, self.sources, self.recurrences = set(inputs), around, sources, recurrences
        self.by_rows = by_rows
        # Of the given graph.
        self._values: dict[Any, Value] = {}
        self._at_once = set(exchanged)
        # Outputs of loops, to the Shards inside, the variable there, and its first value.
        self.loops: dict[Any, tuple[Shards, Any, Any]] = {}
        self.rows_of_each: dict[Any, Any] = {}  # results of `rows`
        self.uniform: dict[Any, bool] = {}
        # Of the new graph.
        self._traced: set[Any] = set()          # variables that have the lines of the given ones
        self.refusals: list[CannotCut] = []     # of nodes that each replica computes whole instead, of gathered rows
        self._divides = False                   # whether replicas divide the work of a costly op
        self.n_whole = 0                        # costly ops that each replica computes whole
        self.compared: set[Any] = set()         # variables that other ones are compared with, bit by bit
        self.scatters: dict[Any, Any] = {}      # large tables of which samples touch some rows, see `touched_rows`
        self.tables: dict[Any, Any] = {}        # partial values, to the sums of such tables
        self.in_place_of: dict[Any, Any] = {}   # exchanged tables, to the partial values that they stand for
        self._given: dict[Any, Any] = {}        # variables, to the variables of the given graph
        known = {**known, **{variable: Value(variable, rows()) for variable in inputs}}
        for variable, value in known.items():
            self._everywhere.add(value.variable)
            self.stages[value.variable] = 0
            self.keep(variable, value)
        for node in io_toposort(list(known), list(outputs)):
            with placed_on(place_of_node(node)):
                self._convert(node)
        self.outputs = [self._usable(output) for output in outputs]
        check_limits(None, self.outputs)
        if self.refusals and not self._divides:
            raise self.refusals[0]

    # ---------------------------------------------------------------------------------------- walking the graph

    def value(self, variable: theano.Variable) -> Value:
        """Return the Value of a variable of the given graph."""
        return self._values.get(variable) or Value(variable, WHOLE)

    def _usable(self, variable):
        value = self.value(variable)
        if value.kind == REFUSED:
            raise CannotCut(value.state.reason)
        return value

    def given(self, value: Value) -> theano.Variable | None:
        """Return the variable of the given graph that has a Value, None if a rule has made it."""
        return self._given.get(value.variable)

    def keep(self, variable: theano.Variable, value: Value) -> None:
        """Set the Value of a variable of the given graph."""
        self._values[variable] = value
        if value.kind != REFUSED:
            self._given.setdefault(value.variable, variable)

    def _convert(self, node):
        try:
            values = self._computed(node, [self._usable(variable) for variable in node.inputs])
        except CannotCut as error:  # not raised: the node may be unused
            values = [Value(None, State(REFUSED, reason=str(error)))] * len(node.outputs)
        new = [value.variable for value in values if value.variable is not None]
        keep_trace_above(new, node.outputs[0], self._traced)
        for variable, value in zip(node.outputs, values):
            self.keep(variable, self.whole(value) if variable in self._at_once else value)

    def exchanged_twice(self) -> set[theano.Variable]:
        """Return the variables of the given graph that are better exchanged at once.

        These are variables that are needed whole while their shares are used further, and variables of which several
        scaled or reshaped copies are exchanged.
        """
        used: set[theano.Variable] = set()
        copied: dict[theano.Variable, theano.Variable] = {}  # scaled or reshaped copies of shares, to the shares
        for variable, value in self._values.items():
            if variable.owner and (value.kind == PARTIAL or variable in self._at_once):
                shares = {v for v in variable.owner.inputs if self.value(v).kind == PARTIAL}
                used |= shares
                if len(shares) == 1 and isinstance(variable.owner.op, (Elemwise, DimShuffle)):
                    share, = shares
                    copied[variable] = copied.get(share, share)
        given = {self._given.get(self.in_place_of.get(source, source)) for source, _ in self.exchanges.values()}
        exchanged = {v for v in given if v is not None and self.value(v).kind == PARTIAL}
        originals = Counter(copied.get(v, v) for v in exchanged)
        return used & exchanged | {v for v, count in originals.items() if count > 1}

    def converted(self, expression: theano.Variable) -> Value:
        """Return the Value of an expression of variables of the given graph."""
        for node in io_toposort(list(self._values), [expression]):
            self._convert(node)
        return self._usable(expression)

    def _computed(self, node, values):
        """Return the Values of a node's outputs, from the Values of its inputs, by the rule of its op."""
        if getattr(node.op, 'destroy_map', None):
            self.refuse(node, 'it writes into what it is given')
        unknown = unrepeatable(node.op)
        if unknown and (unknown is not node.op or not has_rows(values)):
            self.refuse(node, 'each replica would call %s, which may give other results each time; if it does not, set '
                              'mgpu_pure = True in its class' % type(unknown).__name__)
        if _compares(node):
            self.compared.update(value.variable for value in values)
        function, of, is_costly, _ = rule_of(node.op)
        if of == ROWS and not has_rows(values):
            values = self.wholes(values)
        self.n_whole += is_costly and not has_rows(values)
        if of != CONSTANT and all(value.kind == CONSTANT for value in values):
            return self.constant(node, values)
        try:
            check_limits(node.op, values)
            new = function(self, node, self.wholes(values) if of == ROWS else values)
        except CannotCut as refusal:
            if unknown or is_costly or not self._may_be_whole(node, values):
                raise
            self.refusals.append(refusal)
            i = next(i for i, value in enumerate(values) if value.kind == ROWS)  # others may stay, as in x[rows]
            return self._computed(node, [*values[:i], self.gathered(values[i]), *values[i + 1:]])
        self._divides |= is_costly and has_rows(values)
        return new

    def _may_be_whole(self, node, values):
        """Return whether each replica may compute a node that is refused, of gathered rows."""
        backwards = any(value.state.only == BACKWARDS for value in values)
        return has_rows(values) and not (
            self.around or isinstance(node.op, Elemwise) and not backwards or _is_of_matrices(node.op)
            or any(value.state.only == LAST for value in values)
            or any(not isinstance(value.variable.type, T.TensorType) for value in values if value.kind == ROWS))

    def refuse(self, node: theano.Apply, reason: str) -> NoReturn:
        """Raise a CannotCut for a node."""
        raise CannotCut(refusal_of(node, reason))

    def check(self, node: theano.Apply, reason: str, variable: theano.Variable,
              *conditions: theano.Variable) -> theano.Variable:
        """Return a variable that refuses a batch for this reason where the batch does not meet the conditions."""
        # A single condition: when Theano's optimiser removes some of several, it removes the text, too.
        text = NOT_DIVISIBLE + refusal_of(node, reason)
        return Assert(text)(variable, functools.reduce(T.and_, conditions))

    def wholes(self, values: list[Value]) -> list[Value]:
        """Return the values with the partial ones exchanged."""
        return list(map(self.whole, values))

    def whole(self, value: Value) -> Value:
        """Return a partial value as a CONSTANT, reduced over all replicas. Any other value stays as it is."""
        if value.kind != PARTIAL:
            return value
        return touched_rows.whole(self, value) or self.exchange(value, value.state.reduction)

    def gathered(self, value: Value) -> Value:
        """Return rows as a CONSTANT: the rows of all replicas. Any other value stays as it is."""
        if value.kind != ROWS:
            return value
        axis = value.axis
        if value.state.only == BACKWARDS:
            whole = self.gathered(self.make(lambda v: turned(v, axis), [value], value.state._replace(only=None)))
            return self.make(lambda v: turned(v, axis), [whole], whole.state, like=value.variable)
        if value.state.outer is None:
            return self.exchange(value, Gather(axis))
        apart = self.make(lambda v, blocks: split_axis(v, axis, blocks), [value, Value(value.state.outer, WHOLE)],
                          rows(axis + 1))
        whole = self.exchange(apart, Gather(axis + 1))
        return self.make(lambda v: merge_axis(v, axis), [whole], whole.state, like=value.variable)


def rule_of(op: theano.Op) -> Rule:
    """Return the rule of the nearest base class of an op."""
    return next((RULES[cls] for cls in type(op).__mro__ if cls in RULES),
                Rule(_unknown, ROWS, False, False))


def _unknown(shards, node, values):
    """Refuse samples of an op without a rule."""
    is_of_one = _is_of_matrices(node.op) and len(values) == 1  # in an equation, columns may be apart
    shards.refuse(node, (OF_MATRIX if is_of_one else 'it is not known how %s depends on single samples')
                  % type(node.op).__name__)


def _is_of_matrices(op):
    """Return whether an op is of linear algebra."""
    return type(op).__module__.endswith('linalg')


def check_limits(op: theano.Op | None, values: list[Value]) -> None:
    """Refuse an op, or the caller if there is no op, that is not allowed to use one of these values."""
    for value in values:
        if value.state.only and not isinstance(op, ALLOWED[value.state.only]):
            raise CannotCut(value.state.reason)


def refusal_of(node: theano.Apply, reason: str) -> str:
    """Return the text of the CannotCut of a node: the reason, the node by its user's names, and its line."""
    names = list(dict.fromkeys(str(v) if v.name or v.owner and len(node.inputs) == 1 else '...' for v in node.inputs))
    text = named('%s(%s)' % (node.op, ', '.join(names)))
    return '%s: %s%s' % (reason, text if len(text) <= SHOWN else text[:SHOWN - 4] + '...)', line_of(node))


def _compares(node):
    """Return whether an op gives another result where an input is computed a second time, and rounded differently.

    The gradient of max-pooling goes to those pixels that are equal to the largest one, the gradient of ``max`` to the
    elements that are equal to the largest one. A comparison with a constant, as of a ReLU with 0, does not count: its
    kink is the one that it has on one device.
    """
    if isinstance(node.op, (MaxPoolGrad, DownsampleFactorMaxGradGrad, MaxPoolRop)):
        return True
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, COMPARISONS) and \
        all(v.dtype.startswith('float') and not _is_number(v) for v in node.inputs)


def _is_number(variable):
    """Return whether a variable is a constant, in whatever shape."""
    while variable.owner and len(variable.owner.inputs) == 1:
        variable, = variable.owner.inputs
    return isinstance(variable, theano.Constant)
