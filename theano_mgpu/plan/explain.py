"""A plan explained: what runs where, what is exchanged and by whom, how much memory it takes, and why."""
import itertools
import shutil
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import theano
from theano.gof.graph import io_toposort

from ..devices.context_map import describe
from ..graphs.graph import shared_variables
from ..utils.tables import counted, table
from .buckets import bytes_of_gradients
from .sizes import bytes_of, peak_of, shapes_of

UNKNOWN = '?'
NOT_KNOWN = '?: depends on the shapes of a batch; theano-mgpu run --explain knows the first one'
Shapes = Mapping[theano.Variable, Sequence[int]]


def explanation(plan: Any, shapes: Optional[Shapes] = None) -> Dict[str, Any]:
    """Return what a plan says, as plain data for `json.dump`.

    Parameters
    ----------
    plan : StepPlan
    shapes : dict of theano.Variable to tuple of int, optional
        The shapes of a replica's inputs, if a batch is known: then the values that a device holds at once are
        estimated, and the bytes of all that is exchanged.

    Returns
    -------
    dict
        Bytes are None where they are not known.
    """
    known, sizes = shapes_of(plan, shapes) if shapes else {}, _sizes_of_gradients(plan)
    sizes.update((variable, bytes_of(variable, shape)) for variable, shape in known.items())
    stages = [{'ops': sum(_n_ops(part) for part in stage.parts),
               'parts': [_part(part) for part in stage.parts],
               'exchanges': _exchanges(plan, stage.boundary, sizes)} for stage in plan.stages]
    return {'name': plan.name, 'processes': plan.machine.size, 'replicas': plan.shares.n_replicas,
            'micro_batches': plan.shares.micro_batches, 'contexts': [each.name for each in plan.mesh.contexts],
            'devices': [describe(row) for row in plan.mesh.replicas], 'stages': stages,
            'update': {'ops': sum(map(_n_ops, plan.update)), 'parts': [_part(part) for part in plan.update],
                       'exchanges': _exchanges(plan, plan.last, sizes)},
            'memory': _memory(plan, known), 'choices': [vars(choice) for choice in plan.choices]}


def explained(plan: Any, shapes: Optional[Shapes] = None) -> str:
    """Return a plan as text for a terminal; `shapes` as for `explanation`."""
    return as_text(explanation(plan, shapes))


def as_text(found: Dict[str, Any]) -> str:
    """Return what `explanation` has returned as text, as wide as the terminal."""
    rows = [['STAGE', 'OPS', 'WHERE', 'EXCHANGED BEFORE IT', 'BYTES', 'ADDED BY', 'NAMES']]
    steps = [(str(i + 1), stage) for i, stage in enumerate(found['stages'])] + [('update', found['update'])]
    for name, stage in steps:
        exchanged = [[_counted_values(each), bytes_text(each['bytes']), each['by'],
                      ', '.join(filter(None, each['names']))] for each in stage['exchanges']]
        parts = [[str(part['ops']), part['where']] for part in stage['parts']]
        for part, cells in itertools.zip_longest(parts or [['0', '-']], exchanged, fillvalue=[]):
            rows.append([name] + (part or ['', '']) + cells)
            name = ''
    memory = [['MEMORY (ESTIMATE)', 'PARAMETERS', 'STATE', 'OTHER VARIABLES', 'VALUES AT ONCE']]
    memory += [[each['context'], *[bytes_text(each[kind]) for kind in ('parameters', 'state', 'other', 'values')]]
               for each in found['memory']]
    choices = [['CHOICE', 'CHOSEN', 'REASON']]
    choices += [[each['what'], each['chosen'], each['reason']] for each in found['choices']]
    unknown = [] if all(each['values'] is not None for each in found['memory']) else [NOT_KNOWN]
    return '\n'.join([_title(found), '', _cut(table(rows, right={1, 4})), '', table(memory, right={1, 2, 3, 4}),
                      *unknown, '', table(choices)])


