"""The callbacks of a Keras loop: which of them are called, when, and on which process."""
import os

import numpy as np
from keras import callbacks as keras_callbacks

from ..distributed.collectives import all_gather_int, broadcast_object
from ..distributed.rank_0 import on_rank_0
from .checkpoint import Checkpoint

HOOKS = [name for name in dir(keras_callbacks.Callback) if name.startswith('on_')]
# Callbacks that only write. Those that steer (EarlyStopping, schedules) have to run, and agree, on every rank.
WRITERS = (keras_callbacks.ModelCheckpoint, keras_callbacks.CSVLogger, keras_callbacks.RemoteMonitor,
           keras_callbacks.ProgbarLogger, keras_callbacks.TensorBoard)
PATHS = ('filepath', 'filename', 'log_dir')  # attributes that name what they write


class LoopCallbacks:
    """Stands for the callbacks of a loop: Keras calls it, and it calls each of them in turn.

    While a Checkpoint replays finished batches, the other callbacks are not called; what they put into `logs` is there
    all the same. With several processes, callbacks that only write are called on rank 0, and the other ranks wait; but
    where the ranks have different names for a file, such as one in a temporary folder, each writes its own.

    Parameters
    ----------
    callbacks : list of keras.callbacks.Callback
        The user's.
    checkpoint : Checkpoint, optional
        The one among them; it is called first.
    sync : RankSync, optional
        With several processes; it is called even before the checkpoint.
    """

    def __init__(self, callbacks, checkpoint=None, sync=None):
        self._checkpoint, self._sync, self._ranks = checkpoint, sync, sync and sync.ranks
        self._first = [callback for callback in (sync, checkpoint) if callback is not None]
        self._others = [callback for callback in callbacks if callback is not checkpoint]
        self._own_files = self._find_own_files() if sync else set()
        if checkpoint is not None:
            checkpoint.others = self._others

    def _find_own_files(self):
        """The positions of the callbacks whose files have different names on the ranks."""
        ours = [[os.path.abspath(str(getattr(callback, name))) for name in PATHS if getattr(callback, name, None)]
                for callback in self._others]
        theirs = broadcast_object(self._ranks, ours)
        different = sum(1 << i for i, (one, other) in enumerate(zip(ours, theirs), 1) if one != other)
        masks = all_gather_int(self._ranks, different)
        return {i for i in range(1, len(ours) + 1) if any(mask >> i & 1 for mask in masks)}

    def set_params(self, params):
        for callback in self._first + self._others:
            callback.set_params(params)

    def set_model(self, model):
        for callback in self._first + self._others:
            callback.set_model(model)

    def _set_validation_data(self, value):
        for callback in self._first + self._others:
            callback.validation_data = value

    validation_data = property(fset=_set_validation_data)  # Keras sets it for each callback

    def _call(self, hook, *args):
        self._call_each(hook, args)
        if hook == 'on_epoch_begin' and self._sync is not None:
            self._sync.share_random_states()  # now, as callbacks may have drawn numbers on some ranks only

    def _call_each(self, hook, args):
        for callback in self._first:
            getattr(callback, hook)(*args)
        for position, callback in enumerate(self._others, 1):
            if self._ranks is not None and isinstance(callback, WRITERS) and position not in self._own_files:
                self._call_on_first_rank(position, callback, hook, args)
            else:
                self._call_unless_replaying(position, callback, hook, args)

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
        """Have the checkpoint remember what the callback puts into the logs, or put it there again."""
        if self._checkpoint.replaying:
            added = self._checkpoint.logs_after(position)
            logs.update(added)
        else:
            before = dict(logs)
            callback.on_epoch_end(epoch, logs)
            added = {name: value for name, value in logs.items() if name not in before or before[name] is not value}
        self._checkpoint.note_logs(position, added)


def _calling(hook):
    def call(self, *args):
        self._call(hook, *args)
    return call


for _hook in HOOKS:
    setattr(LoopCallbacks, _hook, _calling(_hook))


def checkpoint_among(callbacks):
    """The Checkpoint among callbacks, or None; a ValueError if there are several."""
    found = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(found) > 1:
        raise ValueError('%d Checkpoints are among the callbacks: pass one' % len(found))
    return found[0] if found else None
