"""The instructions of a step, for people: the place of each, the values, and their bytes."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import theano

from ..utils.tables import counted
from .instructions import Add, Fetch, Finish, Gather, Launch, Save, Send, Stack, Store, Wait
from .lowering import divided, lowered
from .sizes import bytes_of_shared

NAMED = 4  # values that are named


def listed(plan: Any, sizes: Mapping[theano.Variable, int | None]) -> list[dict[str, Any]]:
    """Return the instructions of a step on this process, with a batch of which each replica gets samples.

    Parameters
    ----------
    plan : StepPlan
    sizes : dict of theano.Variable to (int or None)
        The bytes of values on one context, where they are known.

    Returns
    -------
    list of dict
        The `instruction`, `where` it is carried out, `what` it works on, and the `bytes` of this on each context, None
        where they are not known.
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
                     'what': what, 'bytes': None if None in known else sum(known)})
    return rows


def _described(instruction: Any, n_ranks: int) -> tuple[Sequence[str], str, Sequence[Any]]:
    """Return the names of contexts, words, and the values whose bytes count."""
    on_host = ['the host']
    if isinstance(instruction, Send):
        values = [move.variable for move in instruction.moves[0]]
        return [each.name for each in instruction.contexts], _names(values), values
    if isinstance(instruction, Launch):
        parts = dict.fromkeys(work.part for work in instruction.works)
        made = sum(len(part.outputs) + len(part.updates) for part in parts)
        of = 'the update: ' if instruction.shards[0] is None else ''
        return [each.name for each in instruction.contexts], of + counted(made, 'value'), ()
    if isinstance(instruction, Wait):
        return [work.context.name for work in instruction.works or instruction.others], \
            'until computed' if instruction.works else 'where phases are timed', ()
    if isinstance(instruction, (Add, Finish)):
        groups = [instruction.group] if isinstance(instruction, Add) else instruction.groups
        values = [each.variable for group in groups for each in group.exchanges]
        by = [group.collective.by(n_ranks).partition(', ') for group in groups]  # such as the host, all_reduce by MPI
        ways = dict.fromkeys(way for *_, way in by if way and isinstance(instruction, Finish))
        return [place for place, *_ in by] or on_host, ', '.join([counted(len(values), 'sum'), *ways]), values
    if isinstance(instruction, Store):
        updated = [(variable, new) for new in instruction.news for variable in new.part.updates]
        where = [context.name for _, new in updated for context in (*new.contexts, *new.part.copied_to)]
        rows = [variable for variable, _ in instruction.rows]
        return where + on_host * bool(rows), counted(len(updated) + len(rows), 'variable'), \
            [variable for variable, _ in updated] + rows
    if isinstance(instruction, (Fetch, Gather)):
        return on_host, _names(instruction.variables), instruction.variables
    assert isinstance(instruction, (Save, Stack))
    return on_host, counted(len(instruction.slots) if isinstance(instruction, Save) else 1, 'value'), ()


def _names(values: Sequence[Any]) -> str:
    """Return the names of values, or how many there are."""
    names = [each.name.lstrip('/') for each in values if each.name][:NAMED]  # Keras begins names of inputs with it
    others = len(values) - len(names)
    return ', '.join(names + [counted(others, 'other' if names else 'value')] * bool(others))
