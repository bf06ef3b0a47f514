"""`keras.callbacks.TensorBoard` on Theano writes files that TensorBoard itself reads."""
import os

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from support import keras_rank_jobs as rank_jobs
from support.event_files import pixels, read, scalars
from support.keras_equivalence import check  # noqa: F401  chooses Keras's backend first
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.processes import python

X = np.random.RandomState(0).rand(20, 4)
Y = X.sum(axis=1, keepdims=True)

SCRIPT = """
import sys
from keras.callbacks import TensorBoard
from keras.layers import Dense
from keras.models import Sequential
import numpy as np
x = np.random.RandomState(0).rand(20, 4)
model = Sequential([Dense(3, activation='tanh', input_shape=(4,), name='hidden'), Dense(1, name='out')])
model.compile('sgd', 'mse')
history = model.fit(x, x[:, :1], batch_size=8, epochs=2, validation_split=0.2, verbose=0,
                    callbacks=[TensorBoard(sys.argv[1], histogram_freq=1, write_images=True)])
print(*history.history['loss'])
"""


def small(parallel=False):
    model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,), name='hidden'), keras.layers.Dense(1)])
    model = multi_gpu_model(model) if parallel else model
    model.compile('sgd', 'mse', mode=PYTHON)
    return model


@pytest.mark.slow
@pytest.mark.parametrize('command', [['-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', '--always'],
                                     ['-c', 'import theano_mgpu, runpy, sys; del sys.argv[0]; '
                                            'runpy.run_path(sys.argv[0])']], ids=['run', 'imported'])
def test_plain_keras(command, tmp_path):
    """An unchanged script writes scalars, histograms, images and the graph of its layers."""
    script, logs = tmp_path / 'train.py', tmp_path / 'logs'
    script.write_text(SCRIPT)
    done = python(*command, script, logs, flags=INTERPRETED, KERAS_BACKEND='theano')
    assert "those of the layers' outputs" in done.stderr
    events = read(logs)
    losses = [float(loss) for loss in done.stdout.split()[:2]]
    np.testing.assert_allclose(scalars(events, 'loss'), list(enumerate(losses)), rtol=1e-6)
    assert events.Tags()['scalars'] == ['val_loss', 'loss']
    assert sorted(events.Tags()['histograms']) == ['hidden/bias', 'hidden/kernel', 'out/bias', 'out/kernel']
    assert [event.step for event in events.Histograms('hidden/kernel')] == [0, 1]
    assert [event.histogram_value.num for event in events.Histograms('hidden/kernel')] == [12, 12]
    assert {(image.height, image.width) for image in events.Images('hidden/kernel/image/0')} == {(3, 4)}
    assert {node.name.partition('/')[0] for node in events.Graph().node} >= {'hidden', 'out', 'loss'}
    assert not any(node.name.startswith('Elemwise') for node in events.Graph().node)


@pytest.mark.parametrize('update_freq, steps', [('batch', [8, 16, 20, 20]), (10, [16, 20]), ('epoch', [0])])
def test_scalars_of_batches(update_freq, steps, tmp_path, contexts):
    contexts('cpu', 2)
    callback = keras.callbacks.TensorBoard(str(tmp_path), update_freq=update_freq, write_graph=False)
    small(parallel=True).fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    events = read(tmp_path)
    assert [step for step, _ in scalars(events, 'loss')] == steps
    assert not events.Tags()['graph'] and not events.Tags()['histograms']


def test_fit_twice_with_one_callback(tmp_path):
    callback, model = keras.callbacks.TensorBoard(str(tmp_path)), small()
    for epoch in range(2):
        model.fit(X, Y, verbose=0, epochs=epoch + 1, initial_epoch=epoch, callbacks=[callback])
    assert [step for step, _ in scalars(read(tmp_path), 'loss')] == [0, 1]


def test_subclasses_work(tmp_path):
    class WithRate(keras.callbacks.TensorBoard):
        def __init__(self, log_dir):
            super().__init__(log_dir, write_graph=False)

        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, dict(logs, rate=keras.backend.get_value(self.model.optimizer.lr)))

    small().fit(X, Y, verbose=0, callbacks=[WithRate(str(tmp_path))])
    np.testing.assert_allclose(scalars(read(tmp_path), 'rate'), [(0, 0.01)])


@pytest.mark.parametrize('shape, size', [((3, 3, 1), (3, 3)), ((1, 3, 2), (3, 2))])
def test_images_of_kernels(shape, size, tmp_path):
    """Each unit of a kernel with one input channel, or one row, is an image; other kernels are left out."""
    rows, columns, channels = shape
    model = keras.Sequential([keras.layers.Conv2D(2, (rows, columns), input_shape=(5, 5, channels), name='conv'),
                              keras.layers.Conv2D(2, 3, padding='same', name='next'), keras.layers.Flatten()])
    model.compile('sgd', 'mse')
    callback = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1, write_images=True, write_graph=False)
    callback.set_model(model)
    callback.on_epoch_end(0, {})
    callback.on_train_end(None)
    events = read(tmp_path)
    kernel = np.squeeze(model.get_weights()[0])[..., 1]
    found = pixels(events, 'conv/kernel/image/1')
    assert found.shape == kernel.shape == size
    assert np.argmax(found) == np.argmax(kernel)
    assert not [name for name in events.Tags()['images'] if name.startswith('next/kernel')]


@pytest.mark.parametrize('arguments, message', [
    (dict(embeddings_freq=1), 'embeddings_freq=1.*pass embeddings_freq=0'),
    (dict(histogram_freq=1, write_grads=True), 'write_grads=True.*pass write_grads=False')])
def test_what_is_not_available_is_an_error(arguments, message):
    with pytest.raises(mgpu.MgpuError, match=message):
        keras.callbacks.TensorBoard(**arguments)


@pytest.mark.slow
@pytest.mark.mpi
def test_only_rank_0_writes(tmp_path):
    logs = tmp_path / 'logs'
    launch(2, 'tensorboard', tmp_path / 'ranks', logs, job=os.path.abspath(rank_jobs.__file__), flags=INTERPRETED)
    events = read(logs)
    assert len(list(logs.iterdir())) == 1
    assert [step for step, _ in scalars(events, 'loss')] == [0, 1] and len(events.Tags()['histograms']) > 4
