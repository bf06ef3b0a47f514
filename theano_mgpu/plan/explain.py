"""A plan explained: what runs where, the exchanges and their collectives, how much memory it takes, and why."""
from __future__ import annotations

import itertools
import shutil
from typing import Any, Dict, Iterable, Mapping, Sequence

import theano
from theano.gof.graph import io_toposort

from ..devices.context_map import describe
from ..graph.analysis import SUM
from ..graph.graph import shared_variables
from ..utils.tables import counted, table
from .buckets import bytes_of_gradients
from .listing import listed
from .memory import MemoryEstimate
from .sizes import bytes_of, bytes_of_shared

UNKNOWN = '?'
MOST = 20  # instructions that are shown
NOT_KNOWN = '?: depends on the shapes of a batch; theano-mgpu run --explain knows the first one'
# Names of exchanged values, where the name of the reduction does not fit.
VALUES = {'gather': 'gathered value', 'prod': 'product', 'max': 'maximum', 'min': 'minimum', 'stack': 'stacked value'}
Sizes = Dict[theano.Variable, Any]


def explanation(plan: Any, changes: Sequence[Any] = (), memory: MemoryEstimate | None = None) -> dict[str, Any]:
    """Return the content of a plan as plain data for `json.dump`.

    Parameters
    ----------
    plan : StepPlan
    changes : list of Choice
        The choices that its steps have changed, see `Splitter.changes`.
    memory : MemoryEstimate, optional
        What a dry run of the compiled plan has counted, if a batch is known.

    Returns
    -------
    dict
        Bytes are None where they are not known.
    """
    known = memory.sizes if memory else {}
    sizes = {**known, **_sizes_of_exchanges(plan, known)}
    return {'name': plan.name, 'processes': plan.machine.size, 'replicas': plan.shares.n_replicas,
            'micro_batches': plan.shares.micro_batches, 'logical_shards': plan.shares.logical_shards,
            'contexts': [each.name for each in plan.mesh.contexts],
            'devices': [describe(row) for row in plan.mesh.replicas],
            'stages': [_step(plan, stage.parts, stage.boundary, sizes) for stage in plan.stages],
            'update': _step(plan, plan.update, plan.last, sizes), 'instructions': listed(plan, sizes),
            'memory': _memory(plan, memory),
            'largest_batch': memory and memory.largest_batch, 'largest_slice': memory and memory.slice,
            'fits': (memory and largest_text(memory, plan.shares.grows)) or None,
            'choices': [vars(choice) for choice in plan.choices
                        if choice.what not in {each.what for each in changes}] + [vars(each) for each in changes]}


def as_text(data: dict[str, Any]) -> str:
    """Return the data of `explanation` as text, as wide as the terminal."""
    rows = [['STAGE', 'OPS', 'WHERE', 'EXCHANGED BEFORE IT', 'BYTES', 'ADDED BY', 'NAMES']]
    steps = [(str(i + 1), stage) for i, stage in enumerate(data['stages'])] + [('update', data['update'])]
    for name, stage in steps:
        exchanged = [[_counted_values(each), bytes_text(each['bytes']), each['by'],
                      ', '.join(filter(None, each['names']))] for each in stage['exchanges']]
        parts = [[str(part['ops']), part['where']] for part in stage['parts']] or [['0', '-']]
        for i, (part, cells) in enumerate(itertools.zip_longest(parts, exchanged, fillvalue=['', ''])):
            rows.append([name * (not i), *part, *(cells if i < len(exchanged) else [])])
    listing = [['INSTRUCTION', 'WHERE', 'WHAT', 'BYTES']]
    listing += [[each['instruction'], each['where'], each['what'], '' if each['bytes'] == 0 else
                 bytes_text(each['bytes'])] for each in data['instructions'][:MOST]]
    listing += [['and %d more' % (len(data['instructions']) - MOST)]] * (len(data['instructions']) > MOST)
    memory = [['MEMORY (ESTIMATE)', 'PARAMETERS', 'STATE', 'OTHER VARIABLES', 'VALUES AT ONCE']]
    kinds = ['parameters', 'state', 'other', 'values']
    if any(each['peak'] is not None for each in data['memory']):
        memory[0] += ['PEAK', 'OF', 'LARGEST BATCH']
        kinds += ['peak', 'total']
    for each in data['memory']:
        largest = [] if len(kinds) == 4 else ['-' if each['largest_batch'] is None else '%d' % each['largest_batch']]
        memory.append([each['context'], *['-' if each[kind] is None and kind in ('peak', 'total') else
                                          bytes_text(each[kind]) for kind in kinds], *largest])
    choices = [['CHOICE', 'CHOSEN', 'REASON']]
    choices += [[each['what'], each['chosen'], each['reason']] for each in data['choices']]
    unknown = [] if all(each['values'] is not None for each in data['memory']) else [NOT_KNOWN]
    fits = [data['fits']] if data['fits'] else []
    return '\n'.join([_title(data), '', _cut(table(rows, right={1, 4})), '', table(listing, right={3}), '',
                      table(memory, right=set(range(1, 8))),
                      *unknown, *fits, '', table(choices)])


