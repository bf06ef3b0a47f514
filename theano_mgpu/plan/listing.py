"""The instructions of a step, for people: the place of each, the values, and their bytes."""
from __future__ import annotations

from collections import Counter
from textwrap import shorten
from typing import Any, Mapping, Sequence

import theano
from theano.gof.graph import io_toposort

from ..graph.graph import bytes_of_shared
from ..utils.tables import counted
from .instructions import Add, Fetch, Finish, Gather, Launch, Save, Send, Store, Wait
from .lowering import divided, lowered

LONGEST = 50  # characters of the names of values
# Names of values that are put together, where the name of the reduction does not fit.
GATHERED = {'gather': 'gathered value', 'add': 'sum', 'multiply': 'product', 'same': 'equal value',
            'stack': 'stacked value'}


def listed(plan: Any, sizes: Mapping[theano.Variable, int | None]) -> list[dict[str, Any]]:
    """Return the instructions of a step on this process, with a batch of which each replica gets samples.

    Each has the `instruction`, `where` it is carried out, `what` it works on, the `names` of these values, and their
    `bytes` on each context, None where `sizes` does not have them. A launch has the names of the variables that are
    updated.
    """
    shares = plan.shares
    samples = shares.n_replicas * max(shares.micro_batches, shares.logical_shards) * shares.least_samples
    _, division = divided(shares, shares.rounds(samples))
    program = lowered(plan, division, plan.program.inputs)
    rows = []
    for name, instruction, _ in [*program.stages, *program.update]:
        where, what, values = _described(instruction, plan.machine.size)
        known: list[Any] = [bytes_of_shared(each) if hasattr(each, 'container') else sizes.get(each) for each in values]
        rows.append({'instruction': name, 'where': ', '.join(dict.fromkeys(where)),
                     'what': what, 'names': [each.name for each in values],
                     'bytes': None if None in known else sum(known)})
    return rows


def _described(instruction: Any, n_ranks: int) -> tuple[Sequence[str], str, Sequence[Any]]:
    """Return the names of contexts, words, and the values whose names and bytes count."""
    on_host = ['the host']
    if isinstance(instruction, Send):
        values = [move.variable for move in instruction.moves[0]]
        return [each.name for each in instruction.contexts], _named(values), values
    if isinstance(instruction, Launch):
        parts = dict.fromkeys(work.part for work in instruction.works)
        n_ops = [len(io_toposort([], [*part.graphs, *part.updates.values()])) for part in parts]
        made = sum(len(part.outputs) + len(part.updates) for part in parts)
        of = 'the update: ' if instruction.shards[0] is None else ''
        return [each.name for each in instruction.contexts], '%s%s, %s' % (
            of, ' + '.join(counted(n, 'op') for n in n_ops), counted(made, 'value')), \
            [each for part in parts for each in part.updates]
    if isinstance(instruction, Wait):
        return [work.context.name for work in instruction.works or instruction.others], \
            'until computed' if instruction.works else 'where phases are timed', ()
    if isinstance(instruction, Add):
        values = [each.variable for each in instruction.group.exchanges]
        return [instruction.group.way.by(n_ranks).partition(', ')[0]], _named(values, 'sum'), values
    if isinstance(instruction, Finish):
        values = [each.variable for group in instruction.groups for each in group.exchanges]
        by = [group.way.by(n_ranks).partition(', ') for group in instruction.groups]
        ways = list(dict.fromkeys(way for *_, way in by if way))
        return [place for place, *_ in by] or on_host, ', '.join([counted(len(values), 'sum'), *ways]), values
    if isinstance(instruction, Store):
        updated = [(variable, new) for new in instruction.news for variable in new.part.updates]
        where = [context.name for _, new in updated for context in (*new.contexts, *new.part.copied_to)]
        values = [variable for variable, _ in [*updated, *instruction.rows]]
        return where + on_host * bool(instruction.rows), _named(values, 'variable'), values
    if isinstance(instruction, Gather):
        kinds = Counter(GATHERED.get(str(each), str(each)) for each in instruction.reductions)
        ways = ['MPI'] * (n_ranks > 1 and not instruction.own)
        return on_host, ', '.join([*(counted(n, kind) for kind, n in kinds.items()), *ways]), instruction.variables
    if isinstance(instruction, Fetch):
        return on_host, _named(instruction.variables), instruction.variables
    assert isinstance(instruction, Save)
    return on_host, counted(len(instruction.slots), 'value'), ()


def _named(values: Sequence[Any], noun: str = 'value') -> str:
    """Return how many values there are, and the first names."""
    names = [each.name.lstrip('/') for each in values if each.name]  # Keras begins names of inputs with it
    return counted(len(values), noun) + ': ' * bool(names) + shorten(', '.join(names), LONGEST, placeholder=' ...')
