"""A plan explained: what runs where, what is exchanged and by whom, how much memory it takes, and why."""
import itertools
from typing import Any, Dict, Iterable, List, Mapping, Optional

import numpy as np
import theano
from theano.gof.graph import io_toposort

from ..devices.context_map import describe
from ..graphs.graph import shared_variables
from ..utils.tables import counted, table
from .buckets import bytes_of_gradients

UNKNOWN = '?'
Sizes = Mapping[theano.Variable, int]


def explanation(plan: Any, sizes: Optional[Sizes] = None) -> Dict[str, Any]:
    """Return what a plan says, as plain data for `json.dump`.

    Parameters
    ----------
    plan : StepPlan
    sizes : dict of theano.Variable to int, optional
        Bytes of exchanged values and of the values that are saved, for one batch.

    Returns
    -------
    dict
        Bytes are None where they are not known.
    """
    sizes = {**_sizes_of_gradients(plan), **(sizes or {})}
    stages = [{'ops': sum(_n_ops(part) for part in stage.parts),
               'parts': [_part(part) for part in stage.parts],
               'exchanges': _exchanges(plan, stage.boundary, sizes)} for stage in plan.stages]
    return {'name': plan.name, 'processes': plan.machine.size, 'replicas': plan.shares.n_replicas,
            'micro_batches': plan.shares.micro_batches, 'contexts': [each.name for each in plan.mesh.contexts],
            'devices': [describe(row) for row in plan.mesh.replicas], 'stages': stages,
            'update': {'ops': sum(map(_n_ops, plan.update)), 'parts': [_part(part) for part in plan.update],
                       'exchanges': _exchanges(plan, plan.last, sizes)},
            'memory': _memory(plan, sizes), 'choices': [vars(choice) for choice in plan.choices]}


def explained(plan: Any, sizes: Optional[Sizes] = None) -> str:
    """Return a plan as text for a terminal."""
    return as_text(explanation(plan, sizes))


def as_text(found: Dict[str, Any]) -> str:
    """Return what `explanation` has returned as text for a terminal."""
    lines = [_title(found), '']
    rows = [['STAGE', 'OPS', 'WHERE', 'WHAT IS EXCHANGED BEFORE IT']]
    steps = [(str(i + 1), stage) for i, stage in enumerate(found['stages'])] + [('update', found['update'])]
    for name, stage in steps:
        where = list(dict.fromkeys(part['where'] for part in stage['parts'])) or ['-']
        exchanged = ['%s, by %s' % (_values_text(each), each['by']) for each in stage['exchanges']] or ['']
        first = [name, str(stage['ops'])]
        for place, text in itertools.zip_longest(where, exchanged, fillvalue=''):
            rows.append(first + [place, text])
            first = ['', '']
    lines += [table(rows, right={1}), '']
    rows = [['MEMORY, ESTIMATED', 'PARAMETERS', 'STATE', 'OTHER', 'SAVED VALUES']]
    rows += [[each['context'], *[bytes_text(each[kind]) for kind in ('parameters', 'state', 'other', 'saved')]]
             for each in found['memory']]
    lines += [table(rows, right={1, 2, 3, 4}), '']
    rows = [['CHOICE', 'CHOSEN', 'REASON']] + [[each['what'], each['chosen'], each['reason']]
                                              for each in found['choices']]
    return '\n'.join(lines + [table(rows)])


def bytes_text(n_bytes: Optional[int]) -> str:
    """Return a number of bytes for people.

    Examples
    --------
    >>> bytes_text(None), bytes_text(80), bytes_text(3600000)
    ('?', '80 B', '3.6 MB')
    """
    if n_bytes is None:
        return UNKNOWN
    for unit, factor in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n_bytes >= factor:
            return '%.3g %s' % (n_bytes / factor, unit)
    return '%d B' % n_bytes


def _title(found):
    name = found['name'] or 'a function'
    if found['replicas'] == 1:
        return '%s: whole, on %s' % (name, ' and '.join(found['devices']))
    slices = ', each in %d micro-batches' % found['micro_batches'] if found['micro_batches'] > 1 else ''
    processes = ' of %d processes' % found['processes'] if found['processes'] > 1 else ''
    return '%s: each batch in %d parts%s%s; here on %s' % (name, found['replicas'], processes, slices,
                                                           ' | '.join(found['devices']))


