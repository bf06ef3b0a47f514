"""Sums of rows that are added into zeros, such as the gradient of an embedding: the rows are exchanged, not the table.

A batch touches few rows of a large table. Where these are fewer bytes than the table, the rows of all samples, with
their places, come to every replica, which adds them by the op of the given graph: in the order of one device. Else the
tables are exchanged as any sum. A step decides by the sizes that the batch has, alike on all replicas.
"""
from __future__ import annotations

from typing import Any, Iterable, NamedTuple

import theano
import theano.scalar as scal
import theano.tensor as T
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors
from theano.ifelse import ifelse
from theano.tensor.elemwise import Elemwise

from ..graph import bytes_of_shared
from ..rewrites import substitute
from .reductions import SUM
from .states import DEPENDENT, ROWS, WHOLE, Value

LARGE = 1 << 20  # bytes of a table; the decision would cost more than the exchange of a smaller one
LESS = 2         # a table has at least as many times the elements of the rows: each replica gets the rows of all
SUMS = scal.Add, scal.Sub, scal.Neg
LINEAR = (*SUMS, scal.Mul, scal.TrueDiv)


class Scatter(NamedTuple):
    """Rows of samples that an op adds into zeros: a node of the given graph, and the Values of its inputs."""

    node: theano.Apply
    zeros: Value
    rows: Value
    places: list[Value]


def noted(shards: Any, node: theano.Apply, values: list[Value], table: Value) -> Value:
    """Return the partial table of a node that adds rows of samples into zeros; note it if it is large."""
    # The shared variables that its shape is made of tell whether a table is worth a decision.
    if shards.by_rows and values[1].kind == ROWS and not table.variable.broadcastable[0] and \
            any(map(_is_large, ancestors(node.inputs[:1]))):
        shards.scatters[table.variable] = Scatter(node, values[0], values[1], values[2:])
    return table


def _is_large(variable):
    return isinstance(variable, SharedVariable) and bytes_of_shared(variable) > LARGE


def most_bytes_of_rows(shards: Any, sources: Iterable[theano.Variable]) -> dict[SharedVariable, int]:
    """Return the tables among the exchanged values, and the bytes of their rows up to which these are exchanged."""
    nodes = [shards.scatters[each].node for source in sources if source in shards.in_place_of
             for each in _leaves(shards, shards.in_place_of[source]) if each in shards.scatters]
    return {each: bytes_of_shared(each) // LESS for node in nodes for each in ancestors(node.inputs[:1])
            if _is_large(each)}


def whole(shards: Any, value: Value) -> Value | None:
    """Return a sum of tables over all replicas, maybe scaled ones, as a CONSTANT; None for another partial value."""
    if value.variable not in shards.tables:
        shards.tables[value.variable] = _exchanged(shards, value) if _is_of_scatters(shards, value.variable) else None
    return shards.tables[value.variable]


def _is_of_scatters(shards, variable):
    """Return whether a variable is a table of scattered rows, a sum of such tables, or one that is scaled."""
    if variable in shards.scatters:
        return True
    node = variable.owner
    if node is None or not isinstance(node.op, Elemwise) or not isinstance(node.op.scalar_op, LINEAR):
        return False
    are_tables = [_is_of_scatters(shards, each) for each in node.inputs]
    if isinstance(node.op.scalar_op, SUMS):
        return all(are_tables)
    is_scaled = are_tables[0] if isinstance(node.op.scalar_op, scal.TrueDiv) else any(are_tables)
    return is_scaled and sum(are_tables) == 1 and all(
        is_table or _is_constant(shards, each) for each, is_table in zip(node.inputs, are_tables))


def _is_constant(shards, variable):
    return variable in shards.constants or variable in shards.exchanges or \
        variable.owner is None and variable not in shards.inputs and variable not in shards.numbers


def _exchanged(shards, value):
    """Return the sum of tables, exchanged in the way with fewer bytes; the other way has no rows then."""
    leaves = list(_leaves(shards, value.variable))
    scatters = [shards.scatters[each] for each in leaves if each in shards.scatters]
    sizes = [scatters[0].zeros, *[scatter.rows for scatter in scatters]]

    def few(zeros, *every_rows):
        return T.le(sum(rows.size for rows in every_rows) // shards.own * shards.total * LESS, zeros.size)

    def gathered(each):
        if each.kind != ROWS:
            return each
        none = (slice(None),) * each.axis + (slice(0),)
        return shards.gathered(shards.make(lambda v, *sizes: ifelse(few(*sizes), v, v[none]), [each, *sizes],
                                           each.state, like=each.variable))

    def added(scatter):
        values = [scatter.zeros, *map(gathered, [scatter.rows, *scatter.places])]
        return shards.apply(scatter.node, values, DEPENDENT)[0]

    def summed(tables, *parts):
        return ifelse(T.eq(tables.shape[0], 0), *substitute([value.variable], dict(zip(leaves, parts))), tables)
    tables = shards.make(lambda v, *sizes: ifelse(few(*sizes), v[:0], v), [value, *sizes], value.state,
                         like=value.variable)
    shards.in_place_of[tables.variable] = value.variable
    parts = [added(shards.scatters[each]) if each in shards.scatters else Value(each, WHOLE) for each in leaves]
    return shards.make(summed, [shards.exchange(tables, SUM), *parts], DEPENDENT, like=value.variable)


def _leaves(shards, variable):
    """Yield the tables of scattered rows in a sum, and what scales them."""
    if variable in shards.scatters or _is_constant(shards, variable):
        yield variable
    else:
        for each in variable.owner.inputs:
            yield from _leaves(shards, each)
