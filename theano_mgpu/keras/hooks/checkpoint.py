"""`theano_mgpu.keras.Checkpoint`: a crash or kill costs a training a few batches only."""
from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, Iterator

from keras.callbacks import Callback

from ...auto.divided_model import divided_model_of
from ...checks.ledger import ledger_at
from ...comm.notice import notices
from ...errors import MgpuError
from ...runtime.call_hooks import Computed
from ...runtime.state.replay import check_every
from ...utils import mpi_environment, rank_process
from ...utils.values import sampled_checksum
from .fit_record import FitRecord, OtherFit


class Checkpoint(Callback):
    """A callback that saves the whole training state every N batches, and continues from it when `fit` begins.

    After a crash, run the same script again (``theano-mgpu launch --restarts`` does). `fit` and `fit_generator` of a
    parallel model then replay the finished batches, in the same order of samples and with the same history, without
    computing them, and compute from the next batch on. The file has the weights, the states of the optimizer, the
    metrics and the random streams, and the history.

    Parameters
    ----------
    path : str
        An .npz file; an interrupted write leaves the old file intact. Each checkpoint replaces the one before, which
        stays as ``path + '.previous'`` and is used if the file is damaged. A second fit of the same process with this
        path has its own file, ``run-fit2.npz`` for ``run.npz``, and so on. If a fit is interrupted or ends with an
        error, the next one takes its file.
    every : int
        Training batches between checkpoints, at least 1: the most that a crash can lose.
    allow_nan : bool
        Also write values that are infinite or not a number. Otherwise a warning names them, and the file is not
        written.
    ledger : str, optional
        A file for a ledger, with a line for each checkpoint within an epoch, and for the values before the first batch;
        see ``theano-mgpu compare``. By default, the flag ``mgpu.ledger`` alone counts.

    Raises
    ------
    ValueError
        If `every` is less than 1. In `fit`, if the file and the one before it are damaged; or if the file belongs to
        another model, to a fit with other epochs, steps, samples, batches or data, or to one with another number of
        logical shards. If a generator gives the data, there is only a warning about other batches than before, since
        it may draw them at random. Other settings that results depend on, such as ``mgpu.tf32``, are a warning, too. So
        is a loss, an update or a rate that has changed since.
    MgpuError
        In `fit`, if another job writes its checkpoints there, or this process is a fork of the one that did.

    Notes
    -----
    Other callbacks are not called during the replay, so that files which they wrote stay as they are; the exception is
    a CSVLogger that begins its file anew. The values that callbacks put into `logs` are saved, and so are the states of
    EarlyStopping, ReduceLROnPlateau and ModelCheckpoint. A callback of your own sees only the batches after the
    restart. Remove the file to train from the beginning.
    """

    def __init__(self, path: str, every: int = 100, allow_nan: bool = False, ledger: str | None = None) -> None:
        super().__init__()
        check_every(every, 'batches')
        self.path, self.every, self.allow_nan = path and os.path.abspath(path), every, allow_nan
        self.ledger = ledger and os.path.abspath(ledger)
        self._others: list[Callback] = []  # the fit's other callbacks
        self._functions: list[Any] = []  # only during a fit: compile() of the model makes new ones
        self._replay: Any = None  # only during a fit

    @property
    def replaying(self) -> bool:
        """True while batches are replayed, not computed."""
        return self._replay is not None and self._replay.saved is not None

    @contextlib.contextmanager
    def among(self, callbacks: list[Callback]) -> Iterator[None]:
        """Take part in a fit with other callbacks, in a block.

        However the block ends, detach from the model's functions; after half a replay, restore the state of the
        file, if it is of this fit.

        Parameters
        ----------
        callbacks : list of keras.callbacks.Callback
            All of the fit.
        """
        self._others = [callback for callback in callbacks if callback is not self]
        try:
            yield
            if self._replay:
                self._replay.finish()
        except BaseException as error:
            if self.replaying:
                self._replay.refuse() if isinstance(error, OtherFit) else self._replay.go_on()
            raise
        finally:
            functions, self._functions, replay, self._replay = self._functions, [], self._replay, None
            for function in functions:
                function.dispatched.end_replay()
            if replay:
                notices.running -= 1
                replay.close()

    def on_train_begin(self, logs: Any = None) -> None:
        divided = divided_model_of(self.model)
        functions = divided.functions if divided else {}
        if 'train' not in functions:
            raise self._not_ours()
        train = functions['train']
        if train.step.sharded:
            raise MgpuError('Checkpoint needs the whole data in every process: with mgpu.data=sharded, processes may '
                            'have finished different numbers of batches')
        self._record, self._in_batch = FitRecord(self.params, self.model, self._others), False
        self._replay = train.step.replay(self.path, self._record, self.every, self.allow_nan)
        notices.running += 1  # until the fit ends: a validation may take long
        self._functions = [functions[kind] for kind in ('train', 'test') if kind in functions]
        for function in self._functions:
            function.dispatched.begin_replay(functools.partial(self.replay_or_compute, function))
        if self.ledger:
            train.dispatched.hooks.record(train.open_account(ledger_at(self.ledger, self.every, train.step.ranks)))

    def _not_ours(self):
        launch = 'launch -n %d ' % mpi_environment.size() * mpi_environment.is_rank()
        return MgpuError('Checkpoint is for a model that runs over contexts, even if over one: of multi_gpu_model, or '
                         'any after enable(). %s is left to plain Keras, or has a train function of your own. Start '
                         'the script by "theano-mgpu %srun SCRIPT", which calls enable()' % (self.model.name, launch))

    def replay_or_compute(self, function: Any, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
        """Return the Computed of a call of the train or test function: replay it, or go on to the next step.

        The first call of the train function in a batch is Keras's; any other comes from a callback.
        """
        if function is not self._functions[0]:
            return Computed(self._replay.saved.results(self._record, 'val_')) if self.replaying else proceed(inputs)
        if not self._in_batch:
            return proceed(inputs)
        self._in_batch = False
        return self._replay.call(0, inputs, proceed, sampled_checksum, function.dispatched.hooks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if 'initial_epoch' not in self._record.fit:
            self._record.fit['initial_epoch'] = epoch
            self._compare()
            if self.replaying:
                rank_process.note(self._replay.saved.progress(self._replay.path))

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._in_batch = True

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._in_batch:  # the batch did not come by `replay_or_compute`
            raise self._not_ours()
        self._stop_again()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record.end_epoch()
        self._compare()
        if self.replaying:
            logs.update(self._replay.saved.logs_of(len(self._record.epochs) - 1, 0))
            self._stop_again()
        self._record.add_logs(0, logs)

    def on_train_end(self, logs: Any = None) -> None:
        if self.replaying:
            self._replay.go_on()
        else:
            self._record.end()
            self._replay.save()

    def _stop_again(self):
        """End a fit that is replayed where it was stopped."""
        saved = self._replay.saved
        if saved and saved.stopped and saved.completed == self._record.completed:
            self.model.stop_training = True

    def _compare(self):
        """Check that a fit that is replayed has the arguments and epochs of this one."""
        if self.replaying:
            self._record.check(self._replay.path, self._replay.saved)

    def end_epoch_of(self, callback: Callback, position: int, epoch: int, logs: dict[str, Any]) -> None:
        """End an epoch for another callback: record its part of the logs or, in a replay, put it there again.

        Parameters
        ----------
        callback : keras.callbacks.Callback
        position : int
            Counts the other callbacks from 1.
        epoch : int
        logs : dict of str to float
            It is changed.
        """
        if self.replaying:
            added = self._replay.saved.logs_of(len(self._record.epochs) - 1, position)
            logs.update(added)
        else:
            before = dict(logs)
            callback.on_epoch_end(epoch, logs)
            added = {name: value for name, value in logs.items() if name not in before or before[name] is not value}
        self._record.add_logs(position, added)
