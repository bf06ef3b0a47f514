"""What a ParallelModel adds to Keras's loops: checkpoints; in a process of several one order of samples, one writer,
and the results of all the data.
"""
import functools
import inspect
import random

import keras
import numpy as np
from keras import callbacks as keras_callbacks

from .. import launched
from ..executors import mpi_ranks
from .checkpoint import with_checkpoint

# Callbacks that only write. Those that steer (EarlyStopping, schedules) have to run, and agree, on every rank.
WRITERS = (keras_callbacks.ModelCheckpoint, keras_callbacks.CSVLogger, keras_callbacks.RemoteMonitor,
           keras_callbacks.ProgbarLogger, keras_callbacks.TensorBoard)


def loop_of(method):
    """A training, evaluation or prediction loop of `keras.Model` for a ParallelModel.

    A Checkpoint among the callbacks goes on from its file. In a process of several, the first one alone shows
    progress and writes, the order of samples is its order, and where each process feeds its own data, losses and
    metrics are those of all of it.
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
        within = isinstance(callbacks, keras_callbacks.CallbackList)  # the validation of another loop
        if within or not (callbacks or launched.trains_together()):
            return method(self, *args, **kwargs)
        checkpoint, callbacks = with_checkpoint(list(callbacks))
        try:
            return run_together(run, callbacks) if launched.trains_together() else run(callbacks=callbacks)
        finally:
            if checkpoint:
                checkpoint.detach()
    return loop


def run_together(run, callbacks):
    """Run a loop on every rank."""
    together = Together()
    together.share_random_states()
    quiet = {}
    if launched.rank():
        quiet = {'verbose': 0}
        callbacks = [callback for callback in callbacks
                     if not isinstance(getattr(callback, 'callback', callback), WRITERS)]
    return together.results(run(callbacks=[together] + callbacks, **quiet))


class Together(keras.callbacks.Callback):
    """Keeps the processes' loops together; the first of the user's callbacks."""

    def __init__(self):
        super().__init__()
        self._tested = None

    def share_random_states(self):
        """Go on with the first process's random numbers, from which the order of samples is drawn."""
        states = mpi_ranks().tell((random.getstate(), np.random.get_state()))
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
