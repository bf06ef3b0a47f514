"""Models of each Keras of Theano's time: over two contexts as on one device."""
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.launch import environment
from support.patches import WITHOUT_PATCH
from support.processes import python
from support.search_path import PROGRAMS, search_path

FOLDER = PROGRAMS / 'keras_versions'
KERASES = Path(sys.prefix) / 'kerases'  # `.ci/setup` installs them there
VERSIONS = '0.3.3', '1.0.8', '1.2.2', '2.0.9', '2.1.6', '2.2.4'
KINDS = 'of_sequences', 'of_masked_sequences', 'of_two_branches', 'of_weighted_classes', 'with_a_state'
QUICK = 'floatX=float64,cxx=,optimizer=fast_compile'
SINGLE = '0.3.3', '1.0.8'  # they compute in float32, to 1e-5; the others in float64, to 1e-10
# A script that knows nothing of the version.
SAVED = """
import sys
import theano_mgpu as mgpu
import keras
import numpy as np
from keras.layers.core import Dense
from keras.models import Sequential, model_from_json, model_from_yaml
model = Sequential()
model.add(Dense(3, input_dim=2))
model.add(Dense(1))
model.compile(optimizer='sgd', loss='mse')
model.save_weights(sys.argv[1], overwrite=True)
expected = [weight + 0 for weight in model.get_weights()]
model.set_weights([weight * 0 for weight in expected])
model.load_weights(sys.argv[1])
assert all((a == b).all() for a, b in zip(model.get_weights(), expected))
for copy in (model_from_json(model.to_json()), model_from_yaml(model.to_yaml())):
    copy.set_weights(expected)
    x = np.ones((4, 2))
    copy.compile(optimizer='sgd', loss='mse')
    assert (copy.predict(x) == model.predict(x)).all()
if keras.__version__ > '1':
    from keras.models import load_model
    model.save(sys.argv[1])
    assert all((a == b).all() for a, b in zip(load_model(sys.argv[1]).get_weights(), expected))
"""

QUEUES = """
import theano_mgpu
import keras
from keras.utils.data_utils import GeneratorEnqueuer, OrderedEnqueuer, Sequence
class Rows(Sequence):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        raise ValueError('there is no row %d' % i)
queue = OrderedEnqueuer(Rows())
queue.start(1, 10)
try:
    next(queue.get())
    raise AssertionError
except StopIteration as error:
    assert 'there is no row' in str(error)
queue = GeneratorEnqueuer(iter([1, 2]))
queue.start(1)
assert list(queue.get()) == [1, 2]
"""


LAYERS = """
import numpy as np
from keras.layers.core import Activation, Dense
from keras.models import Sequential
model = Sequential()
for layer in (Dense(200, input_dim=300, name='inner'), Activation('tanh', name='bend'), Dense(200, name='last')):
    model.add(layer)
model.compile(optimizer='sgd', loss='mse')
for _ in range(7):
    model.train_on_batch(np.ones((400, 300)), np.ones((400, 200)))
"""


def each(versions, quick):
    """Return the mark of a test for each version: some of them are quick, the others are for `make test-slow`."""
    return pytest.mark.parametrize('version', [version if version in quick else pytest.param(
        version, marks=pytest.mark.slow) for version in versions])


def with_keras(version, *words, flags=QUICK, expected=0):
    """Return what a program prints with a Keras of one version."""
    folder = KERASES / version
    if not folder.exists() and version != '2.3.1':  # that one is beside Theano
        pytest.skip('Keras %s is not in %s: make setup' % (version, KERASES))
    flags = flags.replace('float64', 'float32' if version in SINGLE else 'float64')
    return python(*words, expected=expected, **dict(environment(flags), KERAS_BACKEND='theano',
                                                    PYTHONPATH=search_path(folder)))


def tolerance(version):
    return 1e-5 if version in SINGLE else 1e-10


def check_equal(version, kinds, **options):
    found = json.loads(with_keras(version, str(FOLDER / 'zoo.py'), *kinds, **options).stdout.splitlines()[-1])
    assert found['version'] == version
    assert max(found['differences'].values()) < tolerance(version), found
    assert found['divided'] >= 3 * len(kinds), found  # train, test, predict


