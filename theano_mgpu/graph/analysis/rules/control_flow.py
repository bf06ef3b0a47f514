"""Branches, loops and ops that are made of graphs."""
import math
from itertools import islice

import theano
import theano.tensor as T
from theano.compile.builders import OpFromGraph
from theano.gof.graph import ancestors
from theano.ifelse import IfElse
from theano.scalar import basic as scalar
from theano.scan_module.scan_op import Scan
from theano.tensor.basic import AllocEmpty
from theano.tensor.subtensor import IncSubtensor

from ...rewrites import inner_graph
from ..known import is_scalar_op, is_zero
from ..rows import rows_of_each
from ..shard_graph import turned
from ..shards import Shards, check_limits, refusal_of, rule
from ..states import BACKWARDS, CONSTANT, DEPENDENT, LAST, PARTIAL, ROWS, WHOLE, Value, has_rows, partial, rows
from .base import aligned, as_long, refuse_rows, same_order, same_rows, share

LOOPS = 'it loops over samples, and '
OTHER_TURNS = LOOPS + 'each turn needs what the turns before have come to'
EACH_TURN = 'each turn of the loop needs what other samples have come to'


@rule(IfElse)
def _if_else(shards, node, values):
    values = shards.wholes(values)
    refuse_rows(shards, node, values[:1], 'it asks single samples')
    n = len(node.outputs)
    pairs, states = [], []
    for pair in zip(values[1:n + 1], values[n + 1:]):
        state = DEPENDENT if any(value.state.size is not None for value in pair) else WHOLE
        if has_rows(pair):
            pair, state = aligned(shards, node, pair)
        pairs.append(pair)
        states.append(state)
    return shards.apply(node, values[:1] + [branch for branches in zip(*pairs) for branch in branches], states)


@rule(OpFromGraph)
def _op_from_graph(shards, node, values):
    return [shards.converted(output) for output in inner_graph(node, node.inputs)]


@rule(Scan, of=ROWS, is_costly=True)
def _scan(shards, node, values):
    """Analyse the graph of a loop like the graph around it: slices and states have one axis less, the time."""
    refuse_rows(shards, node, values[:1], 'it loops over samples')
    if any(value.kind == ROWS and value.axis == 0 for value in values[1:1 + node.op.n_seqs]):
        return _mapped(shards, node, values)
    check_limits(None, values)
    return _Loop(shards, node, dict(zip(node.inputs, values))).outputs()


