"""Bugs that were found and fixed, each under its symptom: kernels of OpenBLAS that are older than the processor."""
import ctypes
import os
import subprocess
import sys

from theano_mgpu.cli import job_command
from theano_mgpu.utils import blas, blas_check, processor

import pytest
from support.launch import launch
from threadpoolctl import threadpool_info

# OpenBLAS calls this for its kernels: it finds Prescott where the environment has none, which then is its own choice.
GETENV = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static char *value(const char *name) {
    size_t n = strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, n) && (*entry)[n] == '=') return *entry + n + 1;
    return NULL;
}
static int has(const char *list, const char *word) { return list && word && strstr(list, word); }
char *getenv(const char *name) {
    char *found = value(name), *log = value("LOG_OF_KERNELS");
    if (strcmp(name, "OPENBLAS_CORETYPE")) return found;
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%d\\n", getpid());
        fclose(file);
    }
    if (has(value("CRASHES"), found)) abort();
    if (has(value("HANGS"), found)) for (;;) pause();
    return found && !has(value("UNKNOWN"), found) ? found : "Prescott";
}
"""
SHOW = """
from threadpoolctl import threadpool_info
kernels = {each['architecture'].replace('Katmai', 'Prescott')  # its name since OpenBLAS 0.3.28
           for each in threadpool_info() if each['internal_api'] == 'openblas'}
"""
KERNELS = 'import theano_mgpu' + SHOW + 'print(*sorted(kernels))'
PRODUCTS = """
import theano_mgpu
import numpy as np
import theano, theano.tensor as T
for floatx in 'float32', 'float64':
    a = np.random.RandomState(0).rand(700, 700).astype(floatx)
    x = T.matrix(dtype=floatx)
    np.testing.assert_allclose(theano.function([x], T.dot(x, x))(a), np.dot(a, a), rtol=1e-3)
""" + KERNELS
FITTING = blas._fitting(processor.description())


@pytest.fixture(scope='module')
def machine(tmp_path_factory):
    """Return a function that runs Python where OpenBLAS's own choice is Prescott; the results of checks are kept."""
    if not FITTING or not any(each['internal_api'] == 'openblas' for each in threadpool_info()):
        pytest.skip('the processor has no AVX2, or NumPy no OpenBLAS')
    folder = tmp_path_factory.mktemp('kernels')
    library = folder / 'getenv.so'
    built = subprocess.run(['gcc', '-shared', '-fPIC', '-x', 'c', '-', '-o', str(library)], input=GETENV, text=True)
    if built.returncode:
        pytest.skip('no C compiler')

    def run(*words, cache=folder / 'cache', **environment):
        env = {name: value for name, value in os.environ.items() if name not in (blas.VARIABLE, blas.OWN)}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200,
                              env={**env, 'LD_PRELOAD': str(library), 'XDG_CACHE_HOME': str(cache), **environment})
        assert done.returncode == 0, done.stderr
        return done
    run.library, run.cache = library, folder / 'cache'
    return run


def processes_in(log):
    """Return the number of processes that have loaded OpenBLAS; forget them."""
    pids = set(log.read_text().split())
    log.unlink()
    return len(pids)


@pytest.mark.slow
def test_a_processor_that_openblas_does_not_know_runs_kernels_without_avx2(machine, tmp_path):
    log = tmp_path / 'log'
    done = machine('-c', PRODUCTS, cache=tmp_path, LOG_OF_KERNELS=str(log))
    assert done.stdout.split() == FITTING[:1] and 'note' not in done.stderr
    assert processes_in(log) == 3  # the library's own choice, the check, and the script
    done = machine('-c', PRODUCTS, cache=tmp_path, LOG_OF_KERNELS=str(log))
    assert done.stdout.split() == FITTING[:1] and processes_in(log) == 1