@pytest.mark.slow
@each(VERSIONS, quick=('0.3.3', '1.2.2'))
def test_a_model_is_divided_as_on_one_device(version):
    """The import of Keras ended with an AttributeError or an ImportError of this package."""
    check_equal(version, ['of_weighted_classes'])


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
def test_all_kinds_of_models(version):
    check_equal(version, KINDS)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('version', VERSIONS)
def test_images(version):
    check_equal(version, ['of_images'], flags='floatX=float64')


@each(('2.0.9', '2.1.6'), quick=('2.0.9',))
def test_queues_end_by_stop_iteration(version):
    with_keras(version, '-c', QUEUES)


@pytest.mark.slow
@each(VERSIONS, quick=('0.3.3', '1.2.2', '2.2.4'))
def test_files_come_back(version, tmp_path):
    with_keras(version, '-c', SAVED, str(tmp_path / 'm.h5'))


@each(('0.3.3', '1.0.8', '1.2.2'), quick=('1.2.2',))
def test_old_kerases_find_graphviz(version, tmp_path, monkeypatch):
    """pydot needs no Graphviz to be imported, and these Kerases do: without it, they still say so."""
    (tmp_path / 'pydot.py').touch()
    dot = tmp_path / 'dot'
    dot.touch(mode=0o755)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
    code = 'import theano_mgpu, keras.utils.visualize_util'
    without = with_keras(version, '-c', WITHOUT_PATCH % 'restore_find_graphviz' + code, expected=1)
    assert "has no attribute 'find_graphviz'" in without.stderr
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    with_keras(version, '-c', code)
    dot.unlink()
    monkeypatch.setenv('PATH', str(tmp_path))
    assert 'You must install pydot' in with_keras(version, '-c', code, expected=1).stderr


MODEL = r' functions? on 2 contexts(.*\n)+sequential_1 train  +a b  +\d+  +42 '  # a title and a line of a summary


@pytest.mark.slow
@pytest.mark.parametrize('version,row', [
    ('0.3.3', '3 of 5 functions on 2 contexts'), ('1.2.2', MODEL), ('2.1.6', MODEL)])
def test_an_unchanged_script_under_run(version, row, tmp_path):
    """The summary listed functions by lines of the script, also those that Keras makes for itself, but no model."""
    done = with_keras(version, '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', '--always', FOLDER / 'zoo.py',
                      '--write', tmp_path / 'results.npz', 'of_weighted_classes')
    assert re.search(row, done.stderr) and 'backend.py' not in done.stderr, done.stderr


def test_the_add_on_names_the_versions_that_it_is_for():
    done = with_keras('0.3.3', '-c', """
import theano_mgpu
try:
    import theano_mgpu.keras
except ImportError as error:
    print(error)
""")
    assert 'Keras 1.0 to 2.3.1, but Keras 0.3.3 is installed' in done.stdout and 'theano-mgpu run' in done.stdout


@pytest.mark.slow
@each(['2.0.9', '2.1.6', '2.2.4'], quick=('2.2.4',))
def test_data_sets_of_texts_and_kernels_of_tensorflow(version, tmp_path):
    """They ended with "Object arrays cannot be loaded when allow_pickle=False", and with an IndexError."""
    texts = np.empty(3, object)
    texts[:] = [[4, 5], [6], [4, 4, 5]]
    np.savez(str(tmp_path / 'texts.npz'), **{name: texts if name[0] == 'x' else np.arange(3) for name in (
        'x_train', 'y_train', 'x_test', 'y_test')})
    done = with_keras(version, '-c', """
import sys
import theano_mgpu
import numpy as np
from keras.datasets import imdb
from keras.utils import conv_utils
imdb.get_file = lambda path, **where: path
(x, labels), _ = imdb.load_data(sys.argv[1], num_words=99)
print(sorted(map(len, x)), type(conv_utils.convert_kernel(np.ones((3, 3, 2, 4)))).__name__,
      conv_utils.convert_kernel(np.arange(4.).reshape((2, 2, 1, 1))).ravel())
""", str(tmp_path / 'texts.npz'))
    assert done.stdout.splitlines()[-1] == '[2, 3, 4] ndarray [3. 2. 1. 0.]'


