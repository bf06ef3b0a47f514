"""Bugs that were found and mended, each under its symptom."""
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import venv
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu import data_parallel as data_parallel_module
from theano_mgpu import training as training_module
from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import device_checks
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.devices.contexts import compiling_for, gpu_context
from theano_mgpu.graphs import graph
from theano_mgpu.jobs import rank_process
from theano_mgpu.patches import compat
from theano_mgpu.program import exchange as exchange_module
from theano_mgpu.program import partition
from theano_mgpu.program import run as run_module
from theano_mgpu.utils import progress

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum, update_of
from conftest import needs_compiler
from models import plain_step
from test_ranks import INTERPRETED, JOBS, arrays, launch, needs_mpi
from theano.gof import compilelock
from theano.gof.graph import ancestors
from theano.tensor.signal.pool import MaxPoolGrad, pool_2d

ROOT = Path(__file__).parent.parent
MODES = {'cpu': 'FAST_COMPILE', 'gpu': theano.Mode(optimizer='fast_compile')}  # quick to compile


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


def gpu_blas():
    """Products whose output is given and multiplied by 0: a name, the op and its other inputs."""
    from theano.gpuarray import blas
    matrix, vector, stack = np.ones((8, 8), 'float32'), np.ones(8, 'float32'), np.ones((2, 8, 8), 'float32')
    return {'gemv': (blas.gpugemv_no_inplace, vector, matrix, vector),
            'gemm': (blas.gpugemm_no_inplace, matrix, matrix, matrix),
            'gemm of transposed': (blas.gpugemm_no_inplace, matrix, matrix.T, matrix),
            'batched gemm': (blas.gpugemmbatch_no_inplace, stack, stack, stack)}


@pytest.mark.parametrize('name,linker', [('gemv', 'c'), ('gemv', 'py'), ('gemm', 'c'), ('gemm of transposed', 'c'),
                                         ('batched gemm', 'c')])
def test_a_product_into_memory_that_holds_nan_is_not_nan(gpu2, name, linker):
    """Theano has matrix * vector computed into uninitialised memory, times 0: on OpenCL NaN in 9 of 10 runs."""
    op, like, a, b = gpu_blas()[name]
    with compiling_for(gpu2[0]):
        out, a, b = (theano.shared(value, target=gpu2[0].name) for value in (like * np.float32(np.nan), a, b))
        f = theano.function([], op(out, np.float32(1), a, b, np.float32(0)), mode=theano.Mode(linker, None))
    np.testing.assert_array_equal(f(), like * 8)


def with_rate(update_on, seed=0):
    """A training function over two contexts, its model, and its learning rate in a shared variable."""
    model, rate = dense_model(seed), theano.shared(np.float32(0.1), 'rate')

    def sgd(gradients, params):
        return {param: param - rate * gradient for param, gradient in zip(params, gradients)}
    return mgpu.training_function(model.inputs, model.loss, model.params, sgd, update_on=update_on), model, rate


def schedule(model, rate, seen):
    """Batches, before each of which the learning rate is set and the weights are read."""
    for number in range(4):
        rate.set_value(np.float32(0.1 + 0.2 * number))
        seen.append(model.params[0].get_value())
        yield data(9, 7, seed=number)


@pytest.mark.parametrize('update_on', ['device', 'host'])
def test_a_learning_rate_that_is_set_by_the_generator_of_batches_counts_from_its_batch_on(contexts, kind, update_on):
    """It never reached the devices' copies, or it counted one batch early, or for one replica only."""
    contexts(kind, 2)
    found = []
    for loop in (lambda step, batches: [float(step(*batch)) for batch in batches],
                 lambda step, batches: [float(loss) for loss in step.over(batches)]):
        (step, model, rate), seen = with_rate(update_on), []
        losses = loop(step, schedule(model, rate, seen))
        found.append((losses, seen, [param.get_value() for param in model.params]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1] + found[0][2], found[1][1] + found[1][2]):
        np.testing.assert_array_equal(one, other)


def test_a_generator_that_is_asked_ahead_may_not_touch_variables(contexts, gpu2):
    step, model, rate = with_rate('device')
    losses = step.over(schedule(model, rate, []), ahead=True)
    assert np.isfinite(next(losses))
    with pytest.raises(mgpu.MgpuError, match='rate was read or set by what prepares the next batch'):
        next(losses)
    assert np.isfinite(step(*data(9, 7)))


@pytest.mark.unverified
@pytest.mark.parametrize('update_on', ['device', 'host'])
def test_a_value_that_another_thread_sets_within_a_step_counts_from_the_next_one_on(contexts, kind, update_on):
    contexts(kind, 2)
    (step, model, rate), (expected, reference, reference_rate) = with_rate(update_on), with_rate(update_on)
    setter = threading.Thread(target=rate.set_value, args=(np.float32(0.7),))
    update = update_of(step)
    run = update.run

    def run_and_set(replica, arguments):
        if setter.ident is None:
            setter.start()
            setter.join(0.3)
        return run(replica, arguments)
    update.run = run_and_set
    step(*data(9, 7))
    setter.join()
    expected(*data(9, 7))
    reference_rate.set_value(np.float32(0.7))
    assert step(*data(8, 7)) == expected(*data(8, 7))
    assert step(*data(7, 7)) == expected(*data(7, 7))
    for param, other in zip(model.params, reference.params):
        np.testing.assert_array_equal(param.get_value(), other.get_value())


def test_a_function_that_fails_after_it_has_updated_in_place_leaves_replicas_alike(contexts, kind):
    """The copies kept the former value, the variable had the new one."""
    contexts(kind, 2)
    found = []
    for training in (lambda *args: mgpu.training_function(*args, update_on='device'), None):
        model = dense_model()
        step = training(model.inputs, model.loss, model.params, momentum) if training else plain_step(model, momentum)
        w, table = model.params[1], T.fvector('table')
        place = T.cast((w + 1)[0], 'int64') + 10
        grow = theano.function([table], table[place], updates=[(w, w + 1)])
        step(*data(9, 7))
        with pytest.raises(IndexError):
            grow(np.zeros(3, 'float32'))
        found.append([float(step(*data(9, 7, seed=1))) for _ in range(2)] + [w.get_value()])
    np.testing.assert_allclose(found[0][:2], found[1][:2], rtol=1e-5)
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-5)


def test_what_is_made_of_the_gradient_of_a_mean_is_exact(cpu2):
    """Replicas divided by the samples of their sub-batch: wrong by 1e-2, without a word."""
    found = []
    for parallel in (True, False):
        model = dense_model()
        u = theano.shared(np.zeros((7, 9), 'float32'), name='u')
        new = {u: u - np.float32(0.1) * T.grad(model.loss, model.params[0])}
        if parallel:
            step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, batch_updates=new,
                                          mode='FAST_COMPILE')
        else:
            updates = momentum(T.grad(model.loss, model.params), model.params)
            step = theano.function(model.inputs, model.loss, updates=list({**new, **updates}.items()))
        for n in (9, 4, 1):
            step(*data(n, 7, seed=n))
        found.append(u.get_value())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)


