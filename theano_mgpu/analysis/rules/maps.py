"""Loops over the samples of a batch: each replica loops over its own, where a turn needs nothing of other turns."""
from __future__ import annotations

from typing import Any

import theano
import theano.tensor as T
from theano.gof.graph import ancestors
from theano.scalar import basic as scalar

from ..shards import Shards, check_limits, refusal_of
from ..states import BACKWARDS, CONSTANT, LAST, ROWS, WHOLE, Value, partial
from .base import is_scalar_op, is_zero, same_order, same_rows
from .shapes import whole_length

LOOPS = 'it loops over samples, and '
EACH_TURN = LOOPS + 'each turn needs what the turns before have come to'


def is_map(node: theano.Apply, values: list[Value]) -> bool:
    """Return whether a loop, whose inputs have these Values, takes samples one after the other."""
    return any(value.kind == ROWS and value.axis == 0 for value in values[1:1 + node.op.n_seqs])


def mapped(shards: Shards, node: theano.Apply, values: list[Value]) -> list[Value]:
    """Return the Values of a loop over samples.

    In a gradient, a loop may also add up a result of each turn, such as the gradients of weights.
    """
    op = node.op
    _check(shards, node)
    # By place: the number of turns may also be something that a turn reads.
    inputs = iter(values)
    turns, sequences, sums, ends, others = (
        [value for _, value in zip(range(n), inputs)]
        for n in (1, op.n_seqs, op.n_sit_sot, op.n_nit_sot, len(values)))
    if any(value.kind != CONSTANT for value in turns + sums + ends + others):
        shards.refuse(node, LOOPS + 'each turn reads all of them')
    samples = [value for value in sequences if value.kind == ROWS]
    state = same_rows(shards, node, samples)
    if state.axis != 0 or len({value.state.only for value in samples}) > 1:
        shards.refuse(node, LOOPS + 'its sequences have them along different axes, or in different orders')
    sequences = same_order(shards, node, [_own(shards, value, state) for value in sequences])

    def own_turns(variable, *numbers):
        right = [T.eq(n, whole_length(shards, variable, 0)) for n in numbers]
        return shards.check(node, LOOPS + 'not over all of them', variable.shape[0], *right)
    own = shards.make(own_turns, samples[:1] + turns + ends, WHOLE)
    sums = [shards.make(lambda zeros, n: zeros[:n + 1], [value, own], WHOLE, like=value.variable) for value in sums]
    running = partial()._replace(only=LAST, reason=refusal_of(node, EACH_TURN))
    return shards.make_all(lambda *inputs: op(*inputs, return_list=True),
                           [own] + sequences + sums + [own] * len(ends) + others,
                           [running] * len(sums) + [state] * len(ends))


def _check(shards, node):
    op = node.op
    if op.as_while:
        shards.refuse(node, LOOPS + 'one of them may end it')
    if op.n_shared_outs:
        shards.refuse(node, LOOPS + 'draws random numbers, or changes a variable, in their order')
    if op.n_mit_mot or op.n_mit_sot or not all(is_zero(v) for v in op.outer_sitsot(node)) or not _only_adds(op):
        shards.refuse(node, EACH_TURN)


def _only_adds(op):
    """Return whether each state of a loop has something added in each turn, and is not read otherwise."""
    states, sums = op.inner_sitsot(op.inputs), op.inner_sitsot_outs(op.outputs)
    added = []
    for state, output in zip(states, sums):
        node = output.owner
        if output is state:
            continue
        if not is_scalar_op(node, scalar.Add) or node.inputs.count(state) != 1 or state.type != output.type:
            return False
        added += [v for v in node.inputs if v is not state]
    return set(states).isdisjoint(ancestors(added + op.inner_nitsot_outs(op.outputs)))


def _own(shards, value, state):
    """Return the replica's part of a sequence."""
    if value.kind == ROWS:
        return value
    if state.only != BACKWARDS:
        return shards.cut(value, 0, state.outer)
    turned = shards.cut(shards.make(_turn, [value], value.state), 0, state.outer)
    return shards.make(_turn, [turned], state, like=value.variable)


def _turn(variable):
    return variable[::-1]


def turned(shards: Shards, node: theano.Apply, x: Value, reason: str) -> Value:
    """Return rows whose samples an index turns round, as a value that still has their first order."""
    only = None if x.state.only == BACKWARDS else BACKWARDS
    return x._replace(state=x.state._replace(only=only, reason=only and refusal_of(node, reason)))


def last(shards: Shards, node: theano.Apply, x: Value, numbers: list[Value], entries: list[Any]) -> list[Value]:
    """Return the Value of the last of the sums that grow with each sample: a share of the sum over all of them."""
    if entries[:1] != [-1]:
        check_limits(None, [x])
    return shards.apply(node, [x] + numbers, partial())
