"""The settings of a run that results depend on: a ledger lists them, and checkpoints are continued with the same."""
from __future__ import annotations

import functools
import platform
import sys
from typing import Any, Sequence

import theano

from ..devices.contexts import chosen, type_name
from ..errors import warn
from ..graph import graph
from ..options import Options
from ..utils import blas
from ..utils.flag_text import GONE, OWN_FLAGS, flag
from ..utils.values import shortened
from . import ledger_file

# Theano's flags that change how results round. The package's own are all there but for `OTHERS`.
FLAGS = ('floatX', 'mode', 'linker', 'optimizer', 'optimizer_excluding', 'optimizer_including', 'cxx', 'gcc.cxxflags',
         'blas.ldflags', 'openmp', 'deterministic', 'dnn.conv.algo_fwd', 'dnn.conv.algo_bwd_data',
         'dnn.conv.algo_bwd_filter', 'contexts', 'device')
PACKAGES = 'theano_mgpu', 'theano', 'numpy', 'scipy', 'keras', 'pygpu'
OTHERS = ('mgpu.ledger', 'mgpu.ledger_every', 'mgpu.check', 'mgpu.timeline', 'mgpu.timeout', 'mgpu.compile_jobs',
          'mgpu.verify', 'mgpu.executor')
# Flags that change more than rounding, and flags that do not change the bits of logical shards.
ANSWER = ('floatX', 'mgpu.tf32', *GONE)
LAYOUT = ('contexts', 'device', 'mgpu.data', 'mgpu.shares', 'mgpu.collectives', 'mgpu.overlap', 'mgpu.keep_graphs',
          'mgpu.micro_batches', 'mgpu.recompute')
SHARDS = 'flags: mgpu.logical_shards'
GRAPH = 'graph: '
REMOVED = {'flags: ' + name: value for name, (value, _) in GONE.items()}  # earlier versions recorded them


def of_process() -> dict[str, dict[str, str]]:
    """Return the versions of packages, the BLAS and the flags of this process."""
    modules = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    versions = {'python': platform.python_version(),
                **{name: module.__version__ for name, module in modules.items() if hasattr(module, '__version__')}}
    return {'versions': versions, 'blas': blas.loaded(),
            'flags': {name: _flag(name) for name in [*FLAGS, *OWN_FLAGS] if name not in OTHERS}}


def _flag(name):
    """Return the value of a flag, as text; of the contexts, the map of the user."""
    if name == 'contexts':
        return flag(name, '')
    return str(functools.reduce(getattr, name.split('.'), theano.config))


def of_function(options: Options) -> dict[str, str]:
    """Return the settings of a function, by name: its flags are those with which it was made."""
    found = of_process()
    own = {**vars(options.flags), 'update_on': options.update_on}
    found['flags'].update(('mgpu.' + name, str(value)) for name, value in own.items() if 'mgpu.' + name not in OTHERS)
    return ledger_file.flat({**found, 'types of devices': sorted(set(map(type_name, chosen())))})


def of_graphs(sources: Sequence[Any]) -> dict[str, str]:
    """Return texts that tell the outputs and the updates of functions apart from others, by name.

    Of each there are digests; of a variable that is read, and not updated, the shape, or the value of a scalar.
    """
    named = {'output %d of function %d' % (i, number): output
             for number, source in enumerate(sources) for i, output in enumerate(source.outputs)}
    new = [pair for source in sources for pair in source.updates.items()]
    named.update(('update %d of %s' % (i, variable), value) for i, (variable, value) in enumerate(new))
    updated = dict(new)
    read = [each for each in graph.shared_variables(list(named.values())) if each not in updated]
    digests = graph.fingerprints(list(named.values()), {each: i for i, each in enumerate([*updated, *read])})
    texts = {name: 'ops %.8s with constants %.8s' % tuple(each) for name, each in zip(named, digests)}
    for i, variable in enumerate(read):
        shape = getattr(variable.container.storage[0], 'shape', None)
        texts['input %d, %s' % (i, variable)] = str(variable.get_value()) if shape == () else 'shape %s' % (shape,)
    return {GRAPH + name: text for name, text in texts.items()}


def check_same(path: str, theirs: dict[str, str], ours: dict[str, str], strict: bool) -> None:
    """Check that a file has the settings of a function, as far as results depend on them.

    With `strict`, another number of logical shards is a ValueError; else there is a warning, as for other settings.
    """
    ours = {**REMOVED, **ours}
    number, before = ours[SHARDS], theirs.get(SHARDS)
    text = '%s was written with mgpu.logical_shards=%s, but this function has %s: from here on, the bits would be ' \
           'of neither number. Set the flag to that of the file' % (path, before or '? (it has no record)', number)
    if strict and before not in (None, number):
        raise ValueError(text + ' to continue; to train from the beginning, remove the file or name another one')
    if number != (before or '0'):
        warn(text + ' for the same bits')
    keeps_bits = number == before != '0'
    different = ['%s was %s and is %s' % each for each in ledger_file.differing(theirs, ours)
                 if each[0] in theirs and each[0] in ours and each[0] != SHARDS and (
                     each[0].startswith(GRAPH) or each[0].rpartition(' ')[2] in ANSWER or
                     keeps_bits and each[0].rpartition(' ')[2] not in LAYOUT)]
    if different:
        warn('%s was written with other settings, or by another script: %s. The training goes on, but its result is '
             'not that of an uninterrupted one' % (path, shortened(different)))
