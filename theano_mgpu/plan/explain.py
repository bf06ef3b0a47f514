"""A plan explained: what runs where, the exchanges and their collectives, how much memory it takes, and why."""
from __future__ import annotations

from collections import defaultdict
from typing import Any, Sequence

import numpy as np
import theano

from ..devices.context_map import describe
from ..graph.graph import bytes_of_all
from ..utils.tables import bytes_text, counted, table
from ..utils.values import shortened
from .buckets import bytes_of_gradients
from .largest_batch import MemoryEstimate, variables_on
from .listing import listed

MOST = 30  # instructions that are shown at the beginning, and at the end
BRIEFLY = 'How batches are divided, or were in trials: WHY in the summary says which.'
NOT_KNOWN = '?: depends on the shapes of a batch'


def explanation(plan: Any, changes: Sequence[Any] = (), memory: MemoryEstimate | None = None) -> dict[str, Any]:
    """Return the content of a plan as plain data for `json.dump`; bytes are None where they are not known.

    Parameters
    ----------
    changes : list of Choice
        The choices that its steps have changed, see `Splitter.changes`.
    memory : MemoryEstimate, optional
        What was measured in its first steps, if there was one.
    """
    sizes = _sizes_of_exchanges(plan)
    return {'name': plan.name, 'processes': plan.machine.size, 'replicas': plan.shares.n_replicas,
            'micro_batches': plan.shares.micro_batches, 'logical_shards': plan.shares.logical_shards,
            'contexts': [each.name for each in plan.mesh.contexts],
            'devices': [describe(row) for row in plan.mesh.replicas],
            'stages': len(plan.stages), 'instructions': listed(plan, sizes), 'memory': _memory(plan, memory),
            'largest_batch': memory and memory.largest_batch,
            'fits': memory and largest_text(memory, plan.shares.grows),
            'choices': [vars(choice) for choice in plan.choices
                        if choice.what not in {each.what for each in changes}] + [vars(each) for each in changes]}


def as_text(data: dict[str, Any]) -> str:
    """Return the data of `explanation` as text."""
    rows = [[each['instruction'], each['where'], each['what'], '' if each['bytes'] == 0 else
             bytes_text(each['bytes'], '?')] for each in data['instructions']]
    if len(rows) > 2 * MOST:
        rows[MOST:-MOST] = [['and %d more' % (len(rows) - 2 * MOST)]]
    memory = [['MEMORY', 'PARAMETERS', 'STATE', 'OTHER VARIABLES', 'IN USE', 'OF', 'LARGEST BATCH']]
    for each in data['memory']:
        sizes = [bytes_text(each[kind]) for kind in ('parameters', 'state', 'other', 'used', 'total')]
        memory.append([each['context'], *sizes, str(each['largest_batch'] or '-')])
    choices = [['CHOICE', 'CHOSEN', 'REASON']]
    choices += [[each['what'], each['chosen'], each['reason']] for each in data['choices']]
    unknown = [NOT_KNOWN] * any(each['bytes'] is None for each in data['instructions'])
    fits = [data['fits']] if data['fits'] else []
    return '\n'.join([_title(data), '', table([['INSTRUCTION', 'WHERE', 'WHAT', 'BYTES'], *rows], right={3}), *unknown,
                      '', table(memory, right=set(range(1, 7))), *fits, '', table(choices)])


def in_brief(found: Sequence[dict[str, Any]]) -> str:
    """Return the division and the choices of functions, each once, from the data of `explanation`, as text."""
    titles = defaultdict(list)
    for data in found:
        name, _, rest = _title(data).partition(': ')
        titles[rest].append(name)
    choices = {(each['what'], each['chosen'], each['reason']) for data in found for each in data['choices']}
    return '\n'.join([BRIEFLY, *('%s: %s' % (shortened(names), rest) for rest, names in titles.items()), '',
                      table([('CHOICE', 'CHOSEN', 'REASON'), *sorted(choices)]),
                      *dict.fromkeys(data['fits'] for data in found if data['fits'])])


def largest_text(memory: MemoryEstimate, grows: bool) -> str:
    """Return a sentence on the batches that fit in the memory of every device.

    Larger batches are computed in slices where the number of slices `grows`.

    Examples
    --------
    >>> largest_text(MemoryEstimate({'dev0': 1 << 20}, {'dev0': 1 << 30}, {'dev0': 5312}), True)
    'Batches of up to about 5312 samples fit at once; larger ones are computed in slices.'
    """
    if not memory.used:
        return ('The memory of the devices is not measured, and so the largest batch is not known: that takes CUDA, '
                'and the flag gpuarray.preallocate=0.')
    if memory.largest_batch is None:
        return 'Batches of the lengths so far need too little memory to tell how long a batch may be.'
    return 'Batches of up to about %d samples fit at once%s.' % (
        memory.largest_batch, '; larger ones are computed in slices' * grows)


def _title(data: dict[str, Any]) -> str:
    name = data['name'] or 'a function'
    slices = ', each in %d micro-batches' % data['micro_batches'] if data['micro_batches'] > 1 else ''
    slices += ', in %d stages' % data['stages'] if data['stages'] > 1 else ''
    n_shards = data['logical_shards']
    shards = 'each batch in at most ' + counted(n_shards, 'logical shard') if n_shards else ''
    if data['replicas'] == 1:
        return '%s: %s%s, on %s' % (name, shards or 'whole batches', slices, ' and '.join(data['devices']))
    processes = ' of %d processes' % data['processes'] if data['processes'] > 1 else ''
    division = shards + ', divided among %d replicas' if shards else 'each batch in %d parts'
    return '%s: %s%s%s; here on %s' % (name, division % data['replicas'], processes, slices,
                                       ' | '.join(data['devices']))


def _memory(plan: Any, memory: MemoryEstimate | None) -> list[dict[str, Any]]:
    """Return the bytes that each context of this process needs for variables, and what was measured of its device."""
    params, rows = set(plan.params), []
    used, totals, largest = memory or MemoryEstimate({}, {}, {})
    updated = {variable for part in plan.parts for variable in part.updates}
    contexts = dict.fromkeys(context for part in plan.parts for context in part.contexts + part.copied_to)
    for context in contexts:
        read = variables_on(plan, context)
        rows.append({
            'context': describe([context]), 'parameters': bytes_of_all(v for v in read if v in params),
            'state': bytes_of_all(v for v in read if v in updated and v not in params),
            'other': bytes_of_all(v for v in read if v not in updated and v not in params),
            'used': used.get(context), 'total': totals.get(context), 'largest_batch': largest.get(context)})
    return rows


def _sizes_of_exchanges(plan: Any) -> dict[theano.Variable, Any]:
    """Return about how many bytes each exchanged value has; None where its type, and its use, do not tell."""
    of_gradients = bytes_of_gradients(plan.program, plan.params)
    sizes: dict[theano.Variable, Any] = {}
    for variable, source, _ in plan.program.every_exchange:
        if all(getattr(variable.type, 'broadcastable', [False])):
            sizes[variable] = np.dtype(variable.type.dtype).itemsize
        else:
            sizes[variable] = int(of_gradients[source]) if source in of_gradients else None
    return sizes
