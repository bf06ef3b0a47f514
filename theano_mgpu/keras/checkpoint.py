"""`theano_mgpu.keras.Checkpoint`: a training that a crash, or a kill, sets back by a few batches only."""
import os
import random

import keras
import numpy as np

from .. import state
from ..errors import MgpuError
from .functions import BatchFunction


class Checkpoint(keras.callbacks.Callback):
    """Save the whole training state every so many batches; when `fit` begins, go on from what was saved.

    Run the same script again after a crash (``theano-mgpu launch --restarts`` does): `fit` and `fit_generator` of a
    parallel model then pass over the batches that are done, in the same order of samples, with the losses and
    metrics that they had, and compute from the next one on. What is saved are weights, the states of the optimizer,
    the metrics and the random streams, and these losses.

    Parameters
    ----------
    path : str
        An .npz file, always a whole one: each checkpoint replaces the one before.
    every : int
        Training batches between checkpoints, at least 1: what a crash can lose.

    Raises
    ------
    ValueError
        If `every` is less than 1; in `fit`, if the file is of another model.

    Notes
    -----
    Other callbacks are not called for what is passed over, so that files which they wrote stay as they are; but
    CSVLogger is, since it begins its file anew. Remove the file to train from the beginning.
    """

    def __init__(self, path, every=100):
        super().__init__()
        if every < 1:
            raise ValueError('every=%r: a checkpoint is made every so many batches, 1 or more' % (every,))
        self.path, self.every = path, every
        self.passing = False   # whether what comes next is done already

    def on_train_begin(self, logs=None):
        if not isinstance(self.model.train_function, BatchFunction):
            raise MgpuError('Checkpoint is for a model that runs over contexts, if only one: of multi_gpu_model, or '
                            'after enable(), which theano-mgpu run does for a script. %s is left to plain Keras'
                            % self.model.name)
        self._functions = [f for f in (self.model.train_function, self.model.test_function) if f is not None]
        self._step = self.model.train_function.function
        self._ranks = self._step.forward.ranks
        if self._step.forward.sharded:
            raise MgpuError('Checkpoint needs every process to be given the whole data: with mgpu.data=sharded the '
                            'processes have done different numbers of batches')
        self._done, self._batches = [], 0
        self._random = _random_states()
        if self._ranks.tell(os.path.exists(self.path)):
            self._read()
        for function in self._functions:
            function.memory = self

    def recall(self, compute):
        """Results of a call of the train or the test function: remembered ones, else computed and remembered."""
        if self.passing:
            self._n_passed += 1
            return list(self._done[self._n_passed - 1])
        results = compute()
        self._done.append(np.array(results))
        return results

    def on_batch_end(self, batch, logs=None):
        if self.passing:
            self._go_on_if_all_is_passed()
            return
        self._batches += 1
        if self._batches % self.every == 0:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        self._go_on_if_all_is_passed()

    def on_train_end(self, logs=None):
        if not self.passing:
            self._save(self.model.stop_training)

    def detach(self):
        """Leave the model's functions, however `fit` ended."""
        self.passing = False
        for function in getattr(self, '_functions', []):
            function.memory = None

    def _save(self, stopped=False):
        extra = {'done': np.array(self._done), 'batches': np.array(self._batches), 'stopped': np.array(stopped)}
        self._step.save_with(self.path, dict(extra, **self._random))

    def _read(self):
        self._arrays = state.read(self.path, self._ranks)
        if 'extra/done' not in self._arrays:
            raise ValueError('%s was not written by theano_mgpu.keras.Checkpoint; name another file' % self.path)
        state.check(self.path, self._arrays, self._step.variables())
        self._done = list(self._arrays['extra/done'])
        self._batches = int(self._arrays['extra/batches'])
        self._random = {name: self._arrays['extra/' + name] for name in self._random}
        _set_random_states(self._random)
        self._n_passed, self.passing = 0, bool(self._done)

    def _go_on_if_all_is_passed(self):
        if self.passing and self._n_passed == len(self._done):
            self.passing = False
            state.set_values(self.path, self._arrays, self._step.variables(), self._step.contexts, self._ranks)
            self.model.stop_training = bool(self._arrays['extra/stopped'])
            self._arrays = None


class WhileComputing:
    """A callback that is not called for what a Checkpoint passes over."""

    def __init__(self, callback, checkpoint):
        self.__dict__.update(callback=callback, checkpoint=checkpoint)

    def __getattr__(self, name):
        if self.checkpoint.passing and name.startswith('on_') and name not in ('on_train_begin', 'on_train_end'):
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
    others = [callback if isinstance(callback, keras.callbacks.CSVLogger) else WhileComputing(callback, found[0])
              for callback in callbacks if callback is not found[0]]
    return found[0], found + others


def _random_states():
    """States of the generators that orders of samples are drawn from, NumPy's and Python's, as arrays."""
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    return {'numpy_random': state.to_array(generator), 'python_random': np.array(random.getstate()[1], 'uint64')}


def _set_random_states(states):
    np.random.set_state(state.from_array(states['numpy_random']).get_state())
    random.setstate((random.getstate()[0], tuple(map(int, states['python_random'])), None))