@pytest.mark.slow
def test_kernels_of_keras_1():
    """Keras 1.2 indexes by a list of slices, too."""
    done = with_keras('1.2.2', '-c', """
import theano_mgpu
import numpy as np
from keras.utils import np_utils
kernel = np.arange(6.).reshape((1, 1, 2, 3))
print(*[np_utils.convert_kernel(each, order).ravel() for each, order in ((kernel, 'th'), (kernel.T, 'tf'))])
""")
    assert done.stdout.splitlines()[-1] == '[5. 4. 3. 2. 1. 0.] [5. 2. 4. 1. 3. 0.]'


@pytest.mark.slow
@each((*VERSIONS, '2.3.1'), quick=('0.3.3', '1.2.2', '2.3.1'))
def test_layers_are_timed(version, tmp_path):
    """The table has each layer, forward and backward, and so has the timeline."""
    (tmp_path / 'train.py').write_text(LAYERS)
    contexts = 'contexts=dev0->cpu;dev1->cpu,mgpu.timeline=%s,' % (tmp_path / 'trace.json')
    text = with_keras(version, '-m', 'theano_mgpu', 'run', '--always', '--explain', str(tmp_path / 'train.py'),
                      flags=contexts + QUICK).stderr
    # That Keras's models are not hooked: its layers are its weights.
    inner, last = ('inner_W (300, 200)', 'last_W (200, 200)') if version == '0.3.3' else ('inner', 'last')
    for layer in inner, last:
        assert re.search(r'\n%s +\d+\.\d+ +\d+\.\d+ +\d+\.\d %%' % re.escape(layer), text), text
    spans = [event['name'] for event in json.loads((tmp_path / 'trace.json').read_text())['traceEvents']]
    assert {inner, inner + ', backward', last, last + ', backward', 'run'} <= set(spans)


@pytest.mark.mpi
@each(('1.2.2', '2.0.9', '2.1.6', '2.2.4'), quick=())  # tests/comm/test_feeding.py has Keras 2.3.1
def test_generators_that_call_functions_leave_all_processes_alike(version, tmp_path):
    """"MgpuError: two threads of rank 0 use functions over the ranks of the job at the same time"."""
    cases = PROGRAMS / 'asking_cases.py'
    with_keras(version, '-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--quiet', '--always', str(cases),
               str(tmp_path / 'ranks'), '1', flags=QUICK + ',mgpu.timeout=60')
    first, second = (json.loads((tmp_path / ('ranks.%d' % rank)).read_text()) for rank in (0, 1))
    assert first == second and len(first) == 7


OF_OTHER_MODELS = """
import theano_mgpu
import numpy as np
from keras.layers import Dense
from keras.models import Model, Sequential
class Delegating(Model):
    def __init__(self, inner):
        self.inner, self.layers = inner, [inner]
    def __getattr__(self, name):
        if name in ('inner', 'built'):
            raise AttributeError(name)
        return getattr(self.inner, name)
class Any(Model):
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        if name.startswith('__') or name in ('inner', 'callback_model'):
            raise AttributeError(name)
        return getattr(self.inner, name, None)
class Nameless(Model):
    def __init__(self, inner):
        vars(self).update((name, value) for name, value in vars(inner).items()
                          if name not in ('built', '_built', 'name', '_mgpu_divided_model'))
np.random.seed(1)
x = np.random.rand(20, 3)
for kind in (Delegating, Any, Nameless):
    inner = Sequential([Dense(2, input_dim=3)])
    inner.compile('sgd', 'mse')
    model = kind(inner.model)
    print('%.5f' % model.fit(x, x[:, :2], batch_size=5, verbose=0).history['loss'][-1],
          '%.5f' % model.evaluate(x, x[:, :2], verbose=0), '%.5f' % model.predict(x).sum())
"""


@pytest.mark.slow
@each(('1.2.2', '2.0.9', '2.1.6'), quick=('1.2.2',))
def test_a_model_need_not_call_the_init_of_its_class(version, tmp_path):
    """AttributeError: 'Delegating' object has no attribute 'built'; later Kerases refuse such a model themselves."""
    (tmp_path / 'train.py').write_text(OF_OTHER_MODELS)
    plain = with_keras(version, str(tmp_path / 'train.py')).stdout
    assert len(plain.splitlines()) == 3
    for options in ['--always'], []:
        assert with_keras(version, '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', *options,
                          str(tmp_path / 'train.py')).stdout == plain
