"""Bugs that were found and fixed, each under its symptom: processes that a script or a rank starts."""
import os
import subprocess
import sys
import venv
from pathlib import Path

from theano_mgpu.compat import theano_imports

import pytest
import theano
from support.launch import INTERPRETED, launch
from support.search_path import search_path

pytestmark = pytest.mark.verified
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """Return a Python that has the installed files of this package in site-packages, beside its dependencies."""
    if not (ROOT / 'setup.py').exists():
        pytest.skip('no setup.py beside these tests')
    folder = tmp_path_factory.mktemp('installed')
    venv.create(str(folder))
    site, = folder.glob('lib/python*/site-packages')
    subprocess.run([sys.executable, 'setup.py', '-q', 'build_py', '--build-lib', str(site)], cwd=str(ROOT), check=True)
    (site / 'others.pth').write_text('\n'.join(path for path in sys.path if path.endswith('-packages')))
    return folder / 'bin' / 'python'


def run_installed(python, *words, folder=None, **environment):
    env = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', theano_imports.IMPORTED)}
    done = subprocess.run([str(python)] + list(words), capture_output=True, text=True, cwd=str(folder or python.parent),
                          env=dict(env, **environment))
    assert done.returncode == 0, done.stderr
    return done.stdout


STARTS_PROCESSES = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import keras
import numpy as np
import theano
from keras.wrappers.scikit_learn import KerasClassifier
from sklearn.model_selection import GridSearchCV

def build(units=1):
    model = keras.Sequential([keras.layers.Dense(2, activation='softmax', input_shape=(3,))])
    model.compile('sgd', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    return model

def predict(rows):
    return build().predict(np.ones((rows, 3))).shape, theano.config.contexts, theano.config.floatX

if __name__ == '__main__':
    # A multiprocessing.Pool would start a worker that fails again and again.
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        print(list(pool.map(predict, [4])))
    search = GridSearchCV(KerasClassifier(build, verbose=0), {'units': [1]}, cv=2, n_jobs=2, error_score='raise')
    print(len(search.fit(np.ones((8, 3)), np.arange(8) % 2).cv_results_['params']))
"""


@pytest.mark.slow
def test_processes_that_a_script_starts_can_import_keras(installed, tmp_path):
    """GridSearchCV(n_jobs=2) and a spawned Pool: "module 'numpy' has no attribute 'bool'" in each of them."""
    (tmp_path / 'script.py').write_text(STARTS_PROCESSES)
    out = run_installed(installed, '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', 'script.py',
                        folder=tmp_path, THEANO_FLAGS='floatX=float32,cxx=,optimizer=fast_compile')
    assert out == "[((4, 2), 'a->cpu;b->cpu', 'float32')]\n1\n"


@pytest.mark.slow
def test_processes_that_need_no_fixes_are_left_alone(installed):
    """Nothing is imported before Theano or Keras is, and nothing by a Python that no such process has started."""
    loaded = "import sys; print([name for name in sys.modules if 'theano' in name])"
    assert run_installed(installed, '-c', loaded) == '[]\n'
    started = {theano_imports.IMPORTED: theano_imports.BY_PARENT}
    assert run_installed(installed, '-c', loaded, **started) == "['theano_mgpu_first']\n"
    theano_first = ('import sys, theano.tensor; from theano_mgpu.graph import graph; '
                    'assert theano is graph.theano; names = list(sys.modules); '
                    'print(names.index("theano_mgpu") < names.index("theano"), theano.__spec__.origin)')
    assert run_installed(installed, '-c', theano_first, **started) == 'True %s\n' % theano.__file__
    numpy_first = 'import numpy.linalg, sys; print(numpy is sys.modules["numpy"], "theano_mgpu" in sys.modules)'
    for value, imported in ('1', True), (theano_imports.BY_PARENT, False):
        assert run_installed(installed, '-c', numpy_first, MGPU_IMPORTED=value) == 'True %s\n' % imported
    first, = installed.parent.parent.glob('lib/python*/site-packages/theano_mgpu_first.py')
    first.rename(str(first) + '.gone')
    assert run_installed(installed, '-c', loaded, **started) == '[]\n'
    first.with_suffix('.py.gone').rename(first)


CLOSES_ALL = """
import gc, os, subprocess, sys
if sys.argv[1:] != ['child']:
    sys.exit(subprocess.run([sys.executable, __file__, 'child']).returncode)
import numpy as np, theano, theano.tensor as T
from theano_mgpu.compat.theano_compilation import LOCKS, _lock_files, _module_locked
from theano_mgpu.utils.owned import is_at, lock_file

x, lock = T.matrix(), lock_file('checkpoint')
f = theano.function([x], x.sum())
f(np.ones((40, 3)))
with _module_locked('.', 15 * '1'):
    pass
os.closerange(3, 256)
files = [open('mine%d.txt' % i, 'w+') for i in range(9)]
for file in files:
    file.write('my results, which are longer than the numbers of a lease')
    file.flush()

def check():
    for file in files:
        file.seek(0)
    print({file.read() for file in files} == {'my results, which are longer than the numbers of a lease'}, flush=True)
if not os.fork():
    check()
    os._exit(0)
os.wait()
del lock
gc.collect()
f(np.ones((40, 3)))
with _module_locked('.', 15 * '1'):
    print(is_at(*_lock_files.values(), LOCKS))
check()
"""


def test_a_process_that_closes_all_files_keeps_its_own_ones(tmp_path):
    """A child of run wrote 24 bytes, its batches, into the file that got the number of its lease's descriptor."""
    (tmp_path / 'script.py').write_text(CLOSES_ALL)
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', 'script.py'],
                          cwd=str(tmp_path), capture_output=True, text=True, env=dict(
                              os.environ, THEANO_FLAGS='cxx=,optimizer=fast_compile', PYTHONPATH=search_path(),
                              TMPDIR=str(tmp_path)))  # the process of the tests has devices of the same names
    assert done.returncode == 0 and done.stdout.splitlines() == ['True'] * 3, done
    assert done.stderr.splitlines()[-1].split() == ['a->cpu', '1', '2', '80']


