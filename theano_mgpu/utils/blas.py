"""The BLAS libraries of this process: their versions, kernels and threads, by which products round; newer kernels.

OpenBLAS chooses kernels for the processor when it is loaded. For a processor that is newer than the library, it may
take kernels of 2004, which are several times slower. The import of this module then has it take others.
"""
from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import subprocess
import sys
import zlib
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Iterator, Sequence

from ..errors import MgpuError
from . import flag_text, processor, progress

VARIABLE = 'OPENBLAS_CORETYPE'  # OpenBLAS reads it when it is loaded
OWN = 'MGPU_CORETYPE'  # the value that this package has given it, here or in the process that started this one
# The kernels to try, the newest first, and what the processor needs for them. Every OpenBLAS since 2018 knows them.
# Those for later processors multiply float32 and float64 as SkylakeX does.
KERNELS = {'SkylakeX': 'avx512f avx512cd avx512bw avx512dq avx512vl avx2 fma', 'Haswell': 'avx2 fma'}
# Those that do without AVX2.
OLD = ('katmai coppermine northwood prescott banias core2 penryn dunnington nehalem sandybridge atom nano athlon '
       'opteron opteron_sse3 barcelona bobcat bulldozer piledriver steamroller').split()
SECONDS = 30  # after which a check has failed
# They change when another library takes the place of one.
PLACES = '/etc/ld.so.cache', '/etc/alternatives', os.path.join(sys.prefix, 'conda-meta')

reason = 'its own choice'  # of the kernels, for `theano-mgpu doctor`


def loaded() -> dict[str, str]:
    """Return the name, version, kernels and threads of each BLAS that is loaded, by the name of its file, in order."""
    from threadpoolctl import threadpool_info  # its own order differs from process to process
    facts = 'internal_api', 'version', 'architecture', 'threading_layer'
    return {os.path.basename(each['filepath']): ' '.join([*filter(None, map(each.get, facts)),
                                                          'threads=%d' % each['num_threads']])
            for each in sorted(threadpool_info(), key=lambda each: each['filepath']) if each['user_api'] == 'blas'}


def outdated() -> str:
    """Return the version and kernels of each loaded OpenBLAS that could use AVX2, and does not; empty if none is."""
    return _old(loaded().values()) if _fitting(processor.description()) else ''


def _old(texts):
    return ' and '.join(text for text in dict.fromkeys(texts) if set(text.lower().split()).intersection(OLD))


def _fitting(description):
    """Return the names of the kernels that a processor can run, the newest first."""
    return [name for name, needed in KERNELS.items() if set(needed.split()) <= set(description.split())]