@pytest.mark.slow
def test_processes_of_a_script_have_its_kernels(machine):
    child = 'import numpy\n' + SHOW + 'print(*kernels)'
    done = machine('-c', 'import theano_mgpu, subprocess, sys; subprocess.run([sys.executable, "-c", %r])' % child)
    assert done.stdout.split() == FITTING[:1]


def test_doctor_tells_the_kernels_and_why_they_were_chosen(machine):
    check = 'from theano_mgpu.cli.doctor import host_checks as h; print(*h.check_blas(h.Setup()))'
    found = machine('-c', check).stdout
    assert found.startswith('ok') and FITTING[0] + ' ' in found
    assert 'chosen by theano_mgpu in place of' in found and 'Prescott' in found
    found = machine('-c', check, OPENBLAS_CORETYPE='Prescott').stdout
    assert found.startswith('warn') and 'OPENBLAS_CORETYPE=Prescott in the environment' in found


@pytest.mark.slow
def test_the_users_kernels_win(machine):
    done = machine('-c', KERNELS, OPENBLAS_CORETYPE='Haswell')
    assert done.stdout.split() == ['Haswell']
    done = machine('-c', KERNELS, OPENBLAS_CORETYPE='Prescott', MGPU_CORETYPE='Haswell')
    assert done.stdout.split() == ['Prescott'] and 'note' not in done.stderr


def test_kernels_that_crash_or_that_a_library_does_not_know_are_not_chosen(machine, tmp_path):
    done = machine('-c', KERNELS, cache=tmp_path, CRASHES='SkylakeX')
    assert done.stdout.split() == ['Haswell'] and 'note' not in done.stderr
    for notes in 1, 0:  # the second process finds the result
        done = machine('-c', KERNELS, cache=tmp_path / 'both', CRASHES='SkylakeX', UNKNOWN='Haswell')
        assert done.stdout.split() == ['Prescott'] and done.stderr.count('note: ') == notes
        for failure in ['Haswell: OpenBLAS 0', 'SkylakeX: its process ended with -6'][:len(FITTING)] * notes:
            assert failure in done.stderr


def test_a_check_that_hangs_ends(machine, monkeypatch):
    monkeypatch.setattr(blas, 'SECONDS', 1)
    monkeypatch.setenv('LD_PRELOAD', str(machine.library))
    monkeypatch.setenv('HANGS', 'Haswell')
    assert blas._run_check('Haswell', '') == (False, 'no result within 1 s')


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_told(machine, tmp_path):
    done = machine('-c', KERNELS, cache='/proc/none')
    assert done.stdout.split() == ['Prescott'] and done.stderr.count('note: ') == 1
    assert '/proc/none' in done.stderr and 'Set OPENBLAS_CORETYPE=Haswell' in done.stderr


@pytest.mark.slow
def test_a_damaged_result_is_checked_again(machine, tmp_path):
    machine('-c', 'import theano_mgpu', cache=tmp_path)
    kept, = (tmp_path / 'theano_mgpu').glob('blas_kernels_*')
    for text in (b'Prescott\nits own choice', b'\xff'):
        kept.write_bytes(text)
        assert machine('-c', KERNELS, cache=tmp_path).stdout.split() == FITTING[:1]