def test_an_output_that_mixes_samples_is_exact(cpu2):
    x = T.fmatrix('x')
    rows = data(7, 5)[0]
    found = mgpu.function([x], [x - x.mean(axis=0), T.dot(x, x.T)], mode='FAST_COMPILE')(rows)
    for ours, expected in zip(found, [rows - rows.mean(axis=0), rows.dot(rows.T)]):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_batches_of_one_input_are_taken_as_bare_arrays(cpu2):
    """Each array was taken apart into its rows: "9 arguments were given for the inputs ['x']"."""
    x, w = T.fmatrix('x'), theano.shared(np.ones(7, 'float32'), 'w')
    step = mgpu.training_function([x], T.dot(x, w).mean(), [w], lambda gradients: {w: w - gradients[0]},
                                  mode='FAST_COMPILE')
    assert len(list(step.over([data(9, 7)[0], data(5, 7)[0]]))) == 2


def test_a_function_over_a_trained_variable_does_not_keep_its_copies(contexts, kind):
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    total = theano.function([], model.params[0].sum())
    step(*data(9, 7))
    expected = total()
    del step
    gc.collect()
    assert compat.watcher_of(model.params[0]) is None
    assert total() == expected
    np.testing.assert_allclose(model.params[0].get_value().sum(), expected, rtol=1e-5)


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
def test_kernels_that_were_made_and_deleted_leave_no_memory_behind(gpu2):
    """libgpuarray keeps the header of each OpenCL kernel: 60 training functions grew the process by 150 MB."""
    from pygpu import _elemwise as pygpu_elemwise
    arguments = [pygpu_elemwise.arg('a', 'f', read=True), pygpu_elemwise.arg('o', 'f', write=True)]

    def make(times):
        for _ in range(times):
            pygpu_elemwise.GpuElemwise(gpu_context(gpu2[0]), 'o = a + 1', arguments, 2)
    make(100)
    before = resident_bytes()
    make(200)
    assert resident_bytes() - before < 5e6
@pytest.fixture
def opencl_cpus(monkeypatch, contexts):
    """The OpenCL devices of a CPU, on a machine where nothing is mapped and CUDA has no device."""
    discover = discovery.discover
    monkeypatch.setattr(discovery, 'discover', lambda kind: ([], 'none') if kind == 'cuda' else discover(kind))
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', os.devnull)
    rank_process.note.cache_clear()
    if not discovery.opencl_cpus():
        pytest.skip('no OpenCL device is a CPU')
    return discovery.opencl_cpus()


def test_a_cpu_seen_through_opencl_is_no_default_device(opencl_cpus, monkeypatch, capsys):
    """`init(2)` took PoCL's devices where there was no GPU: six times as slow as `cpu` contexts."""
    assert discovery.discover_best() == ['cpu'] and set(map(discovery.type_of, opencl_cpus)) == {'CPU'}
    for _ in range(2):
        assert [context.device for context in mgpu.init(2)] == ['cpu', 'cpu']
    assert capsys.readouterr().err.count('no usable GPU here: the 2 contexts are on the CPU') == 1
    assert [context.device for context in mgpu.init()] == ['cpu'] and not capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=mapped->' + opencl_cpus[0])
    assert [context.device for context in mgpu.init()] == opencl_cpus[:1]
    with pytest.raises(mgpu.ContextError, match='2 contexts were asked for; there are 1'):
        mgpu.init(2)
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(discovery, 'type_of', lambda device: 'GPU')
    assert discovery.discover_best() == discovery.discover('opencl')[0]


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
    rank_process.note.cache_clear()
    monkeypatch.setattr(progress, 'PATIENCE', 0)
    monkeypatch.setattr(rank_process, 'say', lambda text: (said.texts.append(text), said.heard.set()))
    return said


def test_waiting_for_compiled_code_is_one_note(tmp_path, monkeypatch, caplog, notes):
    """Two processes that compiled logged two lines several times a second: "Waiting for existing lock by process"."""
    folder, turns = tmp_path / 'lock_dir', []

    def taken_over(*limits):
        turns.append(limits)
        if len(turns) < 5:
            new = tmp_path / 'new'  # a file that is just being written has no owner that a note could name
            new.write_text('%d_%d_%s' % (os.getppid(), len(turns), socket.gethostname()))
            new.replace(folder / 'lock')
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
# --- Batches of a fixed length, and batches that cannot be divided -------------------------------

FIXED = 10


def noisy(v):
    from keras import backend as K
    return v + K.random_normal((FIXED, 2))


def fixed_models():
    """name -> (model with FIXED written into it, contexts that it runs on, whether it draws random numbers)."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Sequential

    def dense(n, fixed=True):
        return L.Dense(n, **({'batch_input_shape': (FIXED, 6)} if fixed else {'input_shape': (6,)}))

    def shaped(function, shape):
        return L.Lambda(function, output_shape=shape, name='fixed')
    return {
        'reshape': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, 2, 4)), (2, 4)), L.Flatten(),
                                        L.Dense(3)]), 2, False),
        'reshape to what is left': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, -1)), (8,)),
                                                        L.Dense(3)]), 2, False),
        'reshape, batch_input_shape not given': (lambda: Sequential([
            dense(8, False), shaped(lambda v: K.reshape(v, (FIXED, 8)), (8,)), L.Dense(3)]), 2, False),
        'filled': (lambda: Sequential([dense(2), shaped(lambda v: v * T.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                   2, False),
        'variable': (lambda: Sequential([dense(2), shaped(lambda v: v * K.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                     2, False),
        # FIXED rows of 6 are whole rows of 4 together, not in parts.
        'merged': (lambda: Sequential([dense(6), shaped(lambda v: K.reshape(K.softmax(K.reshape(v, (-1, 4))), (-1, 6)),
                                                  (6,)), L.Dense(3)]), 1, False),
        'noise_shape': (lambda: Sequential([L.Dropout(0.5, noise_shape=(FIXED, 1), batch_input_shape=(FIXED, 6)),
                                            L.Dense(3)]), 2, True),
        'random_normal': (lambda: Sequential([dense(2), shaped(noisy, (2,)), L.Dense(3)]), 2, True),
        'random_normal, batch_input_shape not given': (lambda: Sequential([dense(2, False), shaped(noisy, (2,)),
                                                                           L.Dense(3)]), 2, True),
    }


@pytest.fixture
def enabled():
    """A function that enables all contexts for Keras's models; texts for the user go into its report alone."""
    from theano_mgpu.keras import disable, enable

    def start(**options):
        return enable(**dict({'tell': lambda text: None}, **options))
    yield start
    disable()