class _Loop:
    """The states of a loop, found by trying: rows that come in spread until nothing changes."""

    def __init__(self, shards, node, values):
        op = node.op
        self.shards, self.node, self.op, self.values = shards, node, op, values
        self.outer = op.outer_mitmot(node) + op.outer_mitsot(node) + op.outer_sitsot(node)
        slices = iter(op.inner_mitmot(op.inputs) + op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs))
        self.taken = [[next(slices) for _ in taps] for taps in op.info['tap_array']]
        positions = iter(range(len(op.outputs)))
        counts = [len(taps) for taps in op.mit_mot_out_slices] + [1] * (len(self.outer) - op.n_mit_mot)
        self.results = [[next(positions) for _ in range(count)] for count in counts]  # positions in op.outputs
        self.others = list(positions)
        self.states = [self._inside(values[variable]) for variable in self.outer]
        self._find_rows()
        if self.inside.exchanges or any(new.kind == PARTIAL for group in self._new_states() for new in group):
            self._find_shares()
        if self.inside.exchanges:
            shards.refuse(node, EACH_TURN)
        self._refuse_merged(self.inside.outputs)
        n_last = op.n_shared_outs + bool(op.as_while)
        if any(value.kind != CONSTANT for value in self.inside.outputs[len(op.outputs) - n_last:]):
            shards.refuse(node, 'its end, or its random numbers, depend on single samples')

    def _refuse_merged(self, values):
        if any(value.state.outer is not None for value in values):
            self.shards.refuse(self.node, 'its samples are merged into another axis')

    def _inside(self, value):
        """Return the state of a slice of a value."""
        if value.kind != ROWS:
            return WHOLE
        if value.axis == 0:
            self.shards.refuse(self.node, 'it loops over samples')
        self._refuse_merged([value])
        return rows(value.axis - 1)

    def _new_states(self):
        """Return the states of the next values of each state."""
        return [[self.inside.outputs[i].state for i in group] for group in self.results]

    def _analyse(self):
        op, node = self.op, self.node
        sources = {v: (outer, 1) for v, outer in zip(op.inner_seqs(op.inputs), op.outer_seqs(node))}
        sources.update((v, (outer, 0)) for v, outer in zip(op.inner_non_seqs(op.inputs) + op.inner_shared(op.inputs),
                                                           op.outer_non_seqs(node) + op.outer_shared(node)))
        known = {v: Value(v, self._inside(self.values[outer]) if is_slice else self.values[outer].state)
                 for v, (outer, is_slice) in sources.items()}
        self._refuse_merged(known.values())
        recurrences = {}
        for first, group, results, state in zip(self.outer, self.taken, self.results, self.states):
            for v in group:
                known[v] = Value(v, state)
                recurrences[v] = first, [op.outputs[i] for i in results]
        self.inside = Shards([], op.outputs, around=self.shards, known=known, sources=sources,
                             recurrences=recurrences)
        return self._new_states()

    def _find_rows(self):
        before = None
        while self.states != before:
            before = self.states
            self.states = [next((new for new in group if new.kind == ROWS and state.kind == CONSTANT), state)
                           for state, group in zip(before, self._analyse())]

    def _find_shares(self):
        """Find the states without rows that add up shares of sums."""
        of_samples = self._made_of_samples()
        self.states = [partial() if i in of_samples else state for i, state in enumerate(self.states)]
        while True:
            news = self._analyse()
            others = [state.kind == PARTIAL and any(new != state for new in group)
                      for state, group in zip(self.states, news)]
            if not any(others):
                break
            self.states = [WHOLE if is_other else state for is_other, state in zip(others, self.states)]
        if any(new.kind == PARTIAL != state.kind for state, group in zip(self.states, news) for new in group):
            self.shards.refuse(self.node, EACH_TURN)

    def _made_of_samples(self):
        """Return the positions of states that are no rows and depend on rows, be it by other such states."""
        positions, of_samples = set(), {v for v in self.op.inputs if self.inside.value(v).kind == ROWS}
        while True:
            new = {i for i, group in enumerate(self.results) if self.states[i].kind == CONSTANT
                   and not of_samples.isdisjoint(ancestors([self.op.outputs[j] for j in group]))} - positions
            if not new:
                return positions
            positions |= new
            of_samples.update(v for i in new for v in self.taken[i])

    def outputs(self):
        """Return the Values of the outputs of the loop."""
        shards, op = self.shards, self.op
        for i, (variable, state) in enumerate(zip(self.outer, self.states)):
            if state.kind == ROWS and self.values[variable].kind == CONSTANT:
                each = self._known_rows(self.results[i][0], state)
                length = None if each is None else Value(shards.total * each, WHOLE)
                self.values[variable] = shards.cut(self.values[variable], state.axis + 1, length=length)
            elif state.kind == PARTIAL and not _begins_at_zero(variable):
                self.values[variable] = share(shards, self.values[variable])
        inner = self._rows_of_constants()
        states = self.states + [self.inside.outputs[i].state for i in self.others[:op.n_nit_sot]]
        states = [state._replace(axis=state.axis + 1) if state.kind == ROWS else state._replace(size=None)
                  for state in states] + [WHOLE] * op.n_shared_outs
        values = [self.values[v] for v in self.node.inputs]
        results = [group[0] for group in self.results] + self.others
        firsts = self.outer + [None] * len(self.others)
        shards.loops.update((v, (self.inside, op.outputs[i], first))
                            for v, i, first in zip(self.node.outputs, results, firsts))
        if inner == op.outputs:
            return shards.apply(self.node, values, states)
        # The loop needs the numbers of samples: they become further inputs of it.
        counting = [number.type() for number in shards.numbers]
        inner = theano.clone(inner, replace=dict(zip(shards.numbers, counting)))
        new = Scan(list(op.inputs) + counting, inner, op.info)
        return shards.make_all(lambda *inputs: new(*list(inputs) + shards.numbers, return_list=True), values, states)

    def _known_rows(self, i, state):
        """Return how many rows of each sample an inner output has, None where the graph does not show it."""
        each = rows_of_each(self.inside, self.op.outputs[i], state.axis)
        return math.prod(each) if each is not None and all(isinstance(n, int) for n in each) else None

    def _is_as_long(self, variable, i, state):
        """Return whether it is certain that an inner output has the rows of the state that it is the next value of."""
        if self.shards.value(variable).kind == CONSTANT:
            return self._known_rows(i, state) is not None  # `outputs` compares them
        return rows_of_each(self.shards, variable, state.axis + 1) == \
            rows_of_each(self.inside, self.op.outputs[i], state.axis)

    def _rows_of_constants(self):
        """Return the new inner outputs, in which each new value of a state that has rows has them, too."""
        variables = [value.variable for value in self.inside.outputs]
        for number, (variable, state, group, taken) in enumerate(
                zip(self.outer, self.states, self.results, self.taken)):
            is_gradient = number < self.op.n_mit_mot  # as long as the values forward, which were checked
            for i in group if state.kind == ROWS else ():
                output, before = self.inside.outputs[i], Value(taken[0], state)
                if output.kind == CONSTANT:
                    variables[i] = self.inside.cut(output, state.axis, length=self.inside.length(before)).variable
                elif output.state != state:
                    self.shards.refuse(self.node, 'samples change their axis from turn to turn')
                # Theano 1.0.5 writes the slices of a gradient in place, and mixes two up where one ends with a view.
                elif not is_gradient and not self._is_as_long(variable, i, state):
                    variables[i] = as_long(self.inside, self.node, output, before).variable
        return variables


