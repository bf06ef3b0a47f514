"""Bugs that were found and mended, each under its symptom."""
import importlib
import os
import resource
import socket
import subprocess
import sys
import threading
import types
import venv
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu import compat, devices, graph, job, progress
from theano_mgpu.cli import device_checks, main
from theano_mgpu.context_map import parse_context_map
from theano_mgpu.contexts import compiling_for, gpu_context

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum
from test_ranks import launch, needs_mpi
from theano.gof import compilelock

ROOT = Path(__file__).resolve().parent.parent


def resident_bytes():
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
@pytest.mark.parametrize('kind,executor', [('cpu', 'threads'),
                                           pytest.param('gpu', 'serial', marks=pytest.mark.slow)])
def test_2000_steps_do_not_grow_the_process(contexts, kind, executor):
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, executor=executor,
                                  outputs=[model.probabilities])
    x, labels = data(24, 7)
    for _ in range(200):
        step(x, labels)
    before = resident_bytes()
    for n in range(2000):
        step(x[n % 7:], labels[n % 7:])
    assert resident_bytes() - before < 20e6


def test_a_child_process_can_open_a_gpu_too(gpu2):
    """Theano marks the environment; children then refused: "You can't initialize the GPU in a subprocess"."""
    code = 'import theano_mgpu as mgpu; print(mgpu.init("dev0->%s")[0].name)' % gpu2[0].device
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.strip() == 'dev0', done.stderr


def test_a_borrowed_value_of_a_variable_with_copies_is_not_written_to_in_silence(cpu2):
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    with pytest.raises(ValueError, match='read-only'):
        model.params[0].get_value(borrow=True)[...] = 0
    assert np.isfinite(step(*data(6, 7)))


def test_a_python_integer_shape_of_a_transposed_convolution_is_not_read_as_garbage(gpu2):
    """Theano read int8 constants as int64: "Failed to allocate output of 4 x 2 x 442372112 x 404381200"."""
    from theano.tensor.nnet.abstract_conv import conv2d_grad_wrt_inputs
    x, w = theano.tensor.ftensor4('x'), theano.shared(np.ones((3, 2, 3, 3), 'float32'), name='w')
    up = conv2d_grad_wrt_inputs(x, w, input_shape=(None, 2, 16, 16), border_mode='half', subsample=(2, 2))
    up_by_op = theano.tensor.nnet.abstract_conv.AbstractConv2d_gradInputs(border_mode='half', subsample=(2, 2))(
        w, x, theano.tensor.stack([16, 16]))
    images = np.random.RandomState(0).randn(4, 3, 8, 8).astype('float32')
    one, other = mgpu.function([x], [up, up_by_op])(images)
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_two_inputs_without_names_get_each_its_own_argument(cpu2):
    """They were told apart by their text, which is that of their type: both got the last argument."""
    a, b = theano.tensor.fmatrix(), theano.tensor.fmatrix()
    first, second = data(5, 3)[0], data(5, 3, seed=1)[0]
    np.testing.assert_array_equal(mgpu.function([a, b], a - b)(first, second), first - second)


INNER = '''
import sys
import theano_mgpu as mgpu
import numpy as np
import theano
import theano.tensor as T
mgpu.init('a->cpu;b->cpu;c->cpu')
x, w = T.tensor3('x'), theano.shared(np.eye(64, dtype='float32') / 2)
if sys.argv[1] == 'scan':
    y = theano.scan(lambda row, total: T.tanh(T.dot(total, w) + row), sequences=x.dimshuffle(1, 0, 2),
                    outputs_info=T.zeros_like(x[:, 0]))[0][-1]
else:
    row, m = T.matrices('row', 'm')
    layer = theano.OpFromGraph([row, m], [T.tanh(T.dot(T.exp(T.dot(row, m)), m))])
    y = x[:, 0]
    for _ in range(8):
        y = layer(y + x[:, 1], w)
mode = theano.Mode('py', 'fast_compile')
whole = theano.function([x], y, mode=mode)
f = mgpu.function([x], y, mode=mode, executor='threads')
sys.setswitchinterval(1e-6)
for number in range(200):
    values = np.random.RandomState(number).randn(9 + number % 5, 6, 64).astype('float32')
    np.testing.assert_allclose(f(values), whole(values), rtol=1e-5)
'''


