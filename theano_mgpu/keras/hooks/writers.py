"""Callbacks that only write: files, tables, or records of an experiment. Rank 0 alone calls them."""
from __future__ import annotations

import dis
import functools
import os
import pkgutil
import re
import sys
import sysconfig
import types
from typing import Any

from keras import callbacks as keras_callbacks

from ...comm.trackers import CALLBACKS
from ...utils import progress

# Keras's own. Those that steer (EarlyStopping, schedules) have to run, and agree, on every rank.
WRITERS = tuple(vars(keras_callbacks)[name] for name in (
    'ModelCheckpoint', 'CSVLogger', 'RemoteMonitor', 'ProgbarLogger', 'TensorBoard') if hasattr(keras_callbacks, name))
ATTRIBUTE = 'mgpu_rank_0'  # by which a callback says whether rank 0 alone calls it
# Names that a callback reads if it writes.
WRITE = {'open', 'write', 'writerow', 'writelines', 'write_text', 'write_bytes', 'to_csv', 'to_json', 'to_hdf',
         'to_pickle', 'savetxt', 'savez', 'savez_compressed', 'save', 'savefig', 'imsave', 'imwrite', 'dump', 'File',
         'mkdir', 'makedirs', 'log_metric', 'log_metrics', 'log_param', 'log_params', 'log_artifact', 'add_scalar',
         'add_scalars', 'add_summary', 'add_image', 'add_histogram', 'post', 'put', 'urlopen', 'send', 'sendall',
         'sendmail', 'send_message', 'execute', 'executemany', 'commit', 'basicConfig', 'FileHandler'}
MODE = re.compile(r'[wax][bt+]{0,2}|r[bt]?\+[bt]?')  # of a file that is written
# Names that it reads, or sets, if all ranks need it.
NEEDED = {'set_value', 'batch_set_value', 'set_weights', 'load_weights', 'reset_states', 'compile', 'fit',
          'fit_generator', 'train_on_batch', 'test_on_batch', 'predict', 'predict_on_batch', 'evaluate',
          'predict_generator', 'evaluate_generator', 'predict_classes', 'predict_proba', 'function', 'eval', 'seed',
          'stop_training =', 'lr =', 'learning_rate =', 'trainable =', 'logs[...] ='}
# Packages that write nothing by themselves, beside Python's own.
QUIET = {'numpy', 'scipy', 'sklearn', 'keras', 'theano', 'theano_mgpu', 'six', 'tqdm'}
EACH = ('the callback %s runs on each rank, since it %s. Set %s = True in its class if only rank 0 is to call it, or '
        'False')


def only_writes(callback: keras_callbacks.Callback) -> bool:
    """Return whether rank 0 alone calls a callback; a note names a callback of which this is not known.

    Its attribute ``mgpu_rank_0`` says so. Without one, rank 0 alone calls Keras's own callbacks that write, callbacks
    of trackers of experiments, and callbacks whose code writes and neither steers the training nor calls the model.
    """
    said = getattr(callback, ATTRIBUTE, None)
    if said is not None:
        return bool(said)
    kind = type(callback)
    if isinstance(callback, WRITERS) or kind.__module__.partition('.')[0] in CALLBACKS:
        return True
    if kind.__module__.partition('.')[0] in ('keras', 'theano_mgpu') and kind.__name__ != 'LambdaCallback':
        return False
    names, packages = names_in(callback)
    writes, needed = names & WRITE, names & NEEDED
    if writes and needed:
        _note(kind, 'writes, by %s, and steers the training or calls the model, by %s' % (_text(writes), _text(needed)))
    elif packages and not writes and not needed:
        _note(kind, 'uses %s, which may write' % _text(packages))
    return bool(writes and not needed)


def _note(kind, reason):
    progress.note(EACH % (kind.__name__, reason, ATTRIBUTE))


def _text(names):
    return ' and '.join(sorted(names)[:2])


def names_in(callback: keras_callbacks.Callback) -> tuple[set[str], set[str]]:
    """Return the names in the code of a callback, and the packages that it uses and of which nothing is known here.

    Its code is its methods, functions that it has, and functions of its module that these call. A name that is set ends
    with " =".
    """
    own = type(callback).__module__
    functions = [value for cls in type(callback).__mro__ if cls.__module__.partition('.')[0] != 'keras'
                 for value in vars(cls).values()] + [*vars(callback).values()]
    names: set[str] = set()
    packages: set[str] = set()
    seen: set[Any] = set()
    while functions:
        function = functions.pop()
        function = getattr(function, '__func__', getattr(function, 'fget', function))
        if isinstance(function, types.FunctionType) and function.__code__ not in seen:
            seen.add(function.__code__)
            found, used = _names_of(function.__code__)
            names |= found
            for each in map(function.__globals__.get, used):
                module = each.__name__ if isinstance(each, types.ModuleType) else getattr(each, '__module__', None)
                if module in (own, function.__module__):
                    functions.append(each)
                elif isinstance(module, str):
                    packages.add(module.partition('.')[0])
    return names, packages - QUIET - _modules_of_python()


@functools.lru_cache(None)
def _modules_of_python():
    """Return the names of the modules that come with Python, which tells them since 3.10."""
    if sys.version_info >= (3, 10):
        return {'builtins', *sys.stdlib_module_names}
    folder = sysconfig.get_path('stdlib')
    found = pkgutil.iter_modules([folder, os.path.join(folder, 'lib-dynload')])
    return {*sys.builtin_module_names, *(each.name for each in found)}


@functools.lru_cache(None)
def _names_of(code):
    """Return the names in a code object, and the names of globals."""
    names, used, loaded = set(code.co_names), set(), []
    if not any(isinstance(constant, str) and MODE.fullmatch(constant) for constant in code.co_consts):
        names.discard('open')  # to read
    for each in dis.get_instructions(code):
        if each.opname == 'STORE_ATTR':
            names.add('%s =' % each.argval)
        elif each.opname == 'STORE_SUBSCR' and 'logs' in loaded[-6:] or \
                each.argval in ('update', 'setdefault') and loaded[-1:] == ['logs']:
            names.add('logs[...] =')
        elif each.opname == 'LOAD_GLOBAL':
            used.add(each.argval)
        # From Python 3.13 on, one instruction loads two variables.
        loaded += each.argval if isinstance(each.argval, tuple) else [each.argval]
    for inner in [_names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]:
        names |= inner[0]
        used |= inner[1]
    return names, used
