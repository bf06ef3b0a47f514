"""Entry point of the MPI jobs of the Keras add-on's tests: ``python keras_rank_jobs.py JOB ARGUMENTS``."""
import csv
import glob
import json
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import theano_mgpu as mgpu
from theano_mgpu.auto.choice import COUNTED, WARM_UP
from theano_mgpu.keras import Checkpoint, enable, multi_gpu_model

from support import initial_weights

if __name__ == '__main__':  # a job draws the weights that its test draws
    initial_weights.draw_by_numpy()

import keras
import numpy as np
from keras import callbacks
from keras.layers import BatchNormalization, Dense, Dropout

from support.dispatch_clock import Clock
from support.keras_zoo import Unlisted
from support.modes import PYTHON

X = np.random.RandomState(0).randn(53, 5).astype('float32')
Y = X.sum(axis=1, keepdims=True)


def parallel(optimizer='adam', seed=None, dropout=0.2, normalised=True):
    """Return a compiled model; without a seed, each rank's has weights of its own at first."""
    random.seed(mgpu.rank())
    np.random.seed(mgpu.rank() if seed is None else seed)
    model = multi_gpu_model(keras.Sequential([
        Dense(8, activation='tanh', input_shape=(5,)), *([BatchNormalization()] * normalised), Dropout(dropout),
        Dense(1)]), gpus=None)
    model.compile(optimizer, 'mse', metrics=['mae'], mode=PYTHON)
    return model


def state(model):
    return model.get_weights() + model.optimizer.get_weights()


def write(path, model, history, *further):
    """Write weights and optimizer state, and the results of `fit` and others, one file a rank."""
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *state(model), *further)
    with open('%s.%d.json' % (path, mgpu.rank()), 'w') as f:
        json.dump({name: [float(value) for value in values] for name, values in history.items()}, f)


class Schedules(callbacks.Callback):
    """A callback of the user's own, which sets the learning rate."""

    def on_epoch_begin(self, epoch, logs=None):
        keras.backend.set_value(self.model.optimizer.lr, 0.01 / (1 + epoch))


class Table(callbacks.Callback):
    """A callback of the user's own, which writes: two ranks cannot write its file."""

    def __init__(self, path):
        super().__init__()
        self.path, self.losses = path, []

    def on_train_begin(self, logs=None):
        open(self.path, 'x').close()

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(float(logs['loss']))
        with open(self.path, 'a') as file:
            csv.writer(file).writerow([epoch, logs['loss'], float(keras.backend.get_value(self.model.optimizer.lr))])


class Measured(callbacks.Callback):
    """A callback of the user's own, which all ranks need: it has a metric for other callbacks."""

    def on_epoch_end(self, epoch, logs=None):
        logs['measured'] = float(np.abs(self.model.predict(X[:11], batch_size=4)).sum())


class Both(Measured):
    def on_train_end(self, logs=None):
        open('%s.both%d' % (self.model.path, mgpu.rank()), 'w').close()


def fit(path, contexts):
    """Train with Keras's options around `fit`; ragged batches in an order that is drawn."""
    mgpu.init(contexts)
    model = parallel()
    model.path = path
    is_first = mgpu.rank() == 0
    tables = [Table(path + '.table.csv'), Table('%s.table%d.csv' % (path, mgpu.rank()))]
    history = model.fit(X, Y, batch_size=8, epochs=4, validation_split=0.2, verbose=1, callbacks=[
        *[callbacks.LambdaCallback()] * is_first, Schedules(),
        callbacks.ModelCheckpoint(path + '.best.h5', save_best_only=True),
        callbacks.ModelCheckpoint('%s.own%d.h5' % (path, mgpu.rank())),
        callbacks.CSVLogger('%s.own%d.csv' % (path, mgpu.rank())),
        callbacks.CSVLogger(path + '.csv'), callbacks.EarlyStopping(patience=3),
        callbacks.LambdaCallback(on_epoch_end=draw), *tables, Both(),
        callbacks.EarlyStopping('measured', patience=3),
        *[callbacks.ModelCheckpoint(path + '.of_first.h5')] * is_first])
    if is_first:
        model.save(path + '.alone.h5')
    scores = model.evaluate(X[:11], Y[:11], batch_size=4, verbose=0)
    model.fit_generator(Pieces(), epochs=2, shuffle=True, verbose=0)
    model.save(path + '.h5')
    assert tables[0].losses == tables[1].losses == history.history['loss']
    write(path, model, history.history, np.array(scores), model.predict(X[:11], batch_size=4))


