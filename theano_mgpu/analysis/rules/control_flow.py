"""Branches, loops and ops that are made of graphs."""
from theano import clone
from theano.compile.builders import OpFromGraph
from theano.gof.graph import ancestors
from theano.ifelse import IfElse
from theano.scan_module.scan_op import Scan
from theano.tensor.basic import AllocEmpty
from theano.tensor.subtensor import IncSubtensor

from ...graphs.inlined import inner_graph
from ..shards import Shards, check_limits, rule
from ..states import CONSTANT, DEPENDENT, PARTIAL, ROWS, WHOLE, Value, has_rows, partial, rows
from .base import aligned, is_zero, refuse_rows, share
from .maps import is_map, mapped

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


@rule(Scan, of=ROWS)
def _scan(shards, node, values):
    """A loop, whose graph is analysed like the one around it: slices and states have one axis less, the time."""
    refuse_rows(shards, node, values[:1], 'it loops over samples')
    if is_map(node, values):
        return mapped(shards, node, values)
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
        sequences = list(zip(op.inner_seqs(op.inputs), op.outer_seqs(node)))
        others = list(zip(op.inner_non_seqs(op.inputs) + op.inner_shared(op.inputs),
                          op.outer_non_seqs(node) + op.outer_shared(node)))
        known = {v: Value(v, self._inside(self.values[outer]), 0) for v, outer in sequences}
        known.update((v, Value(v, self.values[outer].state, 0)) for v, outer in others)
        self._refuse_merged(known.values())
        sources = {v: (outer, 1) for v, outer in sequences}
        sources.update((v, (outer, 0)) for v, outer in others)
        recurrences = {}
        for first, group, results, state in zip(self.outer, self.taken, self.results, self.states):
            for v in group:
                known[v] = Value(v, state, 0)
                recurrences[v] = first, [op.outputs[i] for i in results]
        self.inside = Shards.of_loop(self.shards, known, op.outputs, sources, recurrences)
        return self._new_states()

    def _find_rows(self):
        before = None
        while self.states != before:
            before = self.states
            self.states = [next((new for new in group if new.kind == ROWS and state.kind == CONSTANT), state)
                           for state, group in zip(before, self._analyse())]

    def _find_shares(self):
        """Find which states that are no rows add up shares of sums."""
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
        found, made = set(), {v for v in self.op.inputs if self.inside.value(v).kind == ROWS}
        while True:
            new = {i for i, group in enumerate(self.results) if self.states[i].kind == CONSTANT
                   and not made.isdisjoint(ancestors([self.op.outputs[j] for j in group]))} - found
            if not new:
                return found
            found |= new
            made.update(v for i in new for v in self.taken[i])

    def outputs(self):
        """Return the Values of the outputs of the loop."""
        shards, op = self.shards, self.op
        for variable, state in zip(self.outer, self.states):
            if state.kind == ROWS and self.values[variable].kind == CONSTANT:
                self.values[variable] = shards.cut(self.values[variable], state.axis + 1)
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
        # The loop counts samples, too.
        counting = [number.type() for number in shards.numbers]
        inner = clone(inner, replace=dict(zip(shards.numbers, counting)))
        new = Scan(list(op.inputs) + counting, inner, op.info)
        return shards.make_all(lambda *inputs: new(*list(inputs) + shards.numbers, return_list=True), values, states)

    def _rows_of_constants(self):
        """Return the new inner outputs, in which each new value of a state that has rows has them, too."""
        variables = [value.variable for value in self.inside.outputs]
        for state, group in zip(self.states, self.results):
            for i in group:
                if state.kind == ROWS and self.inside.outputs[i].kind == CONSTANT:
                    variables[i] = self.inside.cut(self.inside.outputs[i], state.axis).variable
                elif state.kind == ROWS and self.inside.outputs[i].state != state:
                    self.shards.refuse(self.node, 'samples change their axis from turn to turn')
        return variables


def _begins_at_zero(variable):
    node = variable.owner
    if node and isinstance(node.op, IncSubtensor) and node.op.set_instead_of_inc \
            and node.inputs[0].owner and isinstance(node.inputs[0].owner.op, AllocEmpty):
        return is_zero(node.inputs[1])  # nothing reads what the loop has not written yet
    return is_zero(variable)
