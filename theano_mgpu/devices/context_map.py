"""Context maps, such as ``dev0->cuda0;dev1->cuda1``, as text and as lists."""
from __future__ import annotations

import itertools
import re
from typing import Iterable, NamedTuple, Sequence

from ..errors import ContextError
from ..parsing import bare, shown
from . import discovery


class Context(NamedTuple):
    """One context: its `name`, its `device`, the device's `kind`."""

    name: str    #: Theano's name for the device, such as ``'dev0'``.
    device: str  #: ``'cuda0'``, ``'opencl0:1'`` (platform and device) or ``'cpu'``.
    kind: str    #: ``'cuda'``, ``'opencl'`` or ``'cpu'``.


HOST = Context('the host', 'cpu', 'cpu')  # values that belong to no replica are computed there
EXAMPLE = 'dev0->cuda0;dev1->cuda1'
UNQUOTED = '; quote the map: the shell took > as a redirection'


def parse_context_map(text: str) -> list[Context]:
    """Parse a context map, more strictly than Theano does: ``name->device`` entries, separated by ``;``.

    Blanks around both are allowed. Raise a ContextError for an entry that is empty or malformed, a name that is empty,
    repeated or looks like a device, or a device that is spelled like none.

    >>> parse_context_map('dev0->cuda0; dev1->cpu')
    [Context(name='dev0', device='cuda0', kind='cuda'), Context(name='dev1', device='cpu', kind='cpu')]
    """
    contexts: list[Context] = []
    for entry in text.split(';'):
        name, arrow, device = (part.strip() for part in entry.partition('->'))
        if not (name and arrow and device):
            raise ContextError("malformed entry %s in the context map %s: each entry reads name->device, separated by "
                               "';', e.g. %s%s" % (shown(entry), shown(text), EXAMPLE, UNQUOTED * entry.endswith('-')))
        if name == 'cpu' or name.startswith(('cuda', 'opencl')):
            raise ContextError("%s cannot name a context, since it looks like a device; "
                               "call it dev0, say: dev0->%s" % (shown(name), bare(device)))
        if not re.fullmatch(r'[\w.]+', name):
            raise ContextError('%s cannot name a context: use letters, digits and _ only, e.g. dev0' % shown(name))
        if any(name == context.name for context in contexts):
            raise ContextError("context %s is mapped twice in %s: give each entry a name of its own"
                               % (shown(name), shown(text)))
        kind = discovery.kind_of(device)
        if kind is None:
            raise ContextError('%s in the context map %s is no device: %s' % (
                shown(device), shown(text), "separate entries by ';', e.g. %s" % EXAMPLE if ',' in device else
                'use cuda0, opencl0:0 (platform:device) or cpu'))
        contexts.append(Context(name, device, kind))
    return contexts


def default_map(devices: Iterable[str]) -> str:
    """Return the context map for devices: dev0, dev1, and so on.

    >>> default_map(['cuda0', 'cuda1'])
    'dev0->cuda0;dev1->cuda1'
    """
    return ';'.join('dev%d->%s' % pair for pair in enumerate(devices))


def choose_devices(kind: str, existing: Sequence[str], n: int) -> list[str]:
    """Return devices for `n` contexts: the existing ones, then the next numbers; ``cpu`` is shared by all contexts.

    >>> choose_devices('cuda', ['cuda1'], 3)
    ['cuda1', 'cuda0', 'cuda2']
    >>> choose_devices('opencl', ['opencl0:0', 'opencl1:0'], 3)
    ['opencl0:0', 'opencl1:0', 'opencl0:1']
    >>> choose_devices('cpu', ['cpu'], 2)
    ['cpu', 'cpu']
    """
    if kind == 'cpu':
        return ['cpu'] * n
    numbered = [{'cuda': 'cuda%d', 'opencl': 'opencl0:%d'}[kind] % i for i in range(n)]
    return [*existing, *(device for device in numbered if device not in existing)][:n]


def longer_map(contexts: Sequence[Context], n: int) -> str:
    """Return the map of contexts and of further ones, `n` in all: on devices of the same kind, then on the same ones.

    >>> longer_map(parse_context_map('dev1->cpu'), 3)
    'dev1->cpu;dev2->cpu;dev0->cpu'
    """
    numbers, mapped = [*range(len(contexts), n), *range(len(contexts))], [context.device for context in contexts]
    names = [name for name in map('dev%d'.__mod__, numbers) if all(name != context.name for context in contexts)]
    free = [device for device in discovery.discover(contexts[-1].kind)[0] if device not in mapped]
    further = itertools.islice(zip(names, itertools.cycle(free + mapped)), n - len(contexts))
    return ';'.join([describe(contexts), *map('%s->%s'.__mod__, further)])


def brief(map_: str) -> str:
    """Return a context map for messages: of more than eight entries, the first and the last one.

    >>> brief(default_map(['cpu'] * 99))
    'dev0->cpu;...;dev98->cpu'
    """
    entries = map_.split(';')
    return map_ if len(entries) <= 8 else '%s;...;%s' % (entries[0], entries[-1])


def describe(contexts: Iterable[Context]) -> str:
    """Return contexts as a context map, for messages."""
    return ';'.join('%s->%s' % (context.name, context.device) for context in contexts)