def fitted_by_short_batches():
    """Fit a model by batches of 8 samples and a last one of 5; return the model and its history."""
    random.seed(mgpu.rank())
    np.random.seed(mgpu.rank())
    model = keras.Sequential([Dense(8, activation='tanh', input_shape=(5,)), Dropout(0.2), Dense(1)])
    model.compile('adam', 'mse', metrics=['mae'], mode=PYTHON)
    return model, model.fit(X, Y, batch_size=8, epochs=4, verbose=0).history


def short_batches(path):
    """Train on short batches under `enable`. By the first rank's clock alone, a divided batch takes longer."""
    clock = Clock(divided=1e-5 if mgpu.rank() else 1e-3, whole=1e-4)
    clock.install(setattr)
    mgpu.init('a->cpu')
    report = enable()
    model, history = fitted_by_short_batches()
    write(path, model, {})
    for _ in range(2 * (WARM_UP + COUNTED)):
        model.predict_on_batch(X[:8])
    found = {'history': history, 'calls': clock.calls[:], 'report': str(report)}
    for _ in range(37):  # each process has a batch of its own
        loss = model.train_on_batch(X[mgpu.rank():][:8], Y[:8])
    found['loss'], clock.calls[:], own = loss, [], slice(8 if mgpu.rank() else 20)
    found['unequal'] = [model.train_on_batch(X[own], Y[own])[0] for _ in range(WARM_UP + COUNTED + 1)], clock.calls[:]

    def fail(inputs):
        raise MemoryError('no memory left')
    compared = model.train_function.function.compared
    whole, compared._function = compared._function, fail if mgpu.rank() else compared._function
    try:
        for _ in range(300):
            model.train_on_batch(X[:8], Y[:8])
    except MemoryError as error:
        found['failure'] = '%s: %s' % (type(error).__name__, error)
    compared._function = whole
    found['after'] = [model.train_on_batch(X[:8], Y[:8]) for _ in range(3)] + [np.sum(w) for w in model.get_weights()]
    with open('%s.%d.json' % (path, mgpu.rank()), 'w') as file:
        json.dump(found, file, default=float)


def trained_by_turns():
    """Train models whose functions are made again, for plain Keras, meanwhile; return their state.

    Two have one optimizer. The third has one that lists no state; it is frozen, but not compiled again.
    """
    random.seed(1)
    np.random.seed(1)
    shared = keras.optimizers.SGD(0.01, momentum=0.9)
    models = [keras.Sequential([Dense(units, activation='tanh', input_shape=(5,)), BatchNormalization(), Dense(1)])
              for units in (4, 4, 3)]
    for model, optimizer in zip(models, [shared, shared, Unlisted()]):
        model.compile(optimizer, 'mse', metrics=['mae'], mode=PYTHON)
    for i in range(WARM_UP + COUNTED + 4):
        for model in models:
            model.train_on_batch(X[i:i + 8], Y[i:i + 8])
        models[-1].trainable = False
    return [value for model in models for value in model.get_weights()] + shared.get_weights()


def by_turns(path):
    """Run `trained_by_turns` under `enable`, by divided batches at first and by whole ones then."""
    clock = Clock(divided=1e-3, whole=1e-4)
    clock.install(setattr)
    mgpu.init('a->cpu')
    enable()
    np.savez('%s.%d.npz' % (path, mgpu.rank()), *trained_by_turns())
    assert {'divided', 'whole'} == set(clock.calls)


def tensorboard(path, logs):
    """Train with summaries for TensorBoard."""
    mgpu.init('a->cpu;b->cpu')
    model = parallel()
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[
        callbacks.TensorBoard(logs, histogram_freq=1, write_images=True)])
    write(path, model, history.history)


def draw(epoch, logs):
    """Draw random numbers on one rank only."""
    if mgpu.rank():
        np.random.rand(3)