@pytest.mark.parametrize('inner', ['scan', 'OpFromGraph'])
def test_replicas_in_threads_do_not_run_one_inner_function(inner):
    """Functions over one op shared its compiled inner graph: "expected an ndarray, not None", or wrong results."""
    done = subprocess.run([sys.executable, '-c', INNER, inner], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def elementwise(x):
    return [T.maximum(x, 0.5), T.minimum(x, 0.5), T.round(x), x // 2, T.cast(T.cast(x, 'bool'), 'float32'),
            T.switch(x, x, 2)]


def test_kernels_that_ended_the_process_on_opencl_build(gpu2):
    """Segmentation fault for maximum, minimum, round, //, a cast to bool, and a float as a condition."""
    if gpu2[0].kind != 'opencl':
        pytest.skip('these are spelled for CUDA already')
    from pygpu import _elemwise as pygpu_elemwise
    from theano.gpuarray.basic_ops import as_gpuarray_variable
    from theano.gpuarray.elemwise import GpuElemwise
    for expression in elementwise(T.fvector()):
        op = GpuElemwise(expression.owner.op.scalar_op)
        with compiling_for(gpu2[0]):
            node = op.make_node(*[as_gpuarray_variable(v, gpu2[0].name) for v in expression.owner.inputs])
        arguments = [pygpu_elemwise.arg(name, v.type.typecode, read='i' in name, write='o' in name)
                     for name, v in zip(['i%d' % i for i in range(len(node.inputs))] + ['o0'],
                                        node.inputs + node.outputs)]
        pygpu_elemwise.GpuElemwise(gpu_context(gpu2[0]), op._generate_op_string(node)[1], arguments, 1)


def test_elementwise_ops_on_a_gpu_are_those_of_the_cpu(gpu2):
    x = T.fvector('x')
    total = sum(elementwise(x))
    values = np.array([-2.5, -1, -0.5, 0, 0.25, 0.5, 1.5, 3], 'float32')
    np.testing.assert_allclose(mgpu.function([x], total)(values), theano.function([x], total)(values), rtol=1e-6)


def test_validation_in_fit_generator_leaves_the_progress_bar_of_the_training_alone(cpu2):
    """Keras hands its callbacks on to `evaluate`: "'<' not supported between instances of 'int' and 'NoneType'"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    x, y = np.ones((10, 3)), np.ones((10, 2))
    model = multi_gpu_model(Sequential([Dense(2, input_shape=(3,))]))
    model.compile('sgd', 'mse', mode=theano.Mode(linker='py', optimizer='fast_compile'))
    generator = ((x, y) for _ in range(20))
    history = model.fit_generator(generator, steps_per_epoch=2, epochs=2, verbose=2, validation_data=(x, y))
    assert len(history.history['val_loss']) == 2


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_keras_model_whose_layers_are_all_frozen_is_fitted(kind, contexts):
    """Keras runs such a model, for its metrics or running statistics: "params is empty: name the shared variables"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = np.ones((10, 3)), np.ones((10, 2))
    template = Sequential([Dense(2, input_shape=(3,))])
    template.trainable = False
    template.compile('adam', 'mse', metrics=['mae'])
    before = template.get_weights()
    expected = template.evaluate(x, y, verbose=0)
    model = multi_gpu_model(template)
    for _ in range(2):
        np.testing.assert_allclose(model.train_on_batch(x, y), expected, rtol=1e-6)
    np.testing.assert_array_equal(template.get_weights()[0], before[0])
    assert model.optimizer.get_weights()[0] == 2  # steps are counted all the same


@pytest.fixture
def opencl_cpus(monkeypatch, contexts):
    """The OpenCL devices of a CPU, on a machine where nothing is mapped and CUDA has no device."""
    discover = devices.discover
    monkeypatch.setattr(devices, 'discover', lambda kind: ([], 'none') if kind == 'cuda' else discover(kind))
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', os.devnull)
    job.note.cache_clear()
    if not devices.opencl_cpus():
        pytest.skip('no OpenCL device is a CPU')
    return devices.opencl_cpus()


def test_a_cpu_seen_through_opencl_is_no_default_device(opencl_cpus, monkeypatch, capsys):
    """`init(2)` took PoCL's devices where there was no GPU: six times as slow as `cpu` contexts."""
    assert devices.discover_best() == ['cpu'] and set(map(devices.type_of, opencl_cpus)) == {'CPU'}
    for _ in range(2):
        assert [context.device for context in mgpu.init(2)] == ['cpu', 'cpu']
    assert capsys.readouterr().err.count('no usable GPU here: the 2 contexts are on the CPU') == 1
    assert [context.device for context in mgpu.init()] == ['cpu'] and not capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=mapped->' + opencl_cpus[0])
    assert [context.device for context in mgpu.init()] == opencl_cpus[:1]
    with pytest.raises(mgpu.ContextError, match='2 contexts were asked for; there are 1'):
        mgpu.init(2)
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(devices, 'type_of', lambda device: 'GPU')
    assert devices.discover_best() == devices.discover('opencl')[0]


def test_a_cpu_seen_through_opencl_is_listed_as_such(opencl_cpus, capsys):
    assert main(['devices']) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [['dev0', 'cpu', 'cpu', 'CPU']] + [['-', device, 'opencl', 'CPU'] for device in opencl_cpus]
    found = device_checks.check_opencl(None).text
    assert found.startswith(opencl_cpus[0] + ' (CPU)') and 'only where a context is mapped to it' in found


def test_the_demo_takes_two_opencl_contexts_unless_others_are_mapped(opencl_cpus, monkeypatch):
    from models import open_contexts
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu')
    assert [context.name for context in open_contexts('2', opencl_cpus=True)] == ['a', 'b']
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(mgpu, 'init', parse_context_map)  # dev0 may be open on another device
    assert [context.device for context in open_contexts('2', opencl_cpus=True)] == (opencl_cpus * 2)[:2]


@pytest.mark.parametrize('name', ['imdb', 'reuters'])
def test_keras_data_sets_of_texts_are_loaded(name, tmp_path, monkeypatch):
    """NumPy 1.24: "setting an array element with a sequence ... inhomogeneous shape"."""
    texts = np.empty(5, object)
    texts[:] = [[4, 5], [6], [4, 4, 5], [7], [5, 6]]
    names = ['x_train', 'y_train', 'x_test', 'y_test'] if name == 'imdb' else ['x', 'y']
    np.savez(str(tmp_path / 'texts.npz'), **dict(zip(names, [texts, np.arange(5)] * 2)))
    dataset = importlib.import_module('keras.datasets.' + name)
    monkeypatch.setattr(dataset, 'get_file', lambda path, **where: path)  # as if it was downloaded before
    options = {'num_words': 99} if name == 'imdb' else {'num_words': 99, 'test_split': 0.4}
    (x, labels), (x_test, labels_test) = dataset.load_data(str(tmp_path / 'texts.npz'), **options)
    assert x.dtype == object and len(x) == len(labels) == (5 if name == 'imdb' else 3)
    assert all(list(x[i])[1:] == [word + 3 for word in texts[labels[i]]] and x[i][0] == 1 for i in range(len(x)))
    assert len(x_test) == len(labels_test) > 0
    same = dataset.load_data(str(tmp_path / 'texts.npz'), maxlen=3, **options)[0][0]
    assert same.dtype != object and same.ndim == 2  # as in older NumPy, where all have one length


def test_pooling_by_its_old_name(cpu2):
    """`import lasagne` (0.1): "cannot import name 'downsample' from 'theano.tensor.signal'"."""
    import theano.tensor.signal.downsample
    from theano.tensor.signal import downsample
    assert theano.tensor.signal.downsample is downsample
    x = T.tensor4()
    pooled = downsample.max_pool_2d(x, ds=(2, 2), st=(1, 2), ignore_border=True, padding=(0, 0))
    values = np.arange(16, dtype=x.dtype).reshape(1, 1, 4, 4)
    np.testing.assert_array_equal(pooled.eval({x: values})[0, 0], [[5, 7], [9, 11], [13, 15]])


def test_the_old_gpu_back_end_is_named_with_what_replaced_it():
    """`import theano.sandbox.cuda` ended with "No module named 'nose'"."""
    with pytest.raises(ImportError, match='theano.gpuarray replaced it.*contexts=dev0->cuda0'):
        import theano.sandbox.cuda.dnn  # noqa: F401


@pytest.fixture
def notes(monkeypatch):
    """Notes on long work, which is all work here; `heard` is set with the first one."""
    said = types.SimpleNamespace(texts=[], heard=threading.Event())
    job.note.cache_clear()
    monkeypatch.setattr(progress, 'PATIENCE', 0)
    monkeypatch.setattr(job, 'say', lambda text: (said.texts.append(text), said.heard.set()))
    return said


def test_waiting_for_compiled_code_is_one_note(tmp_path, monkeypatch, caplog, notes):
    """Two processes that compiled logged two lines several times a second: "Waiting for existing lock by process"."""
    folder, turns = tmp_path / 'lock_dir', []

    def taken_over(*limits):
        turns.append(limits)
        if len(turns) < 5:
            (folder / 'lock').write_text('%d_%d_%s' % (os.getppid(), len(turns), socket.gethostname()))
        else:
            notes.heard.wait(60)
            (folder / 'lock').unlink()
            folder.rmdir()
        return 0
    folder.mkdir()
    (folder / 'lock').write_text('%d_0_%s' % (os.getppid(), socket.gethostname()))
    monkeypatch.setattr(compilelock, 'random', types.SimpleNamespace(uniform=taken_over, randint=lambda *limits: 1))
    compilelock.lock(str(folder))
    compilelock.Unlocker(str(folder)).unlock()
    text, = notes.texts
    assert 'waiting for process %d on %s' % (os.getppid(), socket.gethostname()) in text
    assert 'goes on by itself' in text and 'end it, and remove the folder %s' % folder in text
    assert not caplog.records


def test_a_long_compilation_says_what_it_compiles_and_for_which_contexts(cpu2, monkeypatch, notes):
    """A large model took a minute before its first step, without a word."""
    compile_for = graph.compile_for

    def slow(*args, **kwargs):
        assert notes.heard.wait(20)
        return compile_for(*args, **kwargs)
    monkeypatch.setattr(graph, 'compile_for', slow)
    x = T.matrix('x')
    mgpu.function([x], x * 2, mode='FAST_COMPILE', name='twice')
    notes.heard.clear()
    mgpu.Predictor([x], x * 2, mode='FAST_COMPILE').close()
    for text, name in zip(notes.texts, ['twice', 'a function of x']):
        assert text.startswith('note: compiling %s for host0, host1 takes a while' % name)
    assert len(notes.texts) == 2


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """A Python that has what `pip install` puts into site-packages, beside the packages of this one."""
    if not (ROOT / 'setup.py').exists():
        pytest.skip('no setup.py beside these tests')
    folder = tmp_path_factory.mktemp('installed')
    venv.create(str(folder))
    site, = folder.glob('lib/python*/site-packages')
    subprocess.run([sys.executable, 'setup.py', '-q', 'build_py', '--build-lib', str(site)], cwd=str(ROOT), check=True)
    (site / 'others.pth').write_text('\n'.join(path for path in sys.path if path.endswith('-packages')))
    return folder / 'bin' / 'python'


def run_installed(python, *words, folder=None, **environment):
    env = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', compat.IMPORTED)}
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


def test_processes_that_a_script_starts_can_import_keras(installed, tmp_path):
    """GridSearchCV(n_jobs=2) and a spawned Pool: "module 'numpy' has no attribute 'bool'" in each of them."""
    (tmp_path / 'script.py').write_text(STARTS_PROCESSES)
    out = run_installed(installed, '-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', 'script.py',
                        folder=tmp_path, THEANO_FLAGS='floatX=float32,cxx=,optimizer=fast_compile')
    assert out == "[((4, 2), '', 'float32')]\n1\n"


def test_processes_that_need_no_fixes_are_left_alone(installed):
    """Nothing is imported before Theano or Keras is, and nothing by a Python that no such process has started."""
    loaded = "import sys; print([name for name in sys.modules if 'theano' in name])"
    assert run_installed(installed, '-c', loaded) == '[]\n'
    started = {compat.IMPORTED: '1'}
    assert run_installed(installed, '-c', loaded, **started) == "['theano_mgpu_first']\n"
    theano_first = ('import sys, theano.tensor; from theano_mgpu import compat, graph; assert theano is graph.theano; '
                    'print(compat.theano_was_first, theano.__spec__.origin)')
    assert run_installed(installed, '-c', theano_first, **started) == 'False %s\n' % theano.__file__
    first, = installed.parent.parent.glob('lib/python*/site-packages/theano_mgpu_first.py')
    first.rename(str(first) + '.gone')
    assert run_installed(installed, '-c', loaded, **started) == '[]\n'
    first.with_suffix('.py.gone').rename(first)


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


@needs_mpi
def test_a_process_that_a_rank_starts_is_no_rank(tmp_path):
    """It started MPI in the rank's name: "Local abort before MPI_INIT completed", and all ranks ended."""
    (tmp_path / 'script.py').write_text(A_RANK_STARTS)
    launch(2, job=str(tmp_path / 'script.py'), flags='cxx=,optimizer=fast_compile')