def trained(model, x, y, size=FIXED, mode='FAST_COMPILE'):
    """Train, test and predict; returns everything that this leaves behind."""
    from keras import backend as K
    model.compile('adam', 'mse', mode=mode)
    losses = [model.train_on_batch(x[i:i + size], y[i:i + size]) for _ in range(2) for i in range(0, len(x), size)]
    return [losses, model.evaluate(x, y, batch_size=size, verbose=0), model.predict(x, batch_size=size)] \
        + [K.get_value(w) for w in model.weights + model.optimizer.weights]


@pytest.mark.parametrize('name,kind', [(name, 'cpu') for name in (
    'reshape', 'reshape to what is left', 'reshape, batch_input_shape not given', 'filled', 'variable', 'merged',
    'noise_shape', 'random_normal', 'random_normal, batch_input_shape not given')] + [
        pytest.param(name, 'gpu', marks=pytest.mark.slow) for name in ('merged', 'random_normal')])  # 40 s to compile
def test_a_model_with_the_length_of_its_batches_written_into_it_trains(name, kind, contexts, enabled):
    """"Input dimension mis-match", "total size of new array must be unchanged": sub-batches are shorter."""
    from theano_mgpu.keras import disable
    names = [context.name for context in contexts(kind, 2)]
    make, n_contexts, draws = fixed_models()[name]
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = make()
        found.append(trained(model, x, y, mode='FAST_COMPILE' if kind == 'cpu' else None))
    for one, other in zip(*found):
        assert np.shape(one) == np.shape(other) and np.isfinite(other).all()
        if not draws:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    functions = model.train_function, model.test_function, model.predict_function
    assert [len(function.function.contexts) for function in functions] == [n_contexts] * 3
    assert [context.name for context in report.usages[0].contexts] == names[:n_contexts]
    notes = [note for note in report.notes if 'runs on one context' in note]
    assert len(notes) == (n_contexts == 1)
    assert all('replica 0' in note and model.name in note and note in str(report) for note in notes)
    if 'not given' not in name:
        assert not [note for note in report.notes if 'not exactly as on one' in note]


@pytest.mark.slow  # convolutions are compiled: 15 s on each kind where they are not cached
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_convolutions_of_a_fixed_batch_train(kind, contexts, enabled):
    """"could not broadcast input array from shape (5, ...) into shape (10, ...)": of the length given to the op."""
    from theano_mgpu.keras import disable

    from keras import layers as L
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = data(2 * FIXED, 6, 6, 2)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = Sequential([L.Conv2D(2, 3, padding='same', activation='tanh', batch_input_shape=(FIXED, 6, 6, 2)),
                            L.AveragePooling2D(), L.UpSampling2D(), L.Flatten(), L.Dense(3)])
        found.append(trained(model, x, y, mode=None))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
    assert len(model.train_function.function.contexts) == 2
    assert not report.notes


@pytest.mark.unverified
def test_a_batch_that_is_at_fault_does_not_take_a_model_off_its_contexts(cpu2, enabled):
    """One `predict_on_batch` of no rows left a model to plain Keras for good."""
    from keras import layers as L
    from keras.models import Model, Sequential
    report = enabled()
    model = Sequential([L.Dense(3, input_shape=(6,))])
    with pytest.raises(mgpu.BatchError, match='the batch is empty'):  # so it is in plain Keras
        model.predict_on_batch(np.zeros((0, 6), 'float32'))
    assert model.predict_on_batch(np.zeros((10, 6), 'float32')).shape == (10, 3)
    a, b = L.Input((6,)), L.Input((6,))
    both = Model([a, b], L.add([a, b]))
    with pytest.raises(mgpu.BatchError, match='different lengths'):
        both.predict_on_batch([np.zeros((8, 6)), np.zeros((6, 6))])
    both.predict_on_batch([np.zeros((8, 6))] * 2)
    fixed = fixed_models()['merged'][0]()
    with pytest.raises(mgpu.ReplicaError, match='replica'):
        fixed.predict_on_batch(data(7, 6)[0])  # no rows of 4: fails on one context, too
    assert [len(each.predict_function.function.contexts) for each in (model, both, fixed)] == [2, 2, 2]
    assert not report.notes
    fixed.predict_on_batch(data(FIXED, 6)[0])
    assert len(fixed.predict_function.function.contexts) == 1 and 'runs on one context' in report.notes[0]


def test_a_batch_of_another_length_than_the_fixed_one_fails_as_in_plain_keras(cpu2, enabled):
    from theano_mgpu.keras import disable
    for several in (False, True):
        enabled() if several else disable()
        model = fixed_models()['reshape'][0]()
        assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
        with pytest.raises((ValueError, mgpu.ReplicaError), match='reshape|size'):
            model.predict_on_batch(data(7, 6)[0])
    assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
    assert len(model.predict_function.function.contexts) == 2


def test_an_error_after_batches_that_were_divided_is_raised(cpu2, enabled):
    """A model that has trained over its contexts is not moved by an error that comes later."""
    from keras import layers as L
    from keras.models import Sequential
    enabled()
    model = Sequential([L.Lambda(lambda v: T.opt.Assert('too large')(v, T.all(v < 9)), output_shape=(6,),
                                 input_shape=(6,)), L.Dense(3)])
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    x, y = data(8, 6)[0], data(8, 3)[0]
    model.train_on_batch(x, y)
    with pytest.raises(mgpu.ReplicaError, match='too large'):
        model.train_on_batch(x + 9, y)
    assert len(model.train_function.function.contexts) == 2


def test_a_first_batch_that_cannot_be_divided_is_an_error_if_strict(cpu2, enabled):
    enabled(strict=True)
    model = fixed_models()['merged'][0]()
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    before = model.get_weights()
    with pytest.raises(mgpu.ReplicaError, match='replica 0'):
        model.train_on_batch(*[data(FIXED, n)[0] for n in (6, 3)])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_a_parallel_model_whose_batch_cannot_be_divided_runs_on_one_context(cpu2):
    from theano_mgpu.keras import multi_gpu_model
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for parallel in (False, True):
        np.random.seed(3)
        model = fixed_models()['merged'][0]()
        if not parallel:
            found.append(trained(model, x, y))
            continue
        model = multi_gpu_model(model)
        with pytest.warns(mgpu.MgpuWarning, match='runs on one context') as caught:
            found.append(trained(model, x, y))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert [context.name for context in model.contexts] == ['host0']
    assert len([w for w in caught if w.category is mgpu.MgpuWarning]) == 1 and caught[0].filename == __file__


# --- Notes about a model -------------------------------------------------------------------------