class Pieces(keras.utils.Sequence):
    """A sequence of batches whose order is drawn from Python's own random numbers."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[i * 9:i * 9 + 9], Y[i * 9:i * 9 + 9]


def checkpoint(path, file, killed_at, spares=0, number=signal.SIGKILL):
    """Train with checkpoints; a signal ends the job once, after spare processes have begun if there are any."""
    mgpu.init('a->cpu;b->cpu')
    model, seen = parallel(), []
    open('%s.begun%d' % (path, os.getpid()), 'w').close()

    def kill(batch, logs):
        seen.append(batch)
        if len(seen) == int(killed_at) and not os.path.exists(path + '.killed') and mgpu.rank() == mgpu.size() - 1:
            while len(glob.glob(path + '.begun*')) < mgpu.size() * (1 + int(spares)):
                time.sleep(0.1)
            time.sleep(3 * int(spares))
            with open(path + '.csv') as log:
                assert len(log.readlines()) == 3  # spare processes leave it alone
            open(path + '.killed', 'w').close()
            os.kill(os.getpid(), int(number))

    killing = callbacks.LambdaCallback(on_batch_end=kill)
    killing.mgpu_rank_0 = False
    history = model.fit(X, Y, batch_size=8, epochs=4, validation_data=(X[:20], Y[:20]), verbose=0, callbacks=[
        killing, callbacks.CSVLogger(path + '.csv'),
        Checkpoint(file, every=4 if int(number) == signal.SIGKILL else 1000)])
    write(path, model, history.history, np.array(len(seen)))


def save_and_load(path):
    """Read each file right after the call that writes it, on each rank; rank 0 takes its time to write."""
    mgpu.init('a->cpu')
    model, rank, loaded = parallel(normalised=False), mgpu.rank(), []
    fsync = os.fsync
    os.fsync = lambda descriptor: time.sleep(0.2) or fsync(descriptor)

    def load(name):
        loaded.append(keras.models.load_model(path + name, compile=False).get_weights()[0])

    class Reader(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            load('.%d.h5' % (epoch + 1))

        def on_train_end(self, logs=None):
            with open(path + '.csv') as f:
                loaded.append(np.array(len(f.readlines())))

    best = callbacks.ModelCheckpoint(path + '.{epoch}.h5', save_best_only=True, monitor='loss')
    best.monitor_op = lambda value, other: True
    model.fit(Pieces(), epochs=2, verbose=0,  # which Keras does by fit_generator
              callbacks=[best, callbacks.CSVLogger(path + '.csv'), Reader()])
    loaded.append(np.array(best.best))
    for value in (1, 2):  # the second one is not to be read as the first one was
        model.set_weights([np.full_like(weights, value) for weights in model.get_weights()])
        model.save(path + '.h5')
        load('.h5')
    if rank == 0:
        model.save(path + '.of_0.h5')
    model.save(path + '.again.h5')
    load('.again.h5')
    if rank == 1:
        model.save_weights(path + '.of_1.h5')
    model.evaluate(X[:8], Y[:8], verbose=0)
    assert os.path.exists(path + '.of_1.h5')
    model.save_weights('%s.weights.%d.h5' % (path, rank))
    model.evaluate(X[:8], Y[:8], verbose=0)
    assert os.path.exists('%s.weights.%d.h5' % (path, rank))
    step, file = model.train_function.function, path + '.npz'
    step.save(file)
    with np.load(file) as saved:
        loaded.append(saved['value/0'])
    os.fsync, errors = fsync, []
    for save in (model.save, model.save_weights, step.save):
        try:
            save(path + '.nowhere/m.h5')
        except OSError as error:
            errors.append(str(error))
    write(path, model, {}, *loaded)
    with open('%s.%d.json' % (path, rank), 'w') as f:
        json.dump(errors, f)
    if rank == 0:
        model.save(path + '.at_the_end.h5')


PARTS = [(0, 29), (29, 40), (40, 53)]  # of 29, 11 and 13 samples


def shard(path):
    """Train on a part of the data for each rank."""
    mgpu.init('a->cpu')
    model = parallel(seed=0, dropout=0.0, normalised=False)
    x, y = (data[slice(*PARTS[mgpu.rank()])] for data in (X, Y))
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, validation_data=(x[:9], y[:9]), verbose=0)
    scores = model.evaluate(x, y, batch_size=4, verbose=0)
    predicted = model.predict(x, batch_size=4)
    assert predicted.shape == y.shape
    write(path, model, history.history, np.array(scores))


def epoch(path):
    """Train for an epoch on six samples of rank 0, and five of rank 1."""
    mgpu.init('a->cpu')
    model, rows = parallel(seed=0, dropout=0.0, normalised=False), slice(*[(0, 6), (6, 11)][mgpu.rank()])
    write(path, model, model.fit(X[rows], Y[rows], batch_size=4, shuffle=False, verbose=0).history)


def coupled(path, contexts):
    """Train models whose samples depend on each other, for 20 steps."""
    from support import keras_coupled as models
    from support.keras_equivalence import floatx
    mgpu.init(contexts)
    with floatx('float64'):
        found = [models.train(name, 'float64', PYTHON) for name in models.MODELS]
    if mgpu.rank() == 0:
        np.savez(path, *[np.asarray(value) for values in found for _, value in values])


if __name__ == '__main__':
    globals()[sys.argv[1]](*sys.argv[2:])
