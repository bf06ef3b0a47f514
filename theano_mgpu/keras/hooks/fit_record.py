"""The part of a checkpoint of a Keras `fit` beside the training state.

It has the fit's arguments, its results so far, and the states of callbacks whose decisions depend on earlier batches.
"""
from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

import numpy as np
from keras import callbacks as keras_callbacks
from keras.callbacks import Callback

from ...errors import warn
from ...runtime.state.replay import Record, keys_of
from ...runtime.state.state_file import parsing, under

ARGUMENTS = ('epochs', 'batch_size', 'steps', 'samples', 'do_validation')
STATES = {'EarlyStopping': ('wait', 'best', 'stopped_epoch'), 'ReduceLROnPlateau': ('wait', 'best', 'cooldown_counter'),
          'ModelCheckpoint': ('best', 'epochs_since_last_save')}


class OtherFit(ValueError):
    """An error about the file of another fit than this one."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__('%s %s. Pass the same arguments and data to continue from it; to train from the beginning, '
                         'remove the file or name another one' % (path, text))


class FitRecord(Record):
    """The arguments of a fit, and its results so far; of the model and the fit's other callbacks if they are given.

    The `logs` of a finished epoch have ``'0/loss'`` for Keras's own loss, and ``'2/lr'`` for a value that the second of
    the user's other callbacks added.
    """

    NAME, MARK = '-fit%d', 'fit'
    FOREIGN = 'was not written by theano_mgpu.keras.Checkpoint; name another file'
    moments: Sequence[str] = ('begin',)

    def __init__(self, params: dict[str, Any], model: Any = None, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__()
        self._model, self._callbacks = model, callbacks
        self.fit: dict[str, Any] = {name: params.get(name) for name in ARGUMENTS}  # they determine the batches
        self.epochs: list[dict[str, Any]] = []                     # the logs of each finished one
        self.lengths: list[int] = []                               # of each finished epoch, in batches
        self.batches: list[list[Any]] = []                         # results of each batch of the unfinished epoch
        self.first_key = 0                                         # of the first batch
        self.stopped = False                                       # whether the training was to stop, says a file

    def add(self, number: int, key: int, results: Any) -> None:
        if not self.completed:
            self.first_key = key
        self.batches.append(list(results))

    def next(self, path: str, done: FitRecord, number: int, key: int) -> list[Any]:
        """Return the results of a batch: its own or, if its epoch is finished, the epoch's."""
        has_arrays = done.fit['batch_size'] is not None  # else a generator gives the data
        if has_arrays and not done.completed and key != self.first_key:
            raise OtherFit(path, 'was written by a fit whose first batch has the checksum %d, but that of this one has '
                                 '%d' % (self.first_key, key))
        epoch = len(done.epochs)
        return self.results(done) if epoch < len(self.epochs) else self.batches[len(done.batches)]

    def results(self, done: FitRecord, prefix: str = '') -> list[Any]:
        """Return the results of the epoch that another record has come to."""
        logs = self.logs_of(len(done.epochs), 0)
        return [logs.get(prefix + name, float('nan')) for name in done._model.metrics_names]

    def is_replayed(self, done: FitRecord) -> bool:
        """Return whether the next batch is to be computed; a file that was written at the end of a fit has none."""
        return bool(self.batches) and done.completed == self.completed

    def check(self, path: str, saved: FitRecord) -> None:
        """Raise a ValueError if a file has a fit with other arguments or epochs."""
        other = ['%s=%s, here %s' % (name, saved.fit.get(name), value)
                 for name, value in self.fit.items() if saved.fit.get(name) != value]
        if other:
            raise OtherFit(path, 'was written by a fit with ' + '; '.join(other))
        if saved.lengths[:len(self.lengths)] != self.lengths:
            raise OtherFit(path, 'holds epochs of %s batches, but those of this fit have %s'
                           % (saved.lengths, self.lengths))

    def go_on(self, path: str, saved: FitRecord, arrays: Mapping[str, np.ndarray]) -> None:
        restore_states(self._callbacks, arrays)
        self._model.stop_training = saved.stopped
        if self.completed == saved.completed and self.key != saved.key:
            warn('%s was written after other batches than those that were replayed now, which differ in order or data: '
                 'the training continues from its state, but the result is not that of an uninterrupted one. Do not '
                 'draw random numbers in callbacks, which are not called in a replay, or without a seed' % path)

    def progress(self, path: str) -> str:
        """Return how far the fit of a file has come, as text."""
        epochs, steps = self.fit['epochs'] - (self.fit.get('initial_epoch') or 0), self.fit.get('steps')
        size = self.fit['batch_size']  # none of a generator; Keras 1 has no steps then, either
        total = epochs * (steps or (-(-self.fit['samples'] // size) if size else 0))
        if self.stopped or self.completed == total or len(self.lengths) == epochs:
            return '%s: all %d batches are done; remove it to train again' % (path, self.completed)
        return '%s: continues after batch %d%s' % (path, self.completed, ' of %d' % total if total else '')

    def end(self) -> None:
        """Note that the fit is over: the random numbers from now on are the script's."""
        self.moments = 'begin', 'now'

    def end_epoch(self) -> None:
        self.epochs.append({})
        self.lengths.append(len(self.batches))
        self.batches = []

    def add_logs(self, position: int, logs: dict[str, Any]) -> None:
        """Record the values that a callback has added to the logs of the epoch that has just ended."""
        for name, value in logs.items():
            if np.ndim(value) or np.asarray(value).dtype.kind not in 'biufU':
                warn('a checkpoint does not store logs[%r], which is neither a number nor text: %r' % (name, value))
            else:
                self.epochs[-1]['%d/%s' % (position, name)] = value

    def logs_of(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the values that a callback added to the logs of an epoch, counted from 0; none if it is unfinished."""
        return under('%d/' % position, self.epochs[epoch] if epoch < len(self.epochs) else {})

    def to_arrays(self) -> dict[str, np.ndarray]:
        arrays = {'fit': np.array(json.dumps(self.fit, default=int)),
                  'batches': np.array(self.completed),  # not read again: for users who look into the file
                  'lengths': np.array(self.lengths, 'int64'), 'stopped': np.array(bool(self._model.stop_training)),
                  'keys': np.array([self.first_key, self.key]), **states_of(self._callbacks)}
        # One column for each value, so that it keeps its dtype.
        for key in dict.fromkeys(key for logs in self.epochs for key in logs):
            having = [i for i, logs in enumerate(self.epochs) if key in logs]
            arrays['having/' + key] = np.array(having)
            arrays['logs/' + key] = np.array([self.epochs[i][key] for i in having])
        arrays.update(('results/%d' % i, np.array(column)) for i, column in enumerate(zip(*self.batches)))
        return arrays

    def of_file(self, path: str, arrays: Mapping[str, np.ndarray]) -> FitRecord:
        record = FitRecord({})
        with parsing('the record of a fit'):
            fit = json.loads(str(arrays['fit']))
            record.fit = dict(fit, **{name: fit[name] for name in ARGUMENTS})
            record.lengths, record.stopped = [int(n) for n in arrays['lengths']], bool(arrays['stopped'])
            record.first_key, record.key = keys_of(arrays).tolist()
            record.epochs = [{} for _ in record.lengths]
            logs = under('logs/', arrays)
            for key, having in under('having/', arrays).items():
                for i, value in zip(having, logs[key]):
                    record.epochs[i][key] = value
            columns = under('results/', arrays)
            record.batches = list(map(list, zip(*(columns[str(i)] for i in range(len(columns))))))
            record.completed = sum(record.lengths) + len(record.batches)
        self.check(path, record)
        return record


def states_of(callbacks: Sequence[Callback]) -> dict[str, np.ndarray]:
    """Return the states of callbacks, under names that begin with ``callbacks/``."""
    arrays = {key: np.array(getattr(callback, name)) for key, callback, name in _attributes(callbacks)}
    for prefix, callback in _with_weights(callbacks):
        arrays.update((prefix + str(i), weights) for i, weights in enumerate(callback.best_weights or ()))
    return arrays


def restore_states(callbacks: Sequence[Callback], arrays: Mapping[str, Any]) -> None:
    """Set the states of callbacks from arrays of `states_of`; other arrays may be among them."""
    for key, callback, name in _attributes(callbacks):
        if key in arrays:
            setattr(callback, name, arrays[key][()])
    for prefix, callback in _with_weights(callbacks):
        weights = under(prefix, arrays)
        callback.best_weights = [weights[str(i)] for i in range(len(weights))] or None


def _attributes(callbacks):
    for position, callback in enumerate(callbacks):
        for cls, names in STATES.items():
            if isinstance(callback, getattr(keras_callbacks, cls, ())):
                yield from (('callbacks/%d/%s/%s' % (position, cls, name), callback, name) for name in names
                            if hasattr(callback, name))


def _with_weights(callbacks):
    for position, callback in enumerate(callbacks):
        if hasattr(callback, 'best_weights'):  # an EarlyStopping, since Keras 2.2.3
            yield 'callbacks/%d/best_weights/' % position, callback