def largest_text(memory: MemoryEstimate, grows: bool) -> str:
    """Return a sentence on the batches that fit in the memory of every device; nothing without a device.

    Parameters
    ----------
    memory : MemoryEstimate
    grows : bool
        Whether larger batches are computed in slices.

    Examples
    --------
    >>> largest_text(MemoryEstimate(64, {}, {'dev0': 1 << 30}, {'dev0': 5312, 'dev1': 5400}, 1200), True)
    'Batches of up to 5312 samples fit at once; larger ones are computed in slices, of up to 1200 samples on a device.'
    """
    if not memory.totals:
        return ''
    without = '' if memory.is_whole else ' Workspaces of cuDNN are not counted.'
    if memory.largest_batch is None:
        return 'Batches of any usual size fit at once.' + without
    slices = ''
    if grows:
        slices = '; larger ones are computed in slices' + (
            '' if memory.slice is None else ', of up to %d samples on a device' % memory.slice)
    return 'Batches of up to %d samples fit at once%s.%s' % (memory.largest_batch, slices, without)


def _cut(text: str) -> str:
    """Return a table whose lines are as long as the terminal is wide: the last column has names, of any number."""
    width = max(80, shutil.get_terminal_size((120, 24)).columns)
    return '\n'.join(line if len(line) <= width else line[:width - 3] + '...' for line in text.split('\n'))


def bytes_text(n_bytes: int | None) -> str:
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


def _title(data: dict[str, Any]) -> str:
    name = data['name'] or 'a function'
    slices = ', each in %d micro-batches' % data['micro_batches'] if data['micro_batches'] > 1 else ''
    n_shards = data['logical_shards']
    shards = 'each batch in at most ' + counted(n_shards, 'logical shard') if n_shards else ''
    if data['replicas'] == 1:
        return '%s: %s%s, on %s' % (name, shards or 'whole batches', slices, ' and '.join(data['devices']))
    processes = ' of %d processes' % data['processes'] if data['processes'] > 1 else ''
    division = shards + ', divided among %d replicas' if shards else 'each batch in %d parts'
    return '%s: %s%s%s; here on %s' % (name, division % data['replicas'], processes, slices,
                                       ' | '.join(data['devices']))


def _counted_values(each: dict[str, Any]) -> str:
    if each['reduction'] == 'same':
        return counted(each['values'], 'value') + ' alike'
    return counted(each['values'], VALUES.get(each['reduction'], each['reduction']))


def _step(plan: Any, parts: Sequence[Any], boundary: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the parts of a stage or of the update, and the exchanges before it."""
    data = [{'where': ', '.join(dict.fromkeys(context.name for context in part.contexts)),
             'ops': len(io_toposort([], [*part.graphs, *part.updates.values()])),
             'updates': [str(variable) for variable in part.updates],
             'copied_to': [context.name for context in part.copied_to if context not in part.contexts]}
            for part in parts]
    return {'ops': sum(part['ops'] for part in data), 'parts': data, 'exchanges': _exchanges(plan, boundary, sizes)}


def _exchanges(plan: Any, boundary: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the exchanges at a boundary, in groups of one reduction and one way."""
    if plan.shares.n_replicas == 1 and not plan.shares.logical_shards:
        return []
    groups: dict[tuple[str, str], list[Any]] = {}
    for group in boundary.sums:
        groups.setdefault(('sum', group.collective.by(plan.machine.size)), []).extend(group.exchanges)
    by = 'the host' + ', MPI' * (plan.machine.size > 1)
    for exchange in boundary.others:
        groups.setdefault((str(exchange.reduction), by), []).append(exchange)
    merged = []
    for (reduction, by), exchanges in groups.items():
        each_size = [sizes[exchange.variable] for exchange in exchanges]
        merged.append({'values': len(exchanges), 'reduction': reduction, 'by': by,
                       'names': [exchange.source.name for exchange in exchanges],
                       'bytes': None if None in each_size else sum(each_size)})
    return merged


def _memory(plan: Any, memory: MemoryEstimate | None) -> list[dict[str, Any]]:
    """Return the bytes that each context of this process needs for variables, and for values that it holds at once."""
    params, rows = set(plan.params), []
    updated = {variable for part in plan.parts for variable in part.updates}
    contexts = dict.fromkeys(context for part in plan.parts for context in part.contexts + part.copied_to)
    for context in contexts:
        parts = [part for part in plan.parts if context in part.contexts]
        read = dict.fromkeys(v for part in parts for v in shared_variables(
            [*part.graphs, *part.updates.values(), *part.updates]))
        row: dict[str, Any] = {
            'context': describe([context]), 'parameters': _bytes(v for v in read if v in params),
            'state': _bytes(v for v in read if v in updated and v not in params),
            'other': _bytes(v for v in read if v not in updated and v not in params),
            'values': memory.host if memory and context.kind == 'cpu' else None,
            'peak': None, 'total': None, 'largest_batch': None}
        if memory and context in memory.peaks:
            row.update(peak=memory.peaks[context], total=memory.totals.get(context),
                       largest_batch=memory.largest.get(context),
                       values=memory.peaks[context] - row['parameters'] - row['state'] - row['other'])
        rows.append(row)
    return rows


def _bytes(variables: Iterable[Any]) -> int:
    return sum(map(bytes_of_shared, variables))


def _sizes_of_exchanges(plan: Any, known: Mapping[theano.Variable, int]) -> Sizes:
    """Return about how many bytes each exchanged value has; None where its type, and its use, do not tell."""
    program = plan.program
    new = dict(zip(program.updated, (each.variable for each in program.outputs[-len(program.updated):])))
    of_gradients = bytes_of_gradients(program.every_exchange, plan.params, new)
    sizes: Sizes = {}
    for variable, source, reduction in program.every_exchange:
        alike = source if reduction == SUM else variable  # a sum is as large as its parts
        if alike in known:
            sizes[variable] = known[alike]
        elif all(getattr(variable.type, 'broadcastable', [False])):
            sizes[variable] = bytes_of(variable, ())
        else:
            sizes[variable] = int(of_gradients[source]) if source in of_gradients else None
    return sizes