def test_kernels_are_checked_again_after_numpy_or_scipy_was_updated(monkeypatch, tmp_path):
    """A check counted for a newer SciPy, too, which brings an OpenBLAS of its own: its kernels may be wrong."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(blas, '_tried', lambda *arguments: ('Haswell', 'checked'))
    packages = [tmp_path / name for name in ('numpy', 'scipy')]
    for package in packages:
        package.touch()

    def is_new():
        return blas._result(['Haswell'], [str(each) for each in packages])[2]
    assert is_new() and not is_new()
    for package in packages:
        os.utime(str(package), (1, 1))
        assert is_new() and not is_new()


@pytest.mark.slow
def test_numpy_that_is_imported_first_is_told(machine):
    done = machine('-c', 'import numpy\n' + KERNELS)
    assert 'Prescott' in done.stdout.split() and done.stderr.count('note: ') == 1
    assert 'mport theano_mgpu before NumPy' in done.stderr and 'OPENBLAS_CORETYPE=' + FITTING[0] in done.stderr
    done = machine('-c', 'import numpy\n' + KERNELS, OPENBLAS_CORETYPE='Haswell')
    assert done.stdout.split() == ['Haswell'] and 'note' not in done.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_have_the_same_kernels(machine, monkeypatch, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text('import sys, theano_mgpu\n' + SHOW
                      + 'open(sys.argv[1] + str(theano_mgpu.rank()), "w").write(" ".join(kernels))\n')
    for name in blas.VARIABLE, blas.OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('LD_PRELOAD', str(machine.library))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('LOG_OF_KERNELS', str(tmp_path / 'log'))
    for mpirun in False, True:  # without the launcher, the first rank checks, and the others wait
        launch(2, tmp_path / 'rank', job=str(script), mpirun=mpirun, options=())
        assert [(tmp_path / ('rank%d' % rank)).read_text().split() for rank in (0, 1)] == [FITTING[:1]] * 2
        if not mpirun:
            for kept in (tmp_path / 'cache' / 'theano_mgpu').iterdir():
                kept.unlink()
            (tmp_path / 'log').unlink()
    assert processes_in(tmp_path / 'log') == 4


def test_kernels_of_another_processor_are_dropped_and_old_processors_are_not_checked(monkeypatch, tmp_path):
    """Ranks on other hosts are given the variables of the launcher, and tell the user's choice from its own."""
    carried = job_command.carry({blas.VARIABLE: 'SkylakeX', blas.OWN: 'SkylakeX'})
    assert blas.VARIABLE in carried and blas.OWN in carried
    monkeypatch.setattr(subprocess, 'run', None)
    monkeypatch.setattr(processor, 'CPUINFO', str(tmp_path / 'cpuinfo'))
    for text in ('flags : sse2 avx\n', 'Features : fp asimd\n', None):
        if text is None:
            (tmp_path / 'cpuinfo').unlink()
        else:
            (tmp_path / 'cpuinfo').write_text(text)
        monkeypatch.setenv(blas.VARIABLE, 'SkylakeX')
        monkeypatch.setenv(blas.OWN, 'SkylakeX')
        blas.choose_kernels()
        assert blas.VARIABLE not in os.environ
        assert blas.outdated() == ''


class Library:
    """OpenBLAS with one wrong element in the results of a function."""

    def __init__(self, library, name):
        self.library, self.name = library, name

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def wrong(*arguments):
            function(*arguments)
            element = ctypes.c_float if 'sge' in name else ctypes.c_double
            result = ctypes.cast(arguments[-2], ctypes.POINTER(element))
            result[0] += 1e-2
        return wrong if self.name in name else function


@pytest.mark.parametrize('name', ['sgemm', 'dgemm', 'sgemv', 'dgemv'])
def test_the_check_finds_a_wrong_product(name):
    paths = [each['filepath'] for each in threadpool_info() if each['internal_api'] == 'openblas']
    if not paths:
        pytest.skip('no OpenBLAS')
    library = ctypes.CDLL(paths[0])
    blas_check.compare(library)
    with pytest.raises(SystemExit, match='is wrong'):
        blas_check.compare(Library(library, name))


@pytest.mark.slow
def test_ranks_that_round_alike_were_refused_half_the_time():
    """A rank names each BLAS that it has loaded, here NumPy's and SciPy's, and ranks compare these texts.

    threadpoolctl lists them in the order of a set, which differs from process to process.
    """
    code = 'import scipy.linalg; from theano_mgpu.utils import blas; print(len(blas.loaded()), list(blas.loaded()))'
    texts = {subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': str(seed)}, check=True,
                            capture_output=True, text=True).stdout for seed in range(1, 7)}
    if any(text.startswith('1 ') for text in texts):
        pytest.skip('NumPy and SciPy share a BLAS here')
    assert len(texts) == 1
