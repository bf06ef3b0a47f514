"""What a ParallelModel adds to Keras's loops: checkpoints; with several processes, one order of samples, one writer,
and the results of all the data.
"""
import contextlib
import functools
import inspect
import random

import keras
import numpy as np
from keras import callbacks as keras_callbacks

from ..distributed.mpi import mpi_ranks
from ..jobs import mpi_environment
from .checkpoint import Checkpoint

# Callbacks that only write. Those that steer (EarlyStopping, schedules) have to run, and agree, on every rank.
WRITERS = (keras_callbacks.ModelCheckpoint, keras_callbacks.CSVLogger, keras_callbacks.RemoteMonitor,
           keras_callbacks.ProgbarLogger, keras_callbacks.TensorBoard)


def loop_of(method):
    """A training, evaluation or prediction loop of `keras.Model` for a ParallelModel.

    A Checkpoint among the callbacks goes on from its file. With several processes, the first one alone shows progress
    and writes, the order of samples is its order, and where each process feeds its own data, losses and metrics are
    those of all of it.
    """
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def loop(self, *args, **kwargs):
        def given(name):
            position = names.index(name) - 1
            return args[position] if position < len(args) else kwargs.get(name)

        def run(**changed):
            own = {name: value for name, value in changed.items() if names.index(name) > len(args)}
            changed_args = [changed.get(name, value) for name, value in zip(names[1:], args)]
            return method(self, *changed_args, **dict(kwargs, **own))

        callbacks = given('callbacks') or []
        # The validation of another loop, or what `fit` does with a Sequence: it calls fit_generator.
        within = isinstance(callbacks, keras_callbacks.CallbackList) or \
            any(isinstance(callback, (RankSync, OnFirstRank, WhileComputing)) for callback in callbacks)
        if within or not (callbacks or mpi_environment.trains_together()):
            return method(self, *args, **kwargs)
        checkpoint, callbacks = with_checkpoint(list(callbacks))
        with checkpoint or contextlib.nullcontext():
            return run_on_each_rank(run, callbacks) if mpi_environment.trains_together() else run(callbacks=callbacks)
    return loop


class WhileComputing:
    """A callback that is not called for what a Checkpoint passes over; what it put into `logs` is there all the same.
    """

    def __init__(self, callback, checkpoint, position):
        self.__dict__.update(callback=callback, checkpoint=checkpoint, position=position)

    def on_epoch_end(self, epoch, logs=None):
        if self.checkpoint.replaying:
            added = self.checkpoint.logs_after(self.position)
            logs.update(added)
        else:
            before = dict(logs)
            self.callback.on_epoch_end(epoch, logs)
            added = {name: value for name, value in logs.items() if name not in before or before[name] is not value}
        self.checkpoint.note_logs(self.position, added)

    def __getattr__(self, name):
        if self.checkpoint.replaying and name.startswith('on_') and name not in ('on_train_begin', 'on_train_end'):
            return lambda *args, **kwargs: None
        return getattr(self.callback, name)

    def __setattr__(self, name, value):
        setattr(self.callback, name, value)


def with_checkpoint(callbacks):
    """The Checkpoint among callbacks, or None; and the callbacks as they are to be called with it."""
    found = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if not found:
        return None, callbacks
    if len(found) > 1:
        raise ValueError('%d Checkpoints among the callbacks: give one' % len(found))
    others = [callback for callback in callbacks if callback is not found[0]]
    found[0].others = [getattr(callback, 'callback', callback) for callback in others]
    return found[0], found + [
        callback if isinstance(callback, keras_callbacks.CSVLogger) and not callback.append
        else WhileComputing(callback, found[0], position) for position, callback in enumerate(others, 1)]


def run_on_each_rank(run, callbacks):
    """Run a loop on every rank."""
    sync = RankSync()
    sync.share_random_states()
    quiet = {}
    if mpi_environment.rank():
        quiet = {'verbose': 0}
    callbacks = [OnFirstRank(callback) if isinstance(getattr(callback, 'callback', callback), WRITERS) else callback
                 for callback in callbacks]
    return sync.results(run(callbacks=[sync] + callbacks, **quiet))


class OnFirstRank:
    """A callback that is called on rank 0 alone; the other ranks wait until it has written.

    Parameters
    ----------
    callback : keras.callbacks.Callback
        One of `WRITERS`, perhaps in a WhileComputing.
    """

    def __init__(self, callback):
        self.__dict__.update(callback=callback, ranks=mpi_ranks())

    def on_epoch_end(self, epoch, logs=None):
        self._call('on_epoch_end', epoch, logs)

    def on_train_end(self, logs=None):
        self._call('on_train_end', logs)

    def _call(self, name, *args):
        own = getattr(self.callback, 'callback', self.callback)

        def act():
            getattr(self.callback, name)(*args)
            return {name: value for name, value in vars(own).items() if isinstance(value, (int, float, np.number))}
        # A script may look at ModelCheckpoint.best, and has to find the same everywhere.
        vars(own).update(self.ranks.by_first(act))

    def __getattr__(self, name):
        if self.ranks.rank and name.startswith('on_'):
            return lambda *args, **kwargs: None
        return getattr(self.callback, name)

    def __setattr__(self, name, value):
        setattr(self.callback, name, value)


class RankSync(keras.callbacks.Callback):
    """Keeps the processes' loops together; the first of the user's callbacks."""

    def __init__(self):
        super().__init__()
        self._tested = None

    def share_random_states(self):
        """Go on with the first process's random numbers, from which the order of samples is drawn."""
        states = mpi_ranks().broadcast_object((random.getstate(), np.random.get_state()))
        random.setstate(states[0])
        np.random.set_state(states[1])

    def on_epoch_begin(self, epoch, logs=None):
        self.share_random_states()
        self._trained = None
        self.model.train_function.begin()

    def on_batch_end(self, batch, logs=None):
        if batch == self._n_batches() - 1:
            self._join_training()

    def on_epoch_end(self, epoch, logs=None):
        self._join_training()
        if self._trained:
            names = self.model.metrics_names
            logs.update(zip(names, self._trained))
            if self._tested and any(name.startswith('val_') for name in logs):
                logs.update(('val_' + name, value) for name, value in zip(names, self._tested))

    def on_test_begin(self, logs=None):
        self._tested = None
        self.model.test_function.begin()

    def on_test_end(self, logs=None):
        self._tested = self.model.test_function.join()

    def on_predict_end(self, logs=None):
        self.model.predict_function.join()

    def results(self, returned):
        """What a loop returns: of all the data, where it is a loss and metrics of this process's part."""
        if self._tested is None or isinstance(returned, keras.callbacks.History):
            return returned
        return self._tested if isinstance(returned, list) else self._tested[0]

    def _n_batches(self):
        steps, samples, size = (self.params.get(name) for name in ('steps', 'samples', 'batch_size'))
        return steps if steps is not None else -(-samples // size)

    def _join_training(self):
        if self._trained is None:
            self._trained = self.model.train_function.join() or ()
