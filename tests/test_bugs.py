"""Bugs that were found and mended, each under its symptom."""
import json
import os
import resource
import subprocess
import sys
import types

import theano_mgpu as mgpu
from theano_mgpu.contexts import compiling_for, gpu_context

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model, momentum
from test_ranks import INTERPRETED, arrays, launch, needs_mpi


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
    assert sorted(os.listdir(str(tmp_path))) == ['run.npz', 'run.npz.previous']
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
    with pytest.raises(ValueError, match='run.npz is damaged.*there is no whole .*run.npz.previous. Give another'):
        step.load(path)
    assert w.get_value() == 2
    os.remove(path)
    assert step.checkpoint(path, every=1) == 0
    step(batch)
    assert os.listdir(str(tmp_path)) == ['run.npz'], 'a former run has left what is before'


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
    from theano_mgpu.files import whole_file
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
    from theano_mgpu.files import whole_file
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
    assert model.train_function.memory is None


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
    with pytest.warns(mgpu.MgpuWarning, match='run.npz was written after other batches than those that were passed'):
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
    from theano_mgpu.executors.mpi import MpiRanks

    class Silent:
        iprobe = improbe = lambda self, *args, **kwargs: None
    ranks = object.__new__(MpiRanks)
    ranks.__dict__.update(rank=1, size=2, hosts={0: 'one', 1: 'two'}, _comm=Silent(), _meetings=3,
                          _mpi=types.SimpleNamespace(Status=lambda: None))
    monkeypatch.setattr(theano.config.mgpu, 'timeout', 1)
    with pytest.raises(mgpu.RankError, match=r'rank 1 \(host two\) has waited 1 s for rank 0 \(host one\) to write m'):
        ranks.write_by_first('m.h5', lambda: None)
