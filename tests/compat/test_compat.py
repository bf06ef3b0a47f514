"""Patches: each is in the table, is applied where it is needed, and its symptom is back without it."""
import ast
import collections
import importlib.util
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import types
from importlib import metadata
from pathlib import Path

from theano_mgpu import compat
from theano_mgpu.compat import keras_libraries, pymc3, theano_flags
from theano_mgpu.devices import patches as device_patches
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import flag_text, mpi_environment
from theano_mgpu.utils.command_line import own_command

import numpy as np
import pytest
import scipy
import theano
import yaml
from support.patches import WITHOUT_PATCH, tables
from support.processes import python
from theano.gof import compilelock


def executed(code, **environment):
    """Run code in a fresh interpreter, without flags of Theano and a backend of Keras; return the finished process."""
    return python('-c', code, expected=None, **{'THEANO_FLAGS': None, 'KERAS_BACKEND': None, **environment})


def output(code, **environment):
    done = executed(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- The table of patches ------------------------------------------------------------------------

# Public functions in the modules of patches that patch nothing: patches, tests and the package use them.
NO_PATCHES = {'keras_names.about', 'keras_names.hint', 'keras_saving.share_files', 'legacy_convolutions.as_abstract',
              'legacy_convolutions.has_steps', 'numpy2.is_needed', 'old_flags.today', 'old_gpu.names', 'old_gpu.use',
              'theano_flags.blas_ldflags', 'theano_flags.lacks_python_headers', 'theano_keys.reads_keys',
              'theano_loops.options',
              'vector_math.available', 'vector_math.support_code'}
PATCHES = [patch for table in tables().values() for patch in table]


def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


TESTS = {name for path in Path(__file__).resolve().parents[1].rglob('test_*.py') for name in functions_of(path)}


@pytest.mark.parametrize('patch', PATCHES, ids=lambda patch: patch.apply.__name__)
def test_each_patch_names_its_library_its_symptom_and_a_test(patch):
    assert patch.library and patch.versions and patch.symptom
    assert patch.test in TESTS, '%s names no test: %s' % (patch.apply.__name__, patch.test)


def test_each_patch_is_in_a_table_once():
    assert set(tables()) == {'comm', 'compat', 'devices', 'graph', 'keras.hooks'}
    assert len({patch.apply for patch in PATCHES}) == len(PATCHES)
    applied = {'%s.%s' % (patch.apply.__module__.split('.')[-1], patch.apply.__name__) for patch in compat.PATCHES}
    found = {'%s.%s' % (path.stem, name) for path in Path(compat.__file__).parent.glob('*.py')
             if path.stem not in ('__init__', 'patches', 'patch', 'import_hooks', 'wrapping', 'keras_versions',
                                  'cross_validation')
             for name in functions_of(path) if not name.startswith('_')}
    assert found - applied == NO_PATCHES


def test_patches_are_applied_once():
    """A second import of a package whose first one failed must not wrap a function twice."""
    get_value = theano.compile.SharedVariable.get_value
    finders = list(sys.meta_path)
    compat.before_theano()
    compat.import_theano(device_patches.PATCHES)
    assert theano.compile.SharedVariable.get_value is get_value and sys.meta_path == finders


# --- Names that libraries have removed -----------------------------------------------------------

def needs(fix):
    """Return an expression that is true on the versions where a fix is needed."""
    return {'restore_numpy_aliases': tuple(map(int, np.__version__.split('.')[:2])) >= (1, 24),
            'restore_getargspec': sys.version_info >= (3, 11), 'restore_clock': True,
            'load_yaml_without_a_loader': int(yaml.__version__.split('.')[0]) >= 6,
            'restore_functions_of_scipy': tuple(map(int, scipy.__version__.split('.')[:2])) >= (1, 3),
            'restore_moved_modules': bool(importlib.util.find_spec('sklearn')),
            'restore_collections_abcs': sys.version_info >= (3, 10)}[fix]


@pytest.mark.slow_but_with('restore_functions_of_scipy*')
@pytest.mark.parametrize('fix,code,symptom', [
    ('restore_numpy_aliases', 'import theano_mgpu, theano; theano.scalar.mod.impl(5, 3)', 'AttributeError'),
    ('restore_collections_abcs', 'import theano_mgpu, keras', 'collections'),
    ('restore_moved_modules', 'import theano_mgpu, sklearn.cross_validation', 'sklearn.cross_validation'),
    ('restore_functions_of_scipy', 'import theano_mgpu; from scipy.misc import comb, logsumexp', 'scipy.misc'),
    ('load_yaml_without_a_loader', 'import theano_mgpu, yaml; assert yaml.load("a: 1") == {"a": 1}', 'Loader'),
    ('restore_clock', 'import theano_mgpu, time; time.clock()', "no attribute 'clock'"),
    ('restore_getargspec', 'import theano_mgpu, inspect; inspect.getargspec(lambda a, *b, c=2, **d: a)', 'getargspec'),
])
def test_without_a_fix_its_symptom_is_back(fix, code, symptom):
    if not needs(fix):
        pytest.skip('%s is not needed on Python %s with NumPy %s' % (fix, sys.version.split()[0], np.__version__))
    failed = executed(WITHOUT_PATCH % fix + code)
    assert failed.returncode != 0 and symptom in failed.stderr, failed.stderr
    assert executed(code).returncode == 0


def test_folds_take_the_number_of_samples_or_the_targets():
    pytest.importorskip('sklearn')
    assert output("""
import theano_mgpu
from sklearn.cross_validation import KFold, StratifiedKFold, train_test_split
from sklearn.externals.joblib import Memory
for train, test in KFold(7, 3):
    print(*test, end=';')
for train, test in StratifiedKFold([0, 1, 0, 1], 2):
    print(*sorted(test), len(train), end=';')
import joblib, sklearn.model_selection
assert Memory is joblib.Memory and train_test_split is sklearn.model_selection.train_test_split
""") == '0 1 2;3 4;5 6;0 1 2;2 3 2;'


def test_restored_names_are_those_of_python():
    assert np.bool in (bool, np.bool_) and np.object is object  # NumPy 2 has the former
    assert collections.Iterable is collections.abc.Iterable


def test_theano_and_keras_import_and_keras_runs_on_theano(tmp_path):
    """The user has no keras.json: Keras's own default is TensorFlow."""
    assert output('import theano_mgpu, theano, keras; print(keras.backend.backend(), theano.__version__)',
                  KERAS_HOME=str(tmp_path)) == 'theano 1.0.5'


def test_a_backend_that_was_chosen_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv('KERAS_BACKEND', 'cntk')
    keras_libraries.default_keras_backend()
    assert os.environ['KERAS_BACKEND'] == 'cntk'
    monkeypatch.delenv('KERAS_BACKEND')
    monkeypatch.setenv('KERAS_HOME', str(tmp_path))
    (tmp_path / 'keras.json').write_text(json.dumps({'backend': 'cntk'}))
    keras_libraries.default_keras_backend()
    assert 'KERAS_BACKEND' not in os.environ


@pytest.mark.slow
def test_blas_flags_are_the_users_or_ones_that_link(tmp_path):
    code = 'import theano_mgpu, theano; print(repr(theano.config.blas.ldflags))'
    assert output(code) == repr(theano_flags.blas_ldflags())
    assert output(code, THEANO_FLAGS='blas.ldflags=') == "''"
    rc = tmp_path / 'theanorc'
    rc.write_text('[blas]\nldflags = -lm\n')
    assert output(code, THEANORC=str(rc)) == "'-lm'"


def test_blas_flags_without_openblas(monkeypatch):
    monkeypatch.setattr(os.path, 'exists', lambda path: False)
    assert theano_flags.blas_ldflags() == ''


@pytest.mark.slow
def test_the_environment_is_as_before_after_the_import():
    flags = "floatX=float32,contexts=dev0->cpu,mgpu.executor=serial"
    code = ('import os, theano_mgpu, theano\n'
            'print(os.environ["THEANO_FLAGS"], theano.config.floatX, theano.config.mgpu.executor)')
    assert output(code, THEANO_FLAGS=flags) == flags + ' float32 serial'
    assert output('import os, theano_mgpu; print("THEANO_FLAGS" in os.environ)') == 'False'


def test_theano_does_not_warn_of_our_flags():
    done = executed('import theano_mgpu', THEANO_FLAGS='mgpu.executor=serial')
    assert 'does not recognise' not in done.stderr and done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_first_import_of_theano_is_quiet(tmp_path):
    """The installer may have compiled no modules: Python then warns of their syntax when they are imported."""
    (tmp_path / 'theano').mkdir()
    (tmp_path / 'theano' / 'new_module.py').write_text('theano_is_one = 1 is 1\n')
    code = 'import sys, theano_mgpu, theano; theano.__path__.append(%r); import theano.new_module' % str(
        tmp_path / 'theano')
    assert not executed(code, PYTHONDONTWRITEBYTECODE='1').stderr
    without = executed(WITHOUT_PATCH % 'ignore_syntax_warnings' + code, PYTHONDONTWRITEBYTECODE='1')
    assert 'SyntaxWarning' in without.stderr


@pytest.mark.slow
def test_theano_opens_no_context_by_itself():
    """Theano would log an error for this context."""
    code = 'import theano_mgpu, theano.gpuarray; print(theano.config.contexts, *theano.gpuarray.type.list_contexts())'
    done = executed(code, THEANO_FLAGS='contexts=dev0->opencl9:9')
    assert done.stdout == 'dev0->opencl9:9\n' and 'ERROR' not in done.stderr, done.stderr


@pytest.mark.parametrize('flag, nearest', [('mgpu.microbatches=3', 'the nearest is mgpu.micro_batches'),
                                           ('mgpu.zzz=1', 'there are: mgpu.executor, ')])
def test_a_flag_that_does_not_exist_is_an_error(flag, nearest, monkeypatch, tmp_path):
    """Theano only warned, and ignored the line of a .theanorc; the script then ran without the flag's effect."""
    name, value = flag.split('=')
    where = 'THEANO_FLAGS'
    monkeypatch.setenv(where, flag)
    for _ in range(2):
        with pytest.raises(MgpuError) as raised:
            flag_text.check_own_names()
        assert str(raised.value).startswith('there is no flag %s, which %s sets to %s; %s' % (
            name, where, value, nearest))
        where = str(tmp_path / 'theanorc')
        monkeypatch.setenv('THEANORC', where)
        (tmp_path / 'theanorc').write_text('[mgpu]\n%s\n' % flag.replace('mgpu.', ''))
        monkeypatch.setenv('THEANO_FLAGS', '')


@pytest.mark.slow
def test_a_wrong_flag_can_be_put_right_in_a_notebook():
    """The second import said "This name is already taken"."""
    code = """
import os
for flags in ('mgpu.executor=quick', 'mgpu.timeout=7'):
    try:
        import theano_mgpu
    except Exception as error:
        print(error)
    os.environ['THEANO_FLAGS'] = flags
import theano_mgpu, theano
print(theano.config.mgpu.timeout)
"""
    done = executed(code, THEANO_FLAGS='mgpu.executor=quick')
    first, second, timeout = done.stdout.splitlines()
    assert 'mgpu.executor=quick is not one of' in first and second == first and timeout == '7', done.stderr


def test_flags_that_have_gone_are_said_once_and_change_nothing():
    code = '''
import theano_mgpu, theano
flags = theano.config.mgpu
for _ in range(2):
    flags.batch_statistics = 'local'
flags.exchange = 'float32'
with theano.configparser.change_flags(**{'mgpu.exchange': 'float16'}):
    print(flags.batch_statistics, flags.exchange, 'mgpu.exchange' in str(theano.config))
'''
    done = executed(code, THEANO_FLAGS='mgpu.exchange=float16,mgpu.random=exact')
    assert done.stdout == 'exact float32 True\n', done.stderr
    *notes, last = done.stderr.split('old flags are read as what they mean today: ')
    assert len(notes) == 2 and notes[1].startswith('mgpu.exchange=float16 as mgpu.exchange=float32 (')
    assert last.startswith('mgpu.batch_statistics=local as mgpu.batch_statistics=exact (')


@pytest.mark.parametrize('name,own,default', [
    ('POCL_DEVICES', 'pthread', 'pthread pthread'), ('POCL_EXTRA_BUILD_FLAGS', '-Werror', '-w'),
    ('POCL_CACHE_DIR', 'mine', '/cache/pocl/kcache-rank1')])
def test_pocl_settings_of_the_user_are_left_alone(monkeypatch, name, own, default):
    """Each rank has a cache: two that built one kernel at once met "clBuildProgram: Unknown error" now and then."""
    monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
    for variable, value in zip(mpi_environment.MPIRUN.variables, '1212'):
        monkeypatch.setenv(variable, value)
    for setting in ('POCL_DEVICES', 'POCL_EXTRA_BUILD_FLAGS', 'POCL_CACHE_DIR'):
        monkeypatch.setenv(setting, own)
    device_patches.default_pocl_settings()
    assert os.environ[name] == own
    monkeypatch.delenv(name)
    device_patches.default_pocl_settings()
    assert os.environ[name] == default


@pytest.mark.slow
def test_an_mpi4py_without_mpi_does_not_end_the_import(tmp_path):
    (tmp_path / 'mpi4py').mkdir()
    (tmp_path / 'mpi4py' / '__init__.py').write_text('')
    (tmp_path / 'mpi4py' / 'MPI.py').write_text('raise RuntimeError("cannot load MPI library")')
    done = executed('import theano_mgpu, theano; print("fine")', PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == 'fine', done.stderr
    without = executed('import theano', PYTHONPATH=str(tmp_path)).stderr
    assert 'RuntimeError' in without or not flag_text.flag('blas.ldflags')


@pytest.mark.skipif(not shutil.which('g++'), reason='without g++ Theano does not try to compile')
@pytest.mark.skipif(theano_flags.lacks_python_headers(), reason='they are missing here')
def test_missing_python_headers_are_said_and_theano_imports_all_the_same(tmp_path):
    code = ('import sysconfig; paths = dict(sysconfig.get_paths(), include=%r)\n'
            'sysconfig.get_paths = lambda *args, **kwargs: paths\n'
            'import theano_mgpu, theano; print(repr(theano.config.cxx))' % str(tmp_path))
    done = executed(code)
    assert done.stdout.strip() == "''", done.stderr
    assert 'apt-get install python3-dev' in done.stderr
    assert 'python3-dev' not in executed('import theano_mgpu').stderr


COMPILES = '''
import theano_mgpu
import theano
import theano.tensor as T
from theano.gof.cmodule import GCC_compiler
from theano.sandbox.rng_mrg import MRG_RandomStreams
compile_str = GCC_compiler.compile_str

def recorded(module_name, src_code, *args, **kwargs):
    print(next(line for line in src_code.splitlines() if 'Op class' in line))
    return compile_str(module_name, src_code, *args, **kwargs)

GCC_compiler.compile_str = staticmethod(recorded)
x = T.matrix()
w = theano.shared(theano._asarray([[1., 2.]], theano.config.floatX))
drawn = MRG_RandomStreams(1).uniform((x.shape[0], 2))
theano.function([x], [T.nnet.softmax(T.dot(x, w) + w[0]) + drawn, x.dimshuffle(1, 'x', 0)])
'''


@pytest.mark.slow
@pytest.mark.skipif(not theano.config.cxx, reason='nothing is compiled without g++')
def test_what_was_compiled_once_is_not_compiled_again():
    """Each process compiled products, softmax, random draws and DimShuffle anew: seconds for any model."""
    for _ in range(2):
        done = executed(COMPILES, PYTHONHASHSEED='random')
        assert done.returncode == 0, done.stderr
    assert not done.stdout


HOLDS_THE_LOCK = '''
import sys, time
import theano_mgpu
from theano.gof import compilelock
compilelock.get_lock(lock_dir=sys.argv[1])
print('held', flush=True)
time.sleep(1)
compilelock.release_lock()
'''


@pytest.mark.slow
def test_waiting_for_compiled_code_is_short_and_draws_no_numbers_of_the_user(tmp_path):
    """Theano would sleep for 5 to 10 seconds, and ask Python's generator how long."""
    folder = str(tmp_path / 'lock_dir')
    other = subprocess.Popen([sys.executable, '-c', HOLDS_THE_LOCK, folder], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == 'held\n'
    state, began = random.getstate(), time.perf_counter()
    compilelock.lock(folder)
    assert 0.2 < time.perf_counter() - began < 4 and random.getstate() == state
    compilelock.Unlocker(folder).unlock()
    assert other.wait() == 0
    other.stdout.close()


@pytest.mark.slow
def test_scipy_stats_is_imported_by_the_op_that_needs_it():
    done = executed("""if True:
        import sys
        import theano_mgpu, theano
        print('scipy.stats' in sys.modules)
        x = theano.tensor.dscalar()
        print('%.6f' % theano.function([x], theano.tensor.chi2sf(x, 3.0))(1.5), 'scipy.stats' in sys.modules)
        from scipy import stats
        print(stats.norm.cdf(0))""", THEANO_FLAGS='cxx=,optimizer=None')
    assert done.stdout.split() == ['False', '0.682270', 'True', '0.5'], done.stderr


@pytest.mark.slow
def test_scipy_signal_is_left_to_those_who_need_it():
    done = executed("""if True:
        import sys
        import theano_mgpu, theano
        print('scipy.signal' in sys.modules)
        from scipy import signal
        print(signal.convolve([1, 2], [1, 1]))""", THEANO_FLAGS='cxx=,optimizer=None')
    assert done.stdout.split('\n')[:2] == ['False', '[1 3 2]'], done.stderr


@pytest.mark.slow
def test_the_collector_does_not_look_for_garbage_among_what_theano_consists_of():
    """The collector visited 50,000 objects again and again, also at the end of a command: a tenth of a second."""
    code = ('import sys; sys.argv = [%r, "run"]; import gc; gc.callbacks.clear()  # of .ci/quickly\n'
            'import theano_mgpu; theano_mgpu.import_theano(); print(gc.get_freeze_count() > 20000)')
    assert output(code % 'theano-mgpu') == 'True'
    assert output(code % 'train.py') == 'False'  # the user's own objects may be garbage, or have to be written at exit


@pytest.mark.parametrize('argv, orig_argv, command', [
    (['/usr/bin/theano-mgpu', 'launch', 'train.py'], [], 'launch'), (['theano-mgpu'], [], ''),
    (['-m', 'launch'], ['python', '-m', 'theano_mgpu', 'launch'], 'launch'),
    (['-m', 'launch'], ['python', '-m', 'package', 'launch', 'theano_mgpu'], None),
    (['-m', 'launch'], None, None), (['train.py', 'launch'], ['python', 'train.py', 'launch'], None)])
def test_commands_of_other_programs_are_not_taken_for_own_ones(argv, orig_argv, command, monkeypatch):
    monkeypatch.setattr(sys, 'argv', argv)
    if orig_argv is None:  # as in Python 3.8
        monkeypatch.delattr(sys, 'orig_argv', raising=False)
    else:
        monkeypatch.setattr(sys, 'orig_argv', orig_argv, raising=False)
    assert own_command() == command


# --- Names of Theano-PyMC, which PyMC3 3.11 looks for --------------------------------------------

def test_flags_have_the_names_of_theano_pymc():
    """``import pymc3`` appends to ``theano.config.gcc__cxxflags``."""
    before = theano.config.gcc.cxxflags
    assert theano.config.gcc__cxxflags == before
    try:
        theano.config.gcc__cxxflags = before + ' -Wno-c++11-narrowing'
        assert theano.config.gcc.cxxflags == before + ' -Wno-c++11-narrowing'
    finally:
        theano.config.gcc.cxxflags = before
    assert theano.config.gcc__cxxflags == before
    # A model has such an object: it could not be sent to the process of a chain.
    with pickle.loads(pickle.dumps(theano.config.change_flags(gcc__cxxflags='-O0'))):
        assert theano.config.gcc.cxxflags == '-O0'
    assert theano.config.gcc.cxxflags == before


def test_flags_change_for_a_while_as_in_theano_pymc():
    """Each model of PyMC3 is built in such a block; its functions use the decorator."""
    flags = theano.config.gcc.cxxflags
    assert theano.config.compute_test_value == 'off'
    with theano.config.change_flags({'gcc__cxxflags': '-O2'}, compute_test_value='raise'):
        assert (theano.config.compute_test_value, theano.config.gcc.cxxflags) == ('raise', '-O2')
    assert (theano.config.compute_test_value, theano.config.gcc.cxxflags) == ('off', flags)

    @theano.config.change_flags(compute_test_value='ignore')
    def look():
        return theano.config.compute_test_value
    assert look() == 'ignore'


# A package that imports the same names as PyMC3 3.11.5, and uses them as PyMC3 does.
LIKE_PYMC3 = '''
import collections
import theano
import theano.graph.basic
import theano.graph.fg
from theano.graph.basic import Apply, Constant, Variable, ancestors, graph_inputs, walk
from theano.graph.op import Op, get_test_value
from theano.graph.utils import TestValueError
from theano.sandbox.rng_mrg import MRG_RandomStream
from theano.scan import until
import theano.tensor as tt

x, y = tt.dmatrix('x'), tt.dvector('y')
total = x.sum(axis=0) + y
assert set(graph_inputs([total])) == {x, y}
assert total in theano.graph.basic.ancestors([total]) and isinstance(total, Variable)
found = list(walk([total], lambda v: v.owner and reversed(v.owner.inputs), bfs=True))
assert found[0] is total and {x, y} < set(found) and len(set(found)) == len(found)
try:
    get_test_value(x)
except TestValueError:
    print('no test value')
try:
    theano.function([x], total)
except theano.graph.fg.MissingInputError:
    print('no input')
print(MRG_RandomStream(1).uniform((2,)).eval().shape)
print(theano.scan(lambda s: (s + 1, until(s > 3)), outputs_info=tt.zeros(()), n_steps=9)[0].eval().max())


class Total(Op):
    """Infers its shape as Theano-PyMC asks it to."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [tt.dvector()])

    def perform(self, node, inputs, outputs):
        raise AssertionError('its shape is known without its value')

    def infer_shape(self, fgraph, node, shapes):
        return [(shapes[0][1],)]


print(theano.function([x], Total()(x).shape)([[1., 2., 3.]]))
'''
PRINTED = ['no test value', 'no input', '(2,)', '5.0', '[3]']


def test_pymc3_finds_the_modules_of_theano_pymc_and_nobody_else_does(tmp_path):
    package = tmp_path / 'pymc3'
    package.mkdir()
    (package / '__init__.py').write_text(LIKE_PYMC3)
    code = ('import sys, theano_mgpu\n'
            'try:\n    import theano.graph\n'
            'except ImportError:\n    assert "theano.graph" not in sys.modules\n    import pymc3')
    done = executed(code, PYTHONPATH=str(tmp_path), THEANO_FLAGS='cxx=')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == PRINTED
    assert 'Failed to infer_shape' not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason='no PyMC3 3 runs on Python 3.12')
def test_a_process_whose_pymc3_imports_theano_first_finds_them_too(tmp_path):
    """A spawned process does so: PyMC3's import has begun when Theano's brings theano_mgpu with it."""
    (tmp_path / 'pymc3.py').write_text('import theano_mgpu\n' + LIKE_PYMC3)
    done = executed('import pymc3', PYTHONPATH=str(tmp_path), THEANO_FLAGS='cxx=')
    assert done.stdout.splitlines() == PRINTED, done.stderr


def test_pymc3_of_3_8_finds_the_function_of_numpy_that_it_imports():
    from numpy import asscalar
    assert asscalar(np.ones(1)) == 1 and type(asscalar(np.ones(1))) is float


@pytest.mark.parametrize('versions', [{'Theano-PyMC': '1.1.2'}, {'Theano-PyMC': '1.0.11', 'Theano': '1.0.5'}])
def test_theano_pymc_in_place_of_theano_is_named(versions, monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, 'distributions', lambda name: [
        types.SimpleNamespace(version=version) for each, version in versions.items() if each == name])
    if 'Theano' in versions:
        compat.check_fork()  # no file of the fork is left
        theano_folder = tmp_path / 'theano'
        (theano_folder / 'graph').mkdir(parents=True)  # of the fork alone
        (theano_folder / '__init__.py').touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MgpuError, match='is installed in place of Theano 1.0.5, or over it') as caught:
        compat.check_fork()
    assert 'pip uninstall -y Theano-PyMC Theano, then pip install --no-deps Theano==1.0.5' in str(caught.value)


def test_minibatches_of_pymc3_cut_their_data():
    """NumPy 1.23 removed indexing by a list of slices, which PyMC3's Minibatch does."""
    class Minibatch:
        @staticmethod
        def make_static_slices(user_size):
            return slice(user_size) if isinstance(user_size, int) else [Ellipsis, slice(None, 2)]

    data = types.SimpleNamespace(Minibatch=Minibatch)
    pymc3.index_by_tuples(data)
    values = np.arange(12).reshape(3, 4)
    assert values[data.Minibatch.make_static_slices(None)].shape == (3, 2)
    assert values[data.Minibatch.make_static_slices(2)].shape == (2, 4)