def with_flat_loss():
    """A variational autoencoder's loss: a mean over all pixels, added to a divergence of each sample."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model
    x = L.Input((6,))
    code = L.Dense(2)(x)
    out = L.Dense(6, activation='sigmoid')(code)
    model = Model(x, out)
    divergence = -0.5 * K.sum(1 - K.square(code), axis=-1)
    model.add_loss(K.mean(6 * K.mean(K.binary_crossentropy(K.flatten(x), K.flatten(out)), axis=-1) + divergence))
    return model


def test_a_mean_over_all_pixels_that_is_added_to_a_loss_of_each_sample_is_exact(cpu2, enabled):
    """"the loss mixes samples": it is a mean over the replicas' means, as that of one device is."""
    from theano_mgpu.keras import disable
    x = np.random.RandomState(1).rand(11, 6).astype('float32')
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = with_flat_loss()
        model.compile('adam', mode='FAST_COMPILE')
        found.append([model.train_on_batch(x, None) for _ in range(3)] + model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert report.notes == [] and len(model.train_function.function.contexts) == 2


@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_a_gradient_that_is_zero_in_theory_is_no_difference(optimizer, cpu2):
    """The bias of a layer before a softmax over its units' mean: --verify found a relative difference of 2.0."""
    from theano_mgpu.keras import verify

    from keras import backend as K
    from keras import layers as L
    from keras.models import Sequential
    np.random.seed(2)
    model = Sequential([L.Dense(5, input_shape=(6,)), L.Lambda(lambda v: v - K.mean(v, axis=-1, keepdims=True),
                                                               output_shape=(5,)),
                        L.Dense(1, use_bias=False, kernel_initializer='ones', trainable=False), L.Dense(3)])
    model.compile(optimizer, 'mse', mode='FAST_COMPILE')
    x, y = data(11, 6)[0], data(11, 3, seed=1)[0]
    certificate = verify(model, x, y)
    assert certificate.passed, str(certificate)
    assert len(certificate.arbitrary) == 3 and 'gradient is zero but for rounding' in str(certificate)
    assert {row.kind for row in certificate.rows} >= {'gradient', 'weight', 'optimizer'}


def test_a_summary_without_a_model_on_contexts_says_why(cpu2, enabled):
    """"0 models on 0 contexts ()" where every model was left to plain Keras."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model
    report = enabled()
    tensor = L.Input(tensor=K.variable(np.ones((4, 6))))
    model = Model(tensor, L.Dense(3)(tensor))
    model.compile('sgd', 'mse', target_tensors=K.variable(np.ones((4, 3))))
    title, note = str(report).splitlines()
    assert title == 'no model ran on the contexts'
    assert note.startswith('note: %s is left to plain Keras' % model.name) and 'reads its data from a tensor' in note


# --- The batch after this one --------------------------------------------------------------------

def quick_step(model):
    return mgpu.training_function(model.inputs, model.loss, model.params, momentum)


def test_no_room_for_the_next_batch_does_not_undo_this_one(gpu2, monkeypatch):
    """The next batch is sent within the step: its MemoryError undid the step, and was raised a batch too early."""
    from theano_mgpu.batches import prefetch
    from theano_mgpu.replicas import transfers
    x, labels = data(24, 7)
    parts = [(x[i:i + 8], labels[i:i + 8]) for i in range(0, 24, 8)]
    model, reference = dense_model(), dense_model()
    expected = list(quick_step(reference).over(parts))
    send, prepare, failed = transfers.DeviceBuffers.send, prefetch.LookAhead.prepare, []

    def fail(self, key, value):
        failed.append(True)
        raise MemoryError('no room on the device')

    def prepare_next(self):
        with monkeypatch.context() as patch:
            if not failed:
                patch.setattr(transfers.DeviceBuffers, 'send', fail)
            prepare(self)
        assert transfers.DeviceBuffers.send is send
    monkeypatch.setattr(prefetch.LookAhead, 'prepare', prepare_next)
    np.testing.assert_allclose(list(quick_step(model).over(parts)), expected, rtol=1e-6)
    assert len(failed) == 2  # a task a replica
    np.testing.assert_allclose(model.params[0].get_value(), reference.params[0].get_value(), rtol=1e-6)


def test_a_bad_batch_of_a_generator_does_not_undo_the_one_before(gpu2):
    """The shape of the next batch is checked within the step before it, which was then rolled back."""
    from theano_mgpu.keras import multi_gpu_model
    from theano_mgpu.patches import compat

    import keras
    from keras.layers import Dense
    from keras.models import Sequential
    x, y = data(8, 6)[0], data(8, 3, seed=1)[0]

    class NextIsThere(keras.callbacks.Callback):
        ended = 0

        def on_batch_begin(self, batch, logs=None):
            if not batch:
                compat.keras_batches._enqueuer.queue.queue[0].wait(30)

        def on_batch_end(self, batch, logs=None):
            self.ended += 1

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (x, y) if index == 0 else (x[:, 1:], y)
    found = []
    for bad in (True, False):
        np.random.seed(3)
        model = multi_gpu_model(Sequential([Dense(3, input_shape=(6,))]))
        model.compile('sgd', 'mse')
        callback = NextIsThere()
        if bad:
            with pytest.raises(ValueError, match='to have shape'):
                model.fit_generator(Batches(), epochs=1, shuffle=False, verbose=0, callbacks=[callback])
            assert callback.ended == 1 and len(model.train_function.function.contexts) == 2
        else:
            model.train_on_batch(x, y)
        found.append(model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_the_data_of_a_training_is_let_go_of_when_it_ends(kind, contexts):
    """The step kept what knows the next batch, and with it all the data of the last `fit`."""
    import gc
    import weakref

    from theano_mgpu.keras import multi_gpu_model

    import keras
    from keras.layers import Dense
    from keras.models import Sequential
    contexts(kind, 2)
    model = multi_gpu_model(Sequential([Dense(3, input_shape=(6,))]))
    model.compile('sgd', 'mse', **({'mode': 'FAST_COMPILE'} if kind == 'cpu' else {}))

    def stop(batch, logs):
        raise KeyboardInterrupt
    for callbacks in ([], [keras.callbacks.LambdaCallback(on_batch_end=stop)]):
        x, y = data(24, 6)[0], data(24, 3, seed=1)[0]
        try:
            model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
        except KeyboardInterrupt:
            pass
        look_ahead = model.train_function.function.look_ahead
        assert look_ahead.next_batch is None and look_ahead._prepared is None
        held = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [reference() is None for reference in held] == [True, True]
def test_a_step_that_failed_is_no_step_of_a_checkpoint(contexts, kind, tmp_path):
    """Calls were counted: after a retry and a crash, a batch was left out."""
    contexts(kind, 2)
    model, path = dense_model(), str(tmp_path / 'run.npz')
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, check_finite=True,
                                  mode=theano.Mode(optimizer='fast_compile'))
    x, labels = data(6, 7)
    bad = np.where(x == x[3], np.nan, x).astype(x.dtype)
    assert step.checkpoint(path, every=2) == 0
    step(x, labels)
    with pytest.raises(mgpu.NonFiniteError):
        step(bad, labels)
    with pytest.raises(mgpu.BatchError):
        step(x, labels[:2])
    assert not os.path.exists(path)
    step(x, labels)
    after_two = model.params[0].get_value()
    step(x, labels)
    assert step.checkpoint(path, every=2) == 2
    np.testing.assert_array_equal(model.params[0].get_value(), after_two)
    step(x, labels)
    step(x, labels)
    assert step.checkpoint(path, every=2) == 4


def counting_step(start=0.0):
    """A quick step whose only variable, w, counts steps."""
    x, w = T.vector('x'), theano.shared(np.asarray(start, theano.config.floatX), name='w')
    return w, mgpu.training_function([x], (x * w).mean(), [w], lambda gradients: {w: w + 1 + 0 * gradients[0]},
                                     mode=theano.Mode(optimizer='fast_compile'))


def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 40)


def change_a_byte(path):
    with open(path, 'r+b') as file:
        content = file.read()
        file.seek(content.index(b'\x93NUMPY') + 100)
        file.write(bytes([content[file.tell()] ^ 1]))


def make_empty(path):
    open(path, 'wb').close()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(contexts, kind, tmp_path):
    """There was none before it, and messages were "File is not a zip file", "Bad CRC-32 for file 'value/0.npy'"."""
    contexts(kind, 2)
    path, batch = str(tmp_path / 'run.npz'), np.ones(4, theano.config.floatX)
    w, step = counting_step()
    step.checkpoint(path, every=2)
    for _ in range(5):
        step(batch)
    assert sorted(os.listdir(str(tmp_path))) == ['run.npz', 'run.npz.lock', 'run.npz.previous']
    for damage in (cut_short, change_a_byte, make_empty):
        damage(path)
        with pytest.warns(mgpu.MgpuWarning, match='run.npz is damaged .* taken, from .*run.npz.previous'):
            assert step.checkpoint(path, every=2) == w.get_value() == 2
        with pytest.warns(mgpu.MgpuWarning, match='damaged'):
            step.load(path)
    step(batch)
    step(batch)  # the damaged file takes no whole one's place
    for name, expected in (('run.npz', 4), ('run.npz.previous', 2)):
        step.load(str(tmp_path / name))
        assert w.get_value() == expected
    cut_short(path)
    cut_short(path + '.previous')
    with pytest.raises(ValueError, match='run.npz is damaged.*there is no intact .*run.npz.previous. Name another'):
        step.load(path)
    assert w.get_value() == 2
    os.remove(path)
    assert step.checkpoint(path, every=1) == 0
    step(batch)
    assert 'run.npz.previous' not in os.listdir(str(tmp_path)), 'a former run has left what is before'


def test_values_that_are_not_finite_take_no_good_checkpoint_s_place(contexts, kind, tmp_path):
    contexts(kind, 2)
    path, batch = tmp_path / 'run.npz', np.ones(4, theano.config.floatX)
    w, step = counting_step()
    step.save(path)
    w.set_value(np.asarray(np.nan, theano.config.floatX))
    with pytest.warns(mgpu.MgpuWarning, match='w: not a number, or infinite. .*npz is not written') as warned:
        step.save(path)
        step.save(path)
        step.checkpoint(str(tmp_path / 'other.npz'), every=1)
        step(batch)
    assert len(warned) == 2 and not os.path.exists(str(tmp_path / 'other.npz'))
    step.load(path)
    assert w.get_value() == 0
    w.set_value(np.asarray(np.inf, theano.config.floatX))
    step.checkpoint(str(tmp_path / 'other.npz'), every=1, allow_nan=True)
    step(batch)
    w.set_value(np.asarray(0, theano.config.floatX))
    step.load(str(tmp_path / 'other.npz'))
    assert np.isinf(w.get_value())


def test_a_full_disk_leaves_the_old_checkpoint_and_the_message_names_it(tmp_path, cpu2):
    path = str(tmp_path / 'run.npz')
    w, step = counting_step(1)
    step.save(path)
    before, limit = open(path, 'rb').read(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match='run.npz could not be written, and is as it was before: File too large'):
            step.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert open(path, 'rb').read() == before and os.listdir(str(tmp_path)) == ['run.npz']
    with pytest.raises(FileNotFoundError, match='nowhere/run.npz could not be written'):
        step.save(str(tmp_path / 'nowhere' / 'run.npz'))


def test_files_that_dead_processes_left_unfinished_are_removed(tmp_path):
    from theano_mgpu.utils.files import whole_file
    path = str(tmp_path / 'run[1].npz')
    ended = subprocess.Popen(['true'])
    ended.wait()
    host = os.uname().nodename
    left = '%s.%s.%d.unfinished' % (path, host, ended.pid)
    others = ['%s.%s.%d.unfinished' % (path, host, os.getppid()), path + '.another-host.%d.unfinished' % ended.pid]
    for name in [left] + others:
        open(name, 'w').close()
    with whole_file(path) as unfinished:
        open(unfinished, 'w').close()
    assert sorted(os.listdir(str(tmp_path))) == sorted(map(os.path.basename, [path] + others))


def test_a_file_is_on_the_disk_before_it_takes_the_old_one_s_place_and_the_folder_after(tmp_path, monkeypatch):
    """A power failure left an empty file, or the old one."""
    from theano_mgpu.utils.files import whole_file
    path, done = str(tmp_path / 'run.npz'), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: done.append(os.path.basename(os.readlink('/proc/self/fd/%d' % fd)))
                        or fsync(fd))
    monkeypatch.setattr(os, 'replace', lambda old, new: done.append('replace') or replace(old, new))
    with whole_file(path) as unfinished:
        open(unfinished, 'w').close()
    assert done == [os.path.basename(unfinished), 'replace', tmp_path.name]
    monkeypatch.setattr(os, 'link', lambda *names: (_ for _ in ()).throw(OSError('no hard links here')))
    with whole_file(path, path + '.previous') as unfinished:
        with open(unfinished, 'w') as file:
            file.write('new')
    assert open(path).read() == 'new' and open(path + '.previous').read() == ''


def keras_model(seed=1):
    """A compiled parallel model with dropout; its functions are interpreted where they can be."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense, Dropout
    from keras.models import Sequential
    np.random.seed(seed)
    model = multi_gpu_model(Sequential([Dense(4, activation='tanh', input_shape=(3,)), Dropout(0.3), Dense(1)]),
                            gpus=None)
    interpreted = all(context.kind == 'cpu' for context in mgpu.contexts())
    model.compile('adam', 'mse', metrics=['mae'], mode=theano.Mode('py' if interpreted else None, 'fast_compile'))
    return model


def keras_state(model):
    return model.get_weights() + model.optimizer.get_weights()


KERAS_X = np.random.RandomState(0).randn(22, 3).astype('float32')
KERAS_Y = KERAS_X.sum(axis=1, keepdims=True)


class Interrupt:
    """Ends a fit at a batch, as a kill would."""

    def __init__(self, at):
        self.left = at

    def __call__(self, batch, logs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def keras_fit(model, path, callbacks=(), interrupted_at=0, every=2, **options):
    """A fit with a Checkpoint; its history."""
    from theano_mgpu.keras import Checkpoint

    from keras.callbacks import LambdaCallback
    given = dict(dict(x=KERAS_X, y=KERAS_Y, batch_size=6, epochs=3, validation_split=0.2, verbose=0), **options)
    callbacks = list(callbacks) + [Checkpoint(path, every=every)] * (path is not None)
    if interrupted_at:
        callbacks.append(LambdaCallback(on_batch_end=Interrupt(interrupted_at)))
    return model.fit(callbacks=callbacks, **given).history


@pytest.fixture
def forgetful(monkeypatch):
    """A function after which the process is like a new one to checkpoints."""
    from theano_mgpu.keras import checkpoint
    return lambda: monkeypatch.setattr(checkpoint, '_runs', {})


def assert_bitwise(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_array_equal(a, b)


def assert_same_history(ours, theirs):
    assert ours == theirs
    assert {name: list(map(str, values)) for name, values in ours.items()} == \
        {name: list(map(str, values)) for name, values in theirs.items()}, 'other dtypes: a CSVLogger shows it'


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])  # compiles in each script
def test_fits_with_the_same_checkpoint_are_all_trained_and_all_resumed(contexts, kind, tmp_path, forgetful):
    """The second fit passed over all batches of the first one's file: its model stayed untrained."""
    contexts(kind, 2)
    path = str(tmp_path / 'run.npz')

    def script(path, second_interrupted_at=0):
        from theano_mgpu.keras import Checkpoint
        model, callback = keras_model(), Checkpoint(path, every=2) if path else None
        used = [callback] if path else []
        histories = [keras_fit(model, None, used)]
        between = keras_state(model)
        histories.append(keras_fit(model, None, used, second_interrupted_at, epochs=2, batch_size=9))
        model.compile('sgd', 'mse', mode=model._function_kwargs['mode'])
        histories.append(keras_fit(model, None, used, epochs=1))
        return histories, between, keras_state(model), np.random.rand()

    expected = script(None)
    with pytest.raises(KeyboardInterrupt):
        script(path, 3)
    assert {'run.npz', 'run-fit2.npz'} <= set(os.listdir(str(tmp_path)))
    forgetful()
    for _ in range(2):  # going on within the second fit, and with nothing left to do
        found = script(path)
        for ours, theirs in zip(found[0], expected[0]):
            assert_same_history(ours, theirs)
        assert_bitwise(found[1] + found[2], expected[1] + expected[2])
        assert found[3] == expected[3], 'NumPy draws other numbers after the fits'
        forgetful()
    os.remove(path)
    with pytest.warns(mgpu.MgpuWarning, match='run-fit[23].npz is not of the run that .*run.npz is of: this fit'):
        found = script(path)
    assert_bitwise(found[2], expected[2])


def test_a_fit_that_is_killed_goes_on_bitwise_from_any_batch(cpu2, tmp_path, forgetful):
    """Also with callbacks that add to the logs (History had no lr for what was passed over), write a log, or run the
    model themselves (the losses got out of step)."""
    from keras.callbacks import CSVLogger, LambdaCallback, LearningRateScheduler

    def fit(name, model, **options):
        def evaluate(epoch, logs):
            model.train_on_batch(KERAS_X[:5], KERAS_Y[:5])
            logs['test_loss'] = model.evaluate(KERAS_X[:5], KERAS_Y[:5], verbose=0)[0]
        callbacks = [CSVLogger(str(tmp_path / 'first.csv')), LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
                     LambdaCallback(on_epoch_end=evaluate), CSVLogger(str(tmp_path / 'last.csv'))]
        history = keras_fit(model, name and str(tmp_path / name), callbacks, **options)
        return history, [(tmp_path / name).read_text() for name in ('first.csv', 'last.csv')]

    whole = keras_model()
    expected, logs = fit(None, whole)
    assert set(expected) == {'loss', 'mae', 'val_loss', 'val_mae', 'lr', 'test_loss'}
    for killed_at in (3, 4, 8, 9):
        name = '%d.npz' % killed_at
        with pytest.raises(KeyboardInterrupt):
            fit(name, keras_model(), interrupted_at=killed_at, every=1 + killed_at % 3)
        model = keras_model()
        history, our_logs = fit(name, model)
        assert_same_history(history, expected)
        assert_bitwise(keras_state(model), keras_state(whole))
        assert our_logs == logs
        forgetful()


@pytest.mark.parametrize('generator,stops', [(False, 'on_batch_end'), (False, 'on_epoch_end'), (True, 'on_batch_end')])
def test_a_stopped_fit_is_passed_over_as_it_was(generator, stops, cpu2, tmp_path, forgetful):
    from keras.callbacks import LambdaCallback
    path = str(tmp_path / 'run.npz')

    def fit(model, stop_at):
        seen = []

        def stop(number, logs):
            seen.append(number)
            model.stop_training = len(seen) == stop_at
        callbacks = [checkpoint(path), LambdaCallback(**{stops: stop})]
        if not generator:
            return keras_fit(model, None, callbacks), 0
        batches = iter([(KERAS_X[i:i + 6], KERAS_Y[i:i + 6]) for i in range(16)])
        history = model.fit_generator(batches, steps_per_epoch=3, epochs=3, workers=0, verbose=0, callbacks=callbacks,
                                      validation_data=(KERAS_X[:4], KERAS_Y[:4]))
        return history.history, len(list(batches))
    first, again = keras_model(), keras_model()
    expected, left = fit(first, 5 if stops == 'on_batch_end' else 2)
    forgetful()
    history, left_again = fit(again, 0)
    assert len(expected['loss']) == 2 and left == left_again
    assert_same_history(history, expected)
    assert_bitwise(keras_state(again), keras_state(first))


def test_early_stopping_and_others_go_on_where_a_killed_fit_was(cpu2, tmp_path, forgetful):
    """They forgot the best epoch: a restart trained longer, and ModelCheckpoint overwrote the best model."""
    from keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    best, path = str(tmp_path / 'best.h5'), str(tmp_path / 'run.npz')

    def fit(model, path, interrupted_at=0):
        # No epoch is better than the first one by so much.
        stopping = EarlyStopping('loss', patience=3, min_delta=1000, restore_best_weights=True)
        stopping.monitor_op = lambda a, b: np.isinf(b)
        writer = ModelCheckpoint(best, 'loss', save_best_only=True)
        writer.monitor_op = stopping.monitor_op
        callbacks = [stopping, ReduceLROnPlateau('loss', patience=2, min_delta=1000), writer]
        history = keras_fit(model, path, callbacks, interrupted_at, epochs=9)
        model.load_weights(best)
        return history, keras_state(model), stopping.wait, writer.best
    expected = fit(keras_model(), None)
    assert len(expected[0]['lr']) == 4
    with pytest.raises(KeyboardInterrupt):
        fit(keras_model(), path, 8)
    for _ in range(2):
        history, state, *others = fit(keras_model(), path)
        assert_same_history(history, expected[0])
        assert_bitwise(state, expected[1])
        assert others == list(expected[2:])
        forgetful()


def checkpoint(path, every=2):
    from theano_mgpu.keras import Checkpoint
    return Checkpoint(path, every=every)


def test_a_fit_that_fails_while_it_passes_over_batches_has_the_state_of_its_checkpoint(cpu2, tmp_path, forgetful):
    """The weights were those of an untrained model."""
    path, batch = str(tmp_path / 'run.npz'), (KERAS_X[:6], KERAS_Y[:6])

    def batches(n):
        yield from [batch] * n
        raise OSError('no more data')
    saved, model = keras_model(), keras_model(2)
    saved.fit_generator(batches(6), 3, 2, workers=0, verbose=0, callbacks=[checkpoint(path)])
    forgetful()
    with pytest.raises(OSError, match='no more data'):
        model.fit_generator(batches(4), 3, 2, workers=0, verbose=0, callbacks=[checkpoint(path)])
    assert_bitwise(keras_state(model), keras_state(saved))
    assert model.train_function.checkpoint is None


@pytest.mark.parametrize('change,message', [
    ({'epochs': 2}, 'written by a fit with .*epochs=3.* but this one has .*epochs=2'),
    ({'batch_size': 9}, 'written by a fit with batch_size=6.* but this one has batch_size=9'),
    ({'initial_epoch': 1}, 'written by a fit with .*initial_epoch=0.* but this one has .*initial_epoch=1'),
    ({'validation_split': 0.3}, 'written by a fit with .*samples=17.* but this one has .*samples=15'),
    ({'x': KERAS_X + 1}, 'by a fit whose first batch has the checksum [0-9]+, but that of this one has [0-9]+')])
def test_a_fit_that_is_not_that_of_the_file_is_an_error(change, message, cpu2, tmp_path, forgetful):
    """It returned an untrained model with the history of the file's fit."""
    path = str(tmp_path / 'run.npz')
    keras_fit(keras_model(), path)
    forgetful()
    model = keras_model()
    before, state = model.get_weights(), np.random.get_state()[1].tolist()
    with pytest.raises(ValueError, match=message + '.*remove the file or name another one'):
        keras_fit(model, path, **change)
    assert_bitwise(model.get_weights(), before)
    assert np.random.get_state()[1].tolist() == state
    assert len(keras_fit(keras_model(), path)['loss']) == 3


def test_a_generator_with_other_batches_than_before_is_warned_of(cpu2, tmp_path):
    """It may draw them at random, and has to be able to go on."""
    path = str(tmp_path / 'run.npz')

    def fit(shift):
        batches = ((KERAS_X[i:i + 6] + shift, KERAS_Y[i:i + 6]) for i in range(9))
        from keras.callbacks import LambdaCallback
        return keras_model().fit_generator(batches, 3, 3, workers=0, verbose=0, callbacks=[
            checkpoint(path), LambdaCallback(on_batch_end=Interrupt(8 if shift else 0))])
    with pytest.raises(KeyboardInterrupt):
        fit(1)
    with pytest.warns(mgpu.MgpuWarning, match='run.npz was written after other batches than those that were replayed'):
        fit(0)


def test_a_keras_checkpoint_does_not_grow_with_the_batches_and_stays_finite(cpu2, tmp_path):
    """The results of each batch since the beginning were written every time."""
    path, model, sizes = str(tmp_path / 'run.npz'), keras_model(), []

    def look(epoch, logs):
        with np.load(path) as file:
            sizes.append([file[name].size for name in file.files if name.startswith('extra/results/')])
    from keras.callbacks import LambdaCallback
    keras_fit(model, path, [LambdaCallback(on_epoch_end=look)], every=3)
    assert sizes == [[3, 3]] * 3
    saved = keras_state(model)
    model.set_weights([weights * np.nan for weights in model.get_weights()])
    callback = checkpoint(str(tmp_path / 'bad.npz'))
    with pytest.warns(mgpu.MgpuWarning, match='not a number, or infinite. .*bad.npz is not written'):
        keras_fit(model, None, [callback])
    assert not os.path.exists(callback.path) and len(saved) > 4


@needs_mpi
def test_a_rank_reads_what_it_has_saved_and_not_a_former_file_or_none(tmp_path):
    """Ranks other than 0 did not wait for it to be written; they died in load_model. Guarded writes need no other rank.
    """
    from keras_addon import rank_jobs
    path = str(tmp_path / 'm')
    launch(2, 'save_and_load', path, job=os.path.abspath(rank_jobs.__file__), flags=INTERPRETED)
    ours, theirs = (arrays('%s.%d.npz' % (path, rank)) for rank in range(2))
    assert_bitwise(ours, theirs)
    *_, lines, best, first, second, third, saved = ours
    assert lines == 3 and np.isfinite(best)
    for found, expected in ((first, 1), (second, 2), (third, 2), (saved, 2)):
        assert (found == expected).all()
    for rank in range(2):
        with open('%s.%d.json' % (path, rank)) as file:
            errors = json.load(file)
        assert len(errors) == 3 and all('m.nowhere/m.h5 could not be written' in error for error in errors)
    assert not [name for name in os.listdir(str(tmp_path)) if 'unfinished' in name]


def test_a_rank_that_saves_alone_says_whom_it_waits_for(monkeypatch):
    from theano_mgpu.distributed.mpi import MpiRanks

    class Silent:
        iprobe = improbe = lambda self, *args, **kwargs: None
    ranks = object.__new__(MpiRanks)
    ranks.__dict__.update(rank=1, size=2, hosts={0: 'one', 1: 'two'}, _comm=Silent(), _meetings=3, _incoming={},
                          _mpi=types.SimpleNamespace(Status=lambda: None), _turn=contextlib.nullcontext())
    monkeypatch.setattr(theano.config.mgpu, 'timeout', 1)
    with pytest.raises(mgpu.RankError, match=r'rank 1 \(host two\) has waited 1 s for rank 0 \(host one\) to write m'):
        ranks.write_by_first('m.h5', lambda: None)


@needs_mpi
def test_a_failure_of_one_rank_late_in_a_step_is_one_of_all(tmp_path):
    """Where the script caught it, the other ranks had new weights, and went on: 0.2467 against 0.2127, no error."""
    launch(2, 'late_failures', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10')
    for rank, own in enumerate([{'RankError'}, {'MemoryError', 'ReplicaError'}]):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert len(found['met']) == 9
        for place, kind, unchanged in found['met']:
            assert kind in own and unchanged, (rank, place, kind)
        assert all(found['same']) and len(found['same']) > 3


def processes_of(text):
    """Running processes whose command line has a text in it."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open('/proc/%s/cmdline' % pid) as file:
                if text in file.read():
                    found.append(int(pid))
        except OSError:  # it has ended
            pass
    return found


@needs_mpi
@pytest.mark.parametrize('killed', ['launch', 'mpirun'])
def test_a_killed_launcher_leaves_no_process(killed, tmp_path):
    """mpirun and the ranks went on training, and writing checkpoints, for ever."""
    mark = str(tmp_path / 'state.npz')
    job = subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', JOBS, 'wait', mark],
                           env=dict(os.environ, THEANO_FLAGS=INTERPRETED), stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout.readline() == 'waiting\n'
        assert len(processes_of(mark)) == 4
        mpirun, = set(processes_of(mark)) & set(processes_of('mpirun'))
        os.kill(job.pid if killed == 'launch' else mpirun, signal.SIGKILL)
        job.wait(60)
        for _ in range(600):
            if not processes_of(mark):
                break
            time.sleep(0.1)
    assert not processes_of(mark)


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_checkpoint_of_another_job_is_refused(kind, contexts, tmp_path):
    """Two jobs on one file went on from each other's state."""
    contexts(kind, 2)
    path, model = str(tmp_path / 'run.npz'), dense_model()
    code = "import sys; from theano_mgpu.checkpoints.lock import lock_checkpoint; lock = lock_checkpoint(%r)\n" \
        "print('locked', flush=True); sys.stdin.read()" % path
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, mode=MODES[kind])
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(mgpu.MgpuError, match='checkpoints of another job, process %d on host' % other.pid):
            step.checkpoint(path, 1)
    assert step.checkpoint(path, 1) == 0


def interrupting_at(number, files):
    """A trace function that raises KeyboardInterrupt at a line event in some files, as a signal may."""
    seen = [0]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        seen[0] += event == 'line'
        if seen[0] == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace
    return trace


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_ctrl_c_at_any_line_of_a_step_leaves_all_of_it_or_nothing(kind, contexts):
    """The lock stayed taken, so that the next call waited for ever."""
    contexts(kind, 2)

    def training():
        model, count = dense_model(), theano.shared(np.int64(0), 'count')
        step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, outputs=[model.probabilities],
                                      batch_updates={count: count + model.inputs[0].shape[0]},
                                      mode=MODES[kind])
        return step, lambda: [variable.variable.get_value() for variable in step.variables()]
    (step, values), (undisturbed, expected) = training(), training()
    modules = data_parallel_module, training_module, run_module, exchange_module
    batch, files = data(6, 7), [module.__file__ for module in modules]
    step(*batch)
    number, done, interrupted = 0, 1, True
    while interrupted:
        number += 1
        before = values()
        sys.settrace(interrupting_at(number, files))
        try:
            step(*batch)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert step.lock.acquire(blocking=False), 'line event %d' % number
        step.lock.release()
        changed = [not np.array_equal(a, b) for a, b in zip(before, values())]
        assert all(changed) or not any(changed), 'line event %d' % number
        step(*batch)
        done += 1 + all(changed)
    assert number > 50
    for _ in range(done):
        undisturbed(*batch)
    for ours, theirs in zip(values(), expected()):
        np.testing.assert_array_equal(ours, theirs)