def _values_text(each):
    size = ' (%s)' % bytes_text(each['bytes']) if each['bytes'] is not None else ''
    names = [name for name in each['names'] if name]
    shown = ': ' + ', '.join(names[:3]) + ', ...' * (len(names) > 3) if names else ''
    return '%s%s%s' % (counted(each['values'], each['reduction']), size, shown)


def _n_ops(part) -> int:
    outputs = list(part.graphs) + list(part.updates.values())
    return len(io_toposort([], outputs)) if outputs else 0


def _part(part) -> Dict[str, Any]:
    return {'where': ', '.join(dict.fromkeys(context.name for context in part.contexts)), 'ops': _n_ops(part),
            'updates': [str(variable) for variable in part.updates],
            'copied_to': [context.name for context in part.copied_to if context not in part.contexts]}


def _exchanges(plan, boundary, sizes: Sizes) -> List[Dict[str, Any]]:
    """Return what is exchanged at a boundary, in groups of one reduction and one way."""
    if plan.shares.n_replicas == 1:
        return []
    ranks = plan.machine.size > 1
    groups = [(group.exchanges, 'sum', 'the host' + (', %s by MPI' % group.collective if ranks else ''))
              for group in boundary.sums]
    for exchange in boundary.others:
        groups.append(((exchange,), str(exchange.reduction), 'the host' + ', MPI' * ranks))
    merged: Dict[Any, List[Any]] = {}
    for exchanges, reduction, by in groups:
        merged.setdefault((reduction, by), []).extend(exchanges)
    return [{'values': len(exchanges), 'reduction': reduction, 'by': by,
             'names': [exchange.source.name for exchange in exchanges],
             'bytes': _total(sizes.get(exchange.variable, _static_size(exchange.variable)) for exchange in exchanges)}
            for (reduction, by), exchanges in merged.items()]


def _memory(plan, sizes: Sizes) -> List[Dict[str, Any]]:
    """Return the bytes that each context of this process needs for variables and saved values."""
    params, rows = set(plan.params), []
    updated = {variable for part in plan.parts for variable in part.updates}
    contexts = dict.fromkeys(context for part in plan.parts for context in part.contexts + part.copied_to)
    for context in contexts:
        parts = [part for part in plan.parts if context in part.contexts]
        read = dict.fromkeys(v for part in parts for v in shared_variables(
            list(part.graphs) + list(part.updates.values()) + list(part.updates)))
        saved = dict.fromkeys(variable for part in parts for variable in part.outputs)
        rows.append({'context': describe([context]), 'parameters': _bytes_of(v for v in read if v in params),
                     'state': _bytes_of(v for v in read if v in updated and v not in params),
                     'other': _bytes_of(v for v in read if v not in updated and v not in params),
                     'saved': _total(sizes.get(variable, _static_size(variable)) for variable in saved)})
    return rows


def _bytes_of(variables: Iterable[Any]) -> int:
    values = [variable.container.storage[0] for variable in variables]
    return sum(value.size * np.dtype(value.dtype).itemsize for value in values if hasattr(value, 'size'))


def _static_size(variable) -> Optional[int]:
    """Return the bytes of a value whose size its type says."""
    kind = variable.type
    if not hasattr(kind, 'broadcastable') or not all(kind.broadcastable):
        return None
    return np.dtype(kind.dtype).itemsize


def _total(sizes: Iterable[Optional[int]]) -> Optional[int]:
    sizes = list(sizes)
    return None if None in sizes else sum(sizes)


def _sizes_of_gradients(plan) -> Sizes:
    """Return about how many bytes each sum of gradients has, by its placeholder."""
    exchanges = [exchange for stage in plan.stages for exchange in stage.boundary.exchanges]
    exchanges += plan.last.exchanges
    new = {variable: value for part in plan.update for variable, value in part.updates.items()}
    sizes = bytes_of_gradients(exchanges, plan.params, new)
    return {each.variable: int(sizes[each.source]) for each in exchanges if each.source in sizes}