def share_cores() -> None:
    """Give the BLAS of this process its part of the cores, among the processes that its parent has started like it.

    A number of threads that the user has chosen stays, by the environment, as joblib does, or by threadpoolctl.
    """
    cores, processes = len(processor.usable()), _siblings()
    if processes > 1 and not any(name.endswith('_NUM_THREADS') for name in os.environ):
        for library in _libraries():
            if library.num_threads == cores:
                library.set_num_threads(max(1, cores // processes))


@functools.lru_cache(maxsize=None)
def _libraries():
    from threadpoolctl import ThreadpoolController
    return [each for each in ThreadpoolController().lib_controllers if each.user_api == 'blas']


@contextlib.contextmanager
def limited_threads(most: int) -> Iterator[None]:
    """Give each loaded BLAS at most a number of threads in the ``with`` block."""
    before = threads()
    set_threads([min(most, number) for number in before])
    try:
        yield
    finally:
        set_threads(before)


def threads() -> list[int]:
    """Return the number of threads of each loaded BLAS, for `set_threads`."""
    return [each.num_threads for each in _libraries()]


def set_threads(numbers: Sequence[int], in_fork: bool = False) -> None:
    """Give each loaded BLAS a number of threads.

    In a fork, OpenMP would wait for the threads of the parent: a BLAS with its threads gets one.
    """
    for library, number in zip(_libraries(), numbers):
        library.set_num_threads(1 if in_fork and getattr(library, 'threading_layer', None) == 'openmp' else number)


def _siblings():
    """Return how many processes with the same command, but for numbers, the parent of this one has started."""
    def command(process):
        words = re.sub('[0-9]', '', Path('/proc', process, 'cmdline').read_text(errors='replace')).split('\0')
        return [word for word in words if not word.startswith('-')][:2]

    with contextlib.suppress(OSError):  # not Linux, or one ends just now
        processes = [each for path in Path('/proc', str(os.getppid())).glob('task/*/children')
                     for each in path.read_text().split()]
        return sum(command(each) == command('self') for each in processes)
    return 1


def choose_kernels() -> None:
    """Choose the kernels of each OpenBLAS that is loaded later, by OPENBLAS_CORETYPE, unless the user did.

    Where the processor has AVX2, and the library's own choice does without, the newest kernels that pass a check are
    chosen. The result is kept for each processor and library; processes of a host that start together wait for one.
    """
    global reason
    value, is_late = os.environ.get(VARIABLE), 'numpy' in sys.modules
    if value is not None and value != os.environ.get(OWN):
        reason = '%s=%s in the environment' % (VARIABLE, value)
        return
    os.environ.pop(VARIABLE, None)  # of the process that started this one, perhaps on another processor
    names, found = _fitting(processor.description()), list(map(PathFinder.find_spec, ('numpy', 'scipy')))
    if not names or not found[0]:
        return
    try:
        chosen, reason, is_new = _result(names, [str(each.origin) for each in found if each])
    except (OSError, MgpuError) as error:
        chosen, reason, is_new = '', 'no newer ones are tried: %s. Set %s=%s' % (error, VARIABLE, names[-1]), True
    if chosen:
        os.environ[VARIABLE] = os.environ[OWN] = chosen
        if is_late:
            reason = 'NumPy was imported first. Import theano_mgpu before NumPy, or set %s=%s' % (VARIABLE, chosen)
    has_news = is_late if chosen else is_new  # the user is told once why no others were chosen
    if has_news:
        import numpy  # noqa: F401  loads its BLAS
        old = outdated()
        if old:
            progress.note('the kernels of %s are slow on this processor: %s' % (old, reason))


def _result(names, packages):
    """Return the chosen kernels, the reason, and whether they were checked only now."""
    words = flag_text.flag('blas.ldflags', '-lopenblas').split()
    libraries = ' '.join('lib%s.so' % word[2:] for word in words if word.startswith('-l'))
    key = [processor.description(), libraries, *map(os.environ.get, ('LD_PRELOAD', 'LD_LIBRARY_PATH')),
           *[(each, os.stat(each).st_mtime_ns) for each in (*packages, *PLACES) if os.path.exists(each)]]
    folder = os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'theano_mgpu')
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, 'blas_kernels_%08x' % zlib.crc32(repr(key).encode()))
    with open(path, 'a+', errors='replace') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        chosen, _, why = file.read().partition('\n')
        is_new = not why or chosen not in ['', *names]
        if is_new:
            chosen, why = _tried(names, libraries)
            file.truncate(0)
            file.write(chosen + '\n' + why)
    return chosen, why, is_new


def _tried(names, libraries):
    """Return the newest kernels that pass the check, or '', and the reason."""
    passed, text = _run_check('', libraries)
    old = _old(text.split('\n')) if passed else ''
    if not old:
        return '', reason if passed else 'no newer ones are tried: ' + text
    failures = []
    for name in names:
        passed, text = _run_check(name, libraries)
        if passed:
            return name, 'chosen by theano_mgpu in place of ' + old
        failures.append('%s: %s' % (name, text))
    return '', 'newer ones fail their check (%s). Install a newer OpenBLAS' % '; '.join(failures)


def _run_check(name, libraries):
    """Return whether each OpenBLAS passes with kernels of a name, or its own without one, and what it printed."""
    command = [sys.executable, os.path.join(os.path.dirname(__file__), 'blas_check.py'), name, libraries, *sys.path]
    environment = {**os.environ, 'OPENBLAS_NUM_THREADS': '2', **({VARIABLE: name} if name else {})}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors='replace', timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False, 'no result within %d s' % SECONDS
    if done.returncode:
        return False, done.stderr.strip().rpartition('\n')[2] or 'its process ended with %d' % done.returncode
    return True, done.stdout


choose_kernels()