@needs_mpi
def test_a_compile_error_on_the_first_rank_is_one_of_all(tmp_path):
    """The others waited for it for ever; and float16 was an error of mpi4py's, "KeyError: 'e'"."""
    launch(2, 'compile_errors', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10')
    own = 'MemoryError: no memory left'
    for rank, first in enumerate([own, 'RankError: rank 0 (host %s) failed to compile' % os.uname().nodename]):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert found['met'][0].startswith(first) and found['met'][1] == own
        x = np.arange(12, dtype='float32').reshape(4, 3) / 8
        expected = 1 - 0.1 * 2 * (x ** 2).sum(axis=0) / 12
        np.testing.assert_allclose(found['w'], expected, rtol=2e-3)
        assert found['dtype'] == 'float16'


def normalised(x):
    axes = (0, 2, 3)
    return (x - x.mean(axes, keepdims=True)) * T.inv(T.sqrt(x.var(axes, keepdims=True) + 1e-4))


@needs_compiler
@pytest.mark.parametrize('largest', [
    lambda x: pool_2d(T.nnet.relu(x), (2, 2), ignore_border=True),
    pytest.param(lambda x: x.max(axis=3, keepdims=True), marks=pytest.mark.slow),
    pytest.param(lambda x: T.maximum(x, 0.1 * x ** 2), marks=pytest.mark.slow)], ids=['pool', 'max', 'maximum'])
def test_gradients_of_maxima_between_normalisations_reach_their_pixels(largest, cpu2):
    """Batch normalisation, ReLU, max-pooling: gradients before them were wrong by a factor of 2, and nobody said so.

    The pixels were computed twice, by other ops, and in the last bit were not equal to their maximum.
    """
    found = []
    for divided in (False, True):
        rng = np.random.RandomState(0)
        x = T.dtensor4('x')
        gain, shift = [theano.shared(rng.rand(1, 3, 1, 1) + 0.5, name, broadcastable=(True, False, True, True))
                       for name in ('gain', 'shift')]
        loss = (T.tanh(normalised(largest(normalised(x) * gain + shift))) ** 3).sum()
        updates = [(p, p - 0.01 * T.grad(loss, p)) for p in (gain, shift)]
        make = mgpu.function if divided else theano.function
        step = make([x], loss, updates=updates, mode=theano.Mode('cvm', 'fast_run'))
        images = rng.randn(7, 3, 6, 6)
        found.append([step(images) for _ in range(2)] + [gain.get_value(), shift.get_value()])
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-9)


