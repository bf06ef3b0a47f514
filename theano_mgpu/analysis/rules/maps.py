"""Loops over the samples of a batch: each replica loops over its own, where a turn needs nothing of other turns."""
import theano.tensor as T
from theano.gof.graph import ancestors
from theano.scalar import basic as scalar
from theano.tensor import elemwise

from ..shards import check_limits, refusal_of
from ..states import BACKWARDS, CONSTANT, LAST, ROWS, WHOLE, partial
from .base import is_zero, same_order, same_rows
from .shapes import whole_length

LOOPS = 'it loops over samples, and '
EACH_TURN = LOOPS + 'each turn needs what the turns before have come to'


def is_map(node, values):
    """Return whether a loop takes samples one after the other; `values` are those of the inputs of its node."""
    return any(value.kind == ROWS and value.axis == 0 for value in values[1:1 + node.op.n_seqs])


def mapped(shards, node, values):
    """Return the Values of a loop over samples.

    In a gradient, a loop may also add up what each turn gives, such as the gradients of weights.
    """
    op = node.op
    _check(shards, node)
    # By place: the number of turns may also be something that a turn reads.
    turns, sequences, sums, ends, others = _apart(op, values)
    if any(value.kind != CONSTANT for value in turns + sums + ends + others):
        shards.refuse(node, LOOPS + 'each turn reads all of them')
    found = [value for value in sequences if value.kind == ROWS]
    state = same_rows(shards, node, found)
    if state.axis != 0 or len({value.state.only for value in found}) > 1:
        shards.refuse(node, LOOPS + 'its sequences have them along different axes, or in different orders')
    sequences = same_order(shards, node, [_own(shards, value, state) for value in sequences])
    own = shards.make(lambda v, *numbers: _turns(shards, node, v, numbers), found[:1] + turns + ends, WHOLE)
    sums = [shards.make(lambda zeros, n: zeros[:n + 1], [value, own], WHOLE, like=value.variable) for value in sums]
    running = partial()._replace(only=LAST, reason=refusal_of(node, EACH_TURN))
    return shards.make_all(lambda *inputs: op(*inputs, return_list=True),
                           [own] + sequences + sums + [own] * len(ends) + others,
                           [running] * len(sums) + [state] * len(ends))


def _apart(op, values):
    """What a map takes: the number of turns, sequences, first values of sums, numbers of results, and others."""
    found, start = [], 0
    for length in (1, op.n_seqs, op.n_sit_sot, op.n_nit_sot, len(values)):
        found.append(list(values[start:start + length]))
        start += length
    return found


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
        if not node or not isinstance(node.op, elemwise.Elemwise) or not isinstance(node.op.scalar_op, scalar.Add) \
                or node.inputs.count(state) != 1 or state.type != output.type:
            return False
        added += [v for v in node.inputs if v is not state]
    return set(states).isdisjoint(ancestors(added + op.inner_nitsot_outs(op.outputs)))


def _own(shards, value, state):
    """The replica's part of a sequence."""
    if value.kind == ROWS:
        return value
    if state.only != BACKWARDS:
        return shards.cut(value, 0, state.outer)
    turned = shards.cut(shards.make(_turn, [value], value.state), 0, state.outer)
    return shards.make(_turn, [turned], state, like=value.variable)


def _turn(variable):
    return variable[::-1]


def _turns(shards, node, variable, numbers):
    """The number of turns of a replica, where all samples have one each."""
    length = whole_length(shards, variable, 0)
    return shards.check(node, LOOPS + 'not over all of them', variable.shape[0], *[T.eq(n, length) for n in numbers])


def turned(shards, node, x, reason):
    """Return rows whose samples an index turns round, as a value that still has their first order."""
    if x.state.only == BACKWARDS:
        return x._replace(state=x.state._replace(only=None, reason=None))
    return x._replace(state=x.state._replace(only=BACKWARDS, reason=refusal_of(node, reason)))


def last(shards, node, x, numbers, entries):
    """Return the Value of the last of the sums that grow with each sample: a share of the sum over all of them."""
    if entries[:1] != [-1]:
        check_limits(None, [x])
    return shards.apply(node, [x] + numbers, partial())