def _cut(text: str) -> str:
    """Return a table whose lines are as long as the terminal is wide: the last column has names, of any number."""
    width = max(80, shutil.get_terminal_size((120, 24)).columns)
    return '\n'.join(line if len(line) <= width else line[:width - 3] + '...' for line in text.split('\n'))


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
    slices = ', each in %d micro-batches' % found['micro_batches'] if found['micro_batches'] > 1 else ''
    if found['replicas'] == 1:
        return '%s: whole batches%s, on %s' % (name, slices, ' and '.join(found['devices']))
    processes = ' of %d processes' % found['processes'] if found['processes'] > 1 else ''
    return '%s: each batch in %d parts%s%s; here on %s' % (name, found['replicas'], processes, slices,
                                                           ' | '.join(found['devices']))


def _counted_values(each):
    if each['reduction'] == 'same':
        return counted(each['values'], 'value') + ' alike'
    return counted(each['values'], {'gather': 'gathered value', 'prod': 'product', 'max': 'maximum', 'min': 'minimum',
                                    'stack': 'stacked value'}.get(each['reduction'], each['reduction']))


def _n_ops(part) -> int:
    outputs = list(part.graphs) + list(part.updates.values())
    return len(io_toposort([], outputs)) if outputs else 0


def _part(part) -> Dict[str, Any]:
    return {'where': ', '.join(dict.fromkeys(context.name for context in part.contexts)), 'ops': _n_ops(part),
            'updates': [str(variable) for variable in part.updates],
            'copied_to': [context.name for context in part.copied_to if context not in part.contexts]}


def _exchanges(plan, boundary, sizes) -> List[Dict[str, Any]]:
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


def _memory(plan, known: Shapes) -> List[Dict[str, Any]]:
    """Return the bytes that each context of this process needs for variables, and for values that it holds at once."""
    params, rows = set(plan.params), []
    updated = {variable for part in plan.parts for variable in part.updates}
    contexts = dict.fromkeys(context for part in plan.parts for context in part.contexts + part.copied_to)
    for context in contexts:
        parts = [part for part in plan.parts if context in part.contexts]
        read = dict.fromkeys(v for part in parts for v in shared_variables(
            list(part.graphs) + list(part.updates.values()) + list(part.updates)))
        peaks = [peak_of(part, known) for part in parts] if known else [None]
        rows.append({'context': describe([context]), 'parameters': _bytes_of(v for v in read if v in params),
                     'state': _bytes_of(v for v in read if v in updated and v not in params),
                     'other': _bytes_of(v for v in read if v not in updated and v not in params),
                     'values': None if None in peaks else max(peaks, default=0)})
    return rows


def _bytes_of(variables: Iterable[Any]) -> int:
    values = [variable.container.storage[0] for variable in variables]
    return sum(value.size * np.dtype(value.dtype).itemsize for value in values
               if hasattr(value, 'size') and hasattr(value, 'dtype'))


def _static_size(variable) -> Optional[int]:
    """Return the bytes of a value whose size its type says."""
    kind = variable.type
    if not hasattr(kind, 'broadcastable') or not all(kind.broadcastable):
        return None
    return np.dtype(kind.dtype).itemsize


def _total(sizes: Iterable[Optional[int]]) -> Optional[int]:
    sizes = list(sizes)
    return None if None in sizes else sum(sizes)


def _sizes_of_gradients(plan) -> Dict[theano.Variable, int]:
    """Return about how many bytes each sum of gradients has, by its placeholder."""
    exchanges = [exchange for stage in plan.stages for exchange in stage.boundary.exchanges]
    exchanges += plan.last.exchanges
    program = plan.program
    new = dict(zip(program.updated, (each.variable for each in program.outputs[-len(program.updated):])))
    sizes = bytes_of_gradients(exchanges, plan.params, new)
    return {each.variable: int(sizes[each.source]) for each in exchanges if each.source in sizes}