def _begins_at_zero(variable):
    node = variable.owner
    if node and isinstance(node.op, IncSubtensor) and node.op.set_instead_of_inc \
            and node.inputs[0].owner and isinstance(node.inputs[0].owner.op, AllocEmpty):
        return is_zero(node.inputs[1])  # nothing reads elements before the loop writes them
    return is_zero(variable)


# --- Loops over the samples of a batch: each replica loops over its own, if no turn needs another one ---------------

def _mapped(shards, node, values):
    """Return the Values of a loop over samples.

    In a gradient, a loop may also add up a result of each turn, such as the gradients of weights.
    """
    op = node.op
    _check_turns(shards, node)
    # By position: the number of turns may be among the other inputs, too.
    inputs = iter(values)
    turns, sequences, sums, ends, others = (
        list(islice(inputs, n)) for n in (1, op.n_seqs, op.n_sit_sot, op.n_nit_sot, len(values)))
    # Each turn may read all samples, and add to the gradients of all of them.
    sums, others = [[shards.gathered(value) for value in each] for each in (sums, others)]
    if any(value.kind != CONSTANT for value in turns + ends):
        shards.refuse(node, LOOPS + 'their number is made of samples')
    samples = [value for value in sequences if value.kind == ROWS]
    state = same_rows(shards, node, samples)
    if state.axis != 0 or len({value.state.only for value in samples}) > 1:
        shards.refuse(node, LOOPS + 'its sequences have them along different axes, or in different orders')
    sequences = same_order(shards, node, [_own_part(shards, value, samples[0]) for value in sequences])

    def own_turns(variable, *numbers):
        right = [T.eq(n, shards.whole_length(variable, 0)) for n in numbers]
        return shards.check(node, LOOPS + 'not over all of them', variable.shape[0], *right)
    own = shards.make(own_turns, samples[:1] + turns + ends, WHOLE)
    sums = [shards.make(lambda zeros, n: zeros[:n + 1], [value, own], WHOLE, like=value.variable) for value in sums]
    running = partial()._replace(only=LAST, reason=refusal_of(node, OTHER_TURNS))
    return shards.make_all(lambda *inputs: op(*inputs, return_list=True),
                           [own] + sequences + sums + [own] * len(ends) + others,
                           [running] * len(sums) + [state] * len(ends))


def _check_turns(shards, node):
    op = node.op
    if op.as_while:
        shards.refuse(node, LOOPS + 'one of them may end it')
    if op.n_shared_outs:
        shards.refuse(node, LOOPS + 'draws random numbers, or changes a variable, in their order')
    if op.n_mit_mot or op.n_mit_sot or not all(is_zero(v) for v in op.outer_sitsot(node)) or not _only_adds(op):
        shards.refuse(node, OTHER_TURNS)


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


def _own_part(shards, value, like):
    """Return the replica's part of a sequence."""
    if value.kind == ROWS:
        return value
    outer, length = like.state.outer, shards.length(like)
    if like.state.only != BACKWARDS:
        return shards.cut(value, 0, outer, length)
    own = shards.cut(shards.make(turned, [value], value.state), 0, outer, length)
    return shards.make(turned, [own], like.state, like=value.variable)