def test_pixels_and_their_maximum_come_from_one_computation():
    """A later stage that computes the pixels again, by other ops, may round them to something else than the maximum."""
    x = T.dtensor4('x')
    gain = theano.shared(np.ones((1, 3, 1, 1)), broadcastable=(True, False, True, True))
    pooled = pool_2d(T.nnet.relu(normalised(x) * gain), (2, 2), ignore_border=True)
    program = partition([x], [T.grad((normalised(pooled) ** 3).sum(), gain)])
    gradients = [v.owner for stage in program.stages for v in ancestors(stage.outputs)
                 if v.owner and isinstance(v.owner.op, MaxPoolGrad)]
    assert gradients and all(v.owner is None for node in gradients for v in node.inputs[:2])


@needs_mpi
def test_garbage_that_one_rank_has_collected_and_another_one_has_not_makes_no_difference(tmp_path):
    """"RankError: the ranks do different things. rank 0: sharing values; rank 1: compiling in turn"."""
    launch(2, 'collect', tmp_path / 'found.npz', flags=INTERPRETED)
    found, passed = arrays(tmp_path / 'found.npz')
    np.testing.assert_array_equal(found, np.ones((4, 3)))
    assert passed


@needs_mpi
def test_two_threads_that_train_over_ranks_at_once_end_the_job():
    """MPI_ERR_REQUEST in one thread, and exit code 0."""
    done = launch(2, 'fail', 'threads', flags=INTERPRETED + ',mgpu.timeout=10', expected=1)
    assert 'MPI_ERR' not in done.stderr
    assert done.stderr.count(') failed:') in (1, 2)  # each rank has two threads; the first to fail ends the other
    assert 'one thread' in done.stderr
