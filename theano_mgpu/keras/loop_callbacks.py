"""The callbacks of a Keras loop: which of them are called, when, and on which process."""
from __future__ import annotations

import functools
import os
from typing import Any, Callable

import keras
import numpy as np
from keras import callbacks as keras_callbacks

from ..distributed.collectives import all_gather_int, broadcast_object
from ..distributed.rank_0 import on_rank_0
from .checkpoint import Checkpoint

# Callbacks that only write. Those that steer (EarlyStopping, schedules) have to run, and agree, on every rank.
WRITERS = (keras_callbacks.ModelCheckpoint, keras_callbacks.CSVLogger, keras_callbacks.RemoteMonitor,
           keras_callbacks.ProgbarLogger, keras_callbacks.TensorBoard)
PATHS = ('filepath', 'filename', 'log_dir')  # attributes that name the files which they write


class LoopCallbacks:
    """The callbacks of a loop as one callback: Keras calls its hooks, and these call each of them in turn.

    While a Checkpoint replays finished batches, the other callbacks are not called; their part of `logs` is there all
    the same. With several processes, callbacks that only write are called on rank 0, and the other ranks wait; but
    where the ranks have different names for a file, such as one in a temporary folder, each writes its own.

    Parameters
    ----------
    callbacks : list of keras.callbacks.Callback
        The user's.
    checkpoint : Checkpoint, optional
        One of `callbacks`; it is called first.
    sync : RankSync, optional
        With several processes; it is called even before the checkpoint.
    """

    def __init__(self, callbacks: list[keras_callbacks.Callback], checkpoint: Checkpoint | None = None,
                 sync: Any = None) -> None:
        self._checkpoint, self._sync, self._ranks = checkpoint, sync, sync and sync.ranks
        self._first = [callback for callback in (sync, checkpoint) if callback is not None]
        self._others = [callback for callback in callbacks if callback is not checkpoint]
        self._own_files = self._find_own_files() if sync else set()

    def _find_own_files(self):
        """Return the positions of the callbacks whose files have different names on the ranks."""
        ours = [[os.path.abspath(str(getattr(callback, name))) for name in PATHS if getattr(callback, name, None)]
                for callback in self._others]
        theirs = broadcast_object(self._ranks, ours)
        different = sum(1 << i for i, (one, other) in enumerate(zip(ours, theirs), 1) if one != other)
        masks = all_gather_int(self._ranks, different)
        return {i for i in range(1, len(ours) + 1) if any(mask >> i & 1 for mask in masks)}

    def set_params(self, params: dict[str, Any]) -> None:
        for callback in self._first + self._others:
            callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        for callback in self._first + self._others:
            callback.set_model(model)

    def _set_validation_data(self, value):
        for callback in self._first + self._others:
            callback.validation_data = value

    validation_data = property(fset=_set_validation_data)  # Keras sets it for each callback

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a hook of Keras's, such as `on_batch_end`."""
        if not name.startswith('on_'):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, hook, *args):
        for callback in self._first:
            getattr(callback, hook)(*args)
        for position, callback in enumerate(self._others, 1):
            if self._ranks is not None and isinstance(callback, WRITERS) and position not in self._own_files:
                self._call_on_first_rank(position, callback, hook, args)
            else:
                self._call_unless_replaying(position, callback, hook, args)
        if hook == 'on_epoch_begin' and self._sync is not None:
            self._sync.share_random_states()  # now, as callbacks may have drawn numbers on some ranks only

    def _call_on_first_rank(self, position, callback, hook, args):
        """Call it on rank 0; at the end of an epoch or the training, other ranks wait until it has written."""
        def act():
            self._call_unless_replaying(position, callback, hook, args)
            return {name: value for name, value in vars(callback).items() if isinstance(value, (int, float, np.number))}
        if hook in ('on_epoch_end', 'on_train_end'):
            # A script may look at ModelCheckpoint.best, and has to find the same on every rank.
            vars(callback).update(on_rank_0(self._ranks, act))
        elif self._ranks.rank == 0:
            act()

    def _call_unless_replaying(self, position, callback, hook, args):
        checkpoint = self._checkpoint
        begins_anew = isinstance(callback, keras_callbacks.CSVLogger) and not callback.append
        if checkpoint is None or begins_anew or hook in ('on_train_begin', 'on_train_end'):
            getattr(callback, hook)(*args)
        elif hook == 'on_epoch_end':
            self._end_epoch(position, callback, *args)
        elif not checkpoint.replaying:
            getattr(callback, hook)(*args)

    def _end_epoch(self, position, callback, epoch, logs):
        """End an epoch: the checkpoint records the callback's part of the logs, or puts it there again."""
        if self._checkpoint.replaying:
            added = self._checkpoint.logs_after(position)
            logs.update(added)
        else:
            before = dict(logs)
            callback.on_epoch_end(epoch, logs)
            added = {name: value for name, value in logs.items() if name not in before or before[name] is not value}
        self._checkpoint.note_logs(position, added)


def checkpoint_among(callbacks: list[keras_callbacks.Callback]) -> Checkpoint | None:
    """Return the Checkpoint among callbacks, or None; raise a ValueError if there are several."""
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(checkpoints) > 1:
        raise ValueError('%d Checkpoints are among the callbacks: pass one' % len(checkpoints))
    return checkpoints[0] if checkpoints else None
