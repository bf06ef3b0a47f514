"""Branches, loops and ops that are made of graphs."""
from theano import clone
from theano.compile.builders import OpFromGraph
from theano.gof.graph import ancestors
from theano.ifelse import IfElse
from theano.scan_module.scan_op import Scan
from theano.tensor.basic import AllocEmpty
from theano.tensor.subtensor import IncSubtensor

from ...graphs.inlined import inner_graph
from ..shards import check_limits, rule
from ..states import CONSTANT, NUMBER, PARTIAL, ROWS, WHOLE, State, Value, partial, rows
from .base import aligned, is_zero, share, wholes
from .maps import is_map, mapped


@rule(IfElse)
def _if_else(shards, node, values):
    values = wholes(shards, values)
    if values[0].kind != CONSTANT:
        shards.refuse(node, 'it asks single samples')
    n = len(node.outputs)
    pairs, states = [], []
    for pair in zip(values[1:n + 1], values[n + 1:]):
        state = State(CONSTANT, size=NUMBER) if any(value.state.size is not None for value in pair) else WHOLE
        if any(value.kind == ROWS for value in pair):
            pair, state = aligned(shards, node, pair)
        pairs.append(pair)
        states.append(state)
    chosen = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    return shards.apply(node, values[:1] + chosen, states)


@rule(OpFromGraph)
def _op_from_graph(shards, node, values):
    """As the graph that the op is made of."""
    return [shards.converted(output) for output in inner_graph(node, node.inputs)]


@rule(Scan)
def _scan(shards, node, values):
    """A loop, whose graph is analysed like the one around it: slices and states have one axis less, the time."""
    values = wholes(shards, values)
    if values[0].kind != CONSTANT:
        shards.refuse(node, 'it loops over samples')
    if is_map(node, values):
        return mapped(shards, node, values)
    check_limits(None, values)
    if all(value.kind == CONSTANT for value in values):
        return shards.constant(node, values)
    loop = _Loop(shards, node, dict(zip(node.inputs, values)))
    return loop.outputs()


EACH_TURN = 'each turn of the loop needs what other samples have come to'


class _Loop:
    """What the states of a loop are, found by trying: rows that come in spread until nothing changes."""

    def __init__(self, shards, node, values):
        op = node.op
        self.shards, self.node, self.op, self.values = shards, node, op, values
        self.outer = op.outer_mitmot(node) + op.outer_mitsot(node) + op.outer_sitsot(node)
        slices = iter(op.inner_mitmot(op.inputs) + op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs))
        self.taken = [[next(slices) for _ in taps] for taps in op.info['tap_array']]
        results = iter(range(len(op.outputs)))  # places in op.outputs
        counts = [len(taps) for taps in op.mit_mot_out_slices] + [1] * (len(self.outer) - op.n_mit_mot)
        self.given = [[next(results) for _ in range(count)] for count in counts]
        self.others = list(results)
        self.states = [self._inside(values[variable]) for variable in self.outer]
        self._find_rows()
        if self.inside.exchanges or any(state.kind == PARTIAL for state in self._new_states()):
            self._find_shares()
        if self.inside.exchanges:
            shards.refuse(node, EACH_TURN)
        if any(value.state.outer is not None for value in self.inside.outputs):
            shards.refuse(node, 'its samples are merged into another axis')
        if any(v.kind != CONSTANT for v in self.inside.outputs[len(op.outputs) - self._n_last():]):
            shards.refuse(node, 'its end, or its random numbers, depend on single samples')

    def _n_last(self):
        return self.op.n_shared_outs + bool(self.op.as_while)

    def _inside(self, value):
        """The state of a slice of a value."""
        if value.kind != ROWS:
            return WHOLE
        if value.axis == 0:
            self.shards.refuse(self.node, 'it loops over samples')
        if value.state.outer is not None:
            self.shards.refuse(self.node, 'its samples are merged into another axis')
        return rows(value.axis - 1)

    def _analyse(self):
        op, node = self.op, self.node
        sequences = list(zip(op.inner_seqs(op.inputs), op.outer_seqs(node)))
        known = {v: Value(v, self._inside(self.values[o]), 0) for v, o in sequences}
        sources = {v: (o, 1) for v, o in sequences}
        for inner, outer in ((op.inner_non_seqs, op.outer_non_seqs), (op.inner_shared, op.outer_shared)):
            known.update((v, Value(v, self.values[o].state, 0)) for v, o in zip(inner(op.inputs), outer(node)))
            sources.update((v, (o, 0)) for v, o in zip(inner(op.inputs), outer(node)))
        if any(value.state.outer is not None for value in known.values()):
            self.shards.refuse(node, 'its samples are merged into another axis')
        for group, state in zip(self.taken, self.states):
            known.update((v, Value(v, state, 0)) for v in group)
        recurrences = {v: (first, [op.outputs[i] for i in new])
                       for first, group, new in zip(self.outer, self.taken, self.given) for v in group}
        self.inside = type(self.shards).of_loop(self.shards, known, op.outputs, sources, recurrences)
        return [[self.inside.outputs[i].state for i in group] for group in self.given]

    def _new_states(self):
        """The states of what the next turn reads."""
        return [self.inside.outputs[i].state for group in self.given for i in group]

    def _find_rows(self):
        while True:
            before = list(self.states)
            for i, group in enumerate(self._analyse()):
                for state in group:
                    if state.kind == ROWS and self.states[i].kind == CONSTANT:
                        self.states[i] = state
            if self.states == before:
                return

    def _find_shares(self):
        """What is no rows may add up shares of sums."""
        for i in self._made_of_samples():
            self.states[i] = partial()
        while True:
            found = self._analyse()
            others = [i for i, group in enumerate(found) if self.states[i].kind == PARTIAL
                      and any(new != self.states[i] for new in group)]
            if not others:
                break
            for i in others:
                self.states[i] = WHOLE
        if any(new.kind == PARTIAL != state.kind for state, group in zip(self.states, found) for new in group):
            self.shards.refuse(self.node, EACH_TURN)

    def _made_of_samples(self):
        """Which of the states that are no rows depend on rows, be it by other such states."""
        found, made = set(), {v for v in self.op.inputs if self.inside.value(v).kind == ROWS}
        while True:
            new = {i for i, group in enumerate(self.given) if self.states[i].kind == CONSTANT
                   and not made.isdisjoint(ancestors([self.op.outputs[j] for j in group]))} - found
            if not new:
                return found
            found |= new
            made.update(v for i in new for v in self.taken[i])

    def outputs(self):
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
        results = [group[0] for group in self.given] + self.others
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
        """The new inner outputs; of a state that has rows, each new value has them."""
        found = [value.variable for value in self.inside.outputs]
        for state, group in zip(self.states, self.given):
            for i in group:
                if state.kind == ROWS and self.inside.outputs[i].kind == CONSTANT:
                    found[i] = self.inside.cut(self.inside.outputs[i], state.axis).variable
                elif state.kind == ROWS and self.inside.outputs[i].state != state:
                    self.shards.refuse(self.node, 'samples change their axis from turn to turn')
        return found


def _begins_at_zero(variable):
    node = variable.owner
    if node and isinstance(node.op, IncSubtensor) and node.op.set_instead_of_inc \
            and node.inputs[0].owner and isinstance(node.inputs[0].owner.op, AllocEmpty):
        return is_zero(node.inputs[1])  # nothing reads what the loop has not written yet
    return is_zero(variable)