A_RANK_STARTS = """
import subprocess, sys
import theano_mgpu as mgpu
import numpy as np, theano.tensor as T
if sys.argv[1:]:
    mgpu.init('a->cpu')
    x = T.vector()
    print(mgpu.rank(), mgpu.function([x], 2 * x)(np.ones(2, x.dtype)))
else:
    done = subprocess.run([sys.executable, __file__, 'started'], stdout=subprocess.PIPE, check=True, text=True)
    sys.exit(done.stdout != '%d [2. 2.]\\n' % mgpu.rank())
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_process_that_a_rank_starts_is_no_rank(tmp_path):
    """The process started MPI in the rank's name: "Local abort before MPI_INIT completed", and all ranks ended."""
    (tmp_path / 'script.py').write_text(A_RANK_STARTS)
    launch(2, job=str(tmp_path / 'script.py'), flags='cxx=,optimizer=fast_compile')


A_RANK_FORKS = """
import multiprocessing, os, subprocess, sys, threading
import numpy as np
import theano_mgpu as mgpu
import theano, theano.tensor as T

X = np.arange(40, dtype='float32').reshape(10, 4) / 40
x = T.matrix('x')


def made():
    w = theano.shared(np.arange(4, dtype='float32'), 'w')
    return mgpu.training_function([x], T.sqr(T.dot(x, w) - 1).mean(), [w], lambda g: {w: w - g[0] / 9}), w


def trained(step=None, w=None):
    if step is None:
        step, w = made()
    for _ in range(3):
        step(X)
    return mgpu.rank(), w.get_value()


def inherited():
    return trained(step, w)


def predicted():
    return mgpu.rank(), predictor.predict(X, batch_size=3)


def of_all_ranks():
    return v.get_value()


def expected(n):
    w = np.arange(4, dtype='float32')
    for _ in range(n):
        w = w - 2 / 9 * ((X.dot(w) - 1)[:, None] * X).mean(axis=0)
    return w


def check(found, values):
    assert found[0] == mgpu.rank()
    np.testing.assert_allclose(found[1], values, rtol=1e-4)


def in_a_pool(function, kind='fork', n=2):
    with multiprocessing.get_context(kind).Pool(n) as pool:
        return [each.get(60) for each in [pool.apply_async(function) for _ in range(n)]]


def in_a_fork(act):
    process = os.fork()
    if process == 0:
        act()
        sys.exit(7)
    return os.waitpid(process, 0)[1] >> 8


def raises():
    raise ValueError('no error of the job')


if __name__ == '__main__':
    mgpu.init('a->cpu')
    kinds = sys.argv[1:]
    if 'fork' in kinds:
        for found in in_a_pool(trained):
            check(found, expected(3))
    step, w = made()
    check(trained(step, w), expected(3))
    for kind in kinds:
        for found in in_a_pool(trained, kind):
            check(found, expected(3))
    if 'fork' in kinds:
        for found in in_a_pool(inherited, n=1):
            check(found, expected(6))
        predictor = mgpu.Predictor([x], 2 * x)
        for found in in_a_pool(predicted, n=1):
            check(found, 2 * X)
        v = theano.shared(np.zeros(4, 'float32'), 'v')
        divided = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w],
                                         lambda g: {v: v + g[0], w: w - v}, update_on='sharded')
        divided(X)
        try:
            in_a_pool(of_all_ranks, n=1)
            raise AssertionError('an old value')
        except mgpu.RankError as error:
            assert str(error).startswith('v is divided among 2 ranks'), error
        v.get_value()
        thread = threading.Thread(target=lambda: [step(X) for _ in range(20)])
        thread.start()
        for _ in range(3):
            assert in_a_fork(trained) == 7
        thread.join()
        assert in_a_fork(raises) == 1
        alone = 'from mpi4py import MPI; import theano_mgpu as mgpu; print(mgpu.rank(), MPI.COMM_WORLD.size); exit(5)'
        done = subprocess.run([sys.executable, '-c', alone], preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True)
        assert (done.returncode, done.stdout) == (5, '%d 1\\n' % mgpu.rank())
    trained(step, w)
    print('done')
"""


@pytest.mark.mpi
@pytest.mark.parametrize('kinds', ['fork', *(pytest.param(kinds, marks=pytest.mark.slow)
                                             for kinds in ('spawn', 'forkserver'))])
def test_a_process_that_a_rank_forks_computes_alone(kinds, tmp_path):
    """It used the rank's MPI: a crash, a pool that hung, or exit code 139 after the right output."""
    (tmp_path / 'script.py').write_text(A_RANK_FORKS)
    done = launch(2, kinds, job=str(tmp_path / 'script.py'), flags=INTERPRETED + ',mgpu.timeout=20')
    assert done.stdout == 'done\n', done.stderr
    if kinds == 'fork':
        assert 'ValueError: no error of the job' in done.stderr
