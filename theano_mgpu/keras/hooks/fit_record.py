"""The part of a checkpoint of a Keras `fit` beside the training state.

It has the fit's arguments, its results so far, and the states of callbacks whose decisions depend on earlier batches.
"""
from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
from keras import callbacks as keras_callbacks
from keras.callbacks import Callback

from ...errors import warn
from ...runtime.state.random_states import generators, random_states
from ...runtime.state.state_file import parsing, under
from ...utils.values import sampled_checksum

ARGUMENTS = ('epochs', 'batch_size', 'steps', 'samples', 'do_validation')
STATES = {'EarlyStopping': ('wait', 'best', 'stopped_epoch'), 'ReduceLROnPlateau': ('wait', 'best', 'cooldown_counter'),
          'ModelCheckpoint': ('best', 'epochs_since_last_save')}


class FitRecord:
    """The arguments of a fit, and its results so far.

    The `logs` of a finished epoch have ``'0/loss'`` for Keras's own loss, and ``'2/lr'`` for a value that the second of
    the user's other callbacks added.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        self.run: str | None = None  # identifies the run of the script; all files of a run have the same one
        self.fit = {name: params.get(name) for name in ARGUMENTS}  # they determine the batches
        self.epochs: list[dict[str, Any]] = []                     # the logs of each finished one
        self.lengths: list[int] = []                               # of each finished epoch, in batches
        self.batches: list[list[Any]] = []                         # results of each batch of the unfinished epoch
        self.first_batch: int | None = None                        # a checksum of its inputs, as of all so far
        self.all_batches, self.stopped = 0, False                  # the latter says whether the training is to stop
        self.begin: dict[str, np.ndarray] = random_states()
        self.end: dict[str, np.ndarray] = {}                       # empty before

    @property
    def n_batches(self) -> int:
        return sum(self.lengths) + len(self.batches)

    def arguments(self) -> str:
        """Return the arguments of the fit, as text."""
        return ', '.join('%s=%s' % (name, self.fit[name]) for name in sorted(self.fit))

    def add_inputs(self, inputs: list[Any]) -> None:
        """Add a batch to the checksums."""
        number = sampled_checksum(list(inputs))
        if self.first_batch is None:
            self.first_batch = number
        self.all_batches = zlib.crc32(b'%d' % number, self.all_batches)

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
        arrays = {'run': np.array(self.run), 'fit': np.array(json.dumps(self.fit, default=int)),
                  'batches': np.array(self.n_batches),  # not read again: for users who look into the file
                  'lengths': np.array(self.lengths, 'int64'), 'stopped': np.array(bool(self.stopped)),
                  'checksums': np.array([self.first_batch or 0, self.all_batches], 'int64')}
        # One column for each value, so that it keeps its dtype.
        for key in dict.fromkeys(key for logs in self.epochs for key in logs):
            having = [i for i, logs in enumerate(self.epochs) if key in logs]
            arrays['having/' + key] = np.array(having)
            arrays['logs/' + key] = np.array([self.epochs[i][key] for i in having])
        arrays.update(('results/%d' % i, np.array(column)) for i, column in enumerate(zip(*self.batches)))
        for name, states in (('begin', self.begin), ('end', self.end)):
            arrays.update(('%s/%s' % (name, key), value) for key, value in states.items())
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> FitRecord:
        """Return the record of a file; raise a Damaged if it cannot be read."""
        record = cls({})
        with parsing('the record of a fit'):
            record.run, fit = str(arrays['run']), json.loads(str(arrays['fit']))
            record.fit = dict(fit, **{name: fit[name] for name in ARGUMENTS})
            record.lengths, record.stopped = [int(n) for n in arrays['lengths']], bool(arrays['stopped'])
            record.first_batch, record.all_batches = arrays['checksums'].tolist()
            record.epochs = [{} for _ in record.lengths]
            logs = under('logs/', arrays)
            for key, having in under('having/', arrays).items():
                for i, value in zip(having, logs[key]):
                    record.epochs[i][key] = value
            columns = under('results/', arrays)
            record.batches = list(map(list, zip(*(columns[str(i)] for i in range(len(columns))))))
            record.begin, record.end = under('begin/', arrays), under('end/', arrays)
            for states in [record.begin] + [record.end] * bool(record.end):
                generators(states)
        return record


def states_of(callbacks: list[Callback]) -> dict[str, np.ndarray]:
    """Return the states of callbacks, under names that begin with ``callbacks/``."""
    arrays = {key: np.array(getattr(callback, name)) for key, callback, name in _attributes(callbacks)}
    for prefix, callback in _with_weights(callbacks):
        arrays.update((prefix + str(i), weights) for i, weights in enumerate(callback.best_weights or ()))
    return arrays


def restore_states(callbacks: list[Callback], arrays: dict[str, Any]) -> None:
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
