"""Branches and loops."""
from theano.ifelse import IfElse
from theano.scan_module.scan_op import Scan

from ..dependence import ACROSS, CONSTANT, COUPLED, MIXED, ROWS, STATISTICS, UNIFORM
from .base import aligned, combined, rule


@rule(IfElse)
def _if_else(analysis, node, inputs):
    if inputs[0].kind != CONSTANT:
        return analysis.couple(node)
    n = len(node.outputs)
    return [_either(analysis, node, pair) for pair in zip(inputs[1:n + 1], inputs[n + 1:])]


def _either(analysis, node, pair):
    """Dependence of what is the one or the other, the same one on each replica."""
    kinds = {d.kind for d in pair}
    with_rows = [d for d in pair if d.kind == ROWS]
    if pair[0] == pair[1]:
        return pair[0]
    if with_rows and aligned(with_rows) and kinds <= {ROWS, CONSTANT} \
            and not any(d.filled in ACROSS for d in pair):
        return with_rows[0]._replace(filled=None)
    return UNIFORM[combined(kinds)] if kinds <= set(STATISTICS + (CONSTANT,)) else analysis.couple(node)


@rule(Scan)
def _scan(analysis, node, inputs):
    """What is inside a loop: slices of the sequences and states have one axis less, the time."""
    op, of = node.op, dict(zip(node.inputs, inputs))
    sliced = op.outer_seqs(node) + op.outer_mitsot(node) + op.outer_sitsot(node)
    if inputs[0].kind != CONSTANT:
        return analysis.couple(node, 'loops over samples')
    if op.outer_mitmot(node) or any(of[v].kind == ROWS and of[v].axis == 0 for v in sliced):
        return analysis.couple(node, 'loops over samples')

    def step(variable):
        d = of[variable]
        return d._replace(axis=d.axis - 1) if d.kind == ROWS else d

    known = dict(zip(op.inner_seqs(op.inputs), map(step, op.outer_seqs(node))))
    known.update(zip(op.inner_non_seqs(op.inputs), (of[v] for v in op.outer_non_seqs(node))))
    known.update(zip(op.inner_shared(op.inputs), (of[v] for v in op.outer_shared(node))))
    slices = iter(op.inner_mitsot(op.inputs) + op.inner_sitsot(op.inputs))
    groups = [[next(slices) for _ in taps] for taps in op.tap_array]
    for outer, group in zip(op.outer_mitsot(node) + op.outer_sitsot(node), groups):
        known.update(dict.fromkeys(group, step(outer)))
    new_states = op.inner_mitsot_outs(op.outputs) + op.inner_sitsot_outs(op.outputs)
    while True:  # a state depends on what it became a step before
        inside = type(analysis)(op.outputs, known)
        before = dict(known)
        for group, new in zip(groups, new_states):
            known.update(dict.fromkeys(group, _grown(known[group[0]], inside.of(new))))
        if known == before:
            break
    for coupling in inside.couplings:
        analysis.couple(node, coupling.reason + ' (inside a loop over time)')
    if not inside.couplings and any(known[group[0]].kind == COUPLED for group in groups):
        analysis.couple(node)
    states = [_grown(known[group[0]], inside.of(new)) for group, new in zip(groups, new_states)]
    outputs = states + [inside.of(v) for v in op.inner_nitsot_outs(op.outputs)]
    if any(d.kind == MIXED for d in outputs):  # nobody can tell its terms from outside
        analysis.couple(node)
        outputs = [UNIFORM[COUPLED] if d.kind == MIXED else d for d in outputs]
    return [d._replace(axis=d.axis + 1) if d.kind == ROWS else d for d in outputs] \
        + [inside.of(v) for v in op.inner_shared_outs(op.outputs)]


def _grown(before, new):
    """Dependence of a state that was one thing and becomes another: once COUPLED, it stays so."""
    with_rows = [d for d in (before, new) if d.kind == ROWS]
    kinds = {before.kind, new.kind}
    if before == new:
        return before
    if with_rows and aligned(with_rows) and COUPLED not in kinds \
            and not any(d.filled in ACROSS for d in (before, new)):
        return with_rows[0]._replace(filled=None)
    return UNIFORM[combined(kinds) if kinds <= set(STATISTICS + (CONSTANT,)) else COUPLED]
