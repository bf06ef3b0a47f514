"""`theano_mgpu.keras.Checkpoint`: a crash or kill costs a training a few batches only."""
from __future__ import annotations

import contextlib
import functools
import os
import uuid
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

from keras.callbacks import Callback

from ...auto.parallel_state import parallel_state_of
from ...checks.ledger import ledger_at
from ...comm.collectives import broadcast_object
from ...errors import MgpuError, named, warn
from ...runtime.state.random_states import random_states, set_random_states
from ...runtime.steps import Computed
from .fit_record import FitRecord, restore_states, states_of


@dataclass
class Run:
    """The fits of this process that had a Checkpoint with the same path."""

    id: str | None = None  # identifies the run of the script; this process may be a restart of it
    finished: int = 0
    process: int = field(default_factory=os.getpid)


_runs: dict[str, Run] = {}  # by absolute path


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
        if every < 1:
            raise ValueError('every=%r: give the number of batches between checkpoints, 1 or more' % (every,))
        self.path, self.every, self.allow_nan = path and os.path.abspath(path), every, allow_nan
        self.ledger = ledger and os.path.abspath(ledger)
        self._others: list[Callback] = []  # the fit's other callbacks
        self._functions: list[Any] = []  # only during a fit: compile() of the model makes new ones
        self._file: Any = None
        self._saved: Any = None  # the FitRecord of the file, while it is replayed

    @property
    def replaying(self) -> bool:
        """True while batches are replayed, not computed."""
        return self._saved is not None

    @property
    def _step(self):
        return self._functions[0].step

    @contextlib.contextmanager
    def among(self, callbacks: list[Callback]) -> Iterator[None]:
        """Take part in a fit with other callbacks, in a block.

        However the block ends, detach from the model's functions; after half a replay, restore the file's state.

        Parameters
        ----------
        callbacks : list of keras.callbacks.Callback
            All of the fit.
        """
        self._others = [callback for callback in callbacks if callback is not self]
        try:
            yield
        finally:
            try:
                if self.replaying:
                    self._restore()
            finally:
                functions, self._functions, self._file = self._functions, [], None
                for function in functions:
                    function.end_fit()
        if functions:
            self._run.finished += 1

    def on_train_begin(self, logs: Any = None) -> None:
        state = parallel_state_of(self.model)
        functions = state.functions if state else {}
        if 'train' not in functions:
            raise self._not_ours()
        self._functions = [functions[kind] for kind in ('train', 'test') if kind in functions]
        ranks = self._step.ranks
        if self._step.sharded:
            raise MgpuError('Checkpoint needs the whole data in every process: with mgpu.data=sharded, processes may '
                            'have finished different numbers of batches')
        self._run = _runs.setdefault(self.path, Run())
        if self._run.process != os.getpid():
            raise MgpuError('%s belongs to the process %d, of which this one is a fork: name another file'
                            % (self.path, self._run.process))
        self._file = self._step.checkpoint_file(file_of_fit(self.path, self._run.finished + 1), self.allow_nan)
        self._done, self._in_batch = FitRecord(self.params), False
        if self._file.exists:
            self._read()
        if self._run.id is None:
            self._run.id = broadcast_object(ranks, uuid.uuid4().hex)
        self._done.run = self._run.id
        account = self.ledger and self._functions[0].open_account(ledger_at(self.ledger, self.every, ranks))
        for function in self._functions:
            function.begin_fit(functools.partial(self.replay_or_compute, function),
                               account if function is self._functions[0] else None)

    def _not_ours(self):
        return MgpuError('Checkpoint is for a model that runs over contexts, even if over one: one of '
                         'multi_gpu_model, or any after enable(), as in theano-mgpu run. %s is left to plain Keras, '
                         'or has a train function of your own, %s'
                         % (self.model.name, named(getattr(self.model, 'train_function', None))))

    def replay_or_compute(self, function: Any, inputs: list[Any], proceed: Callable[..., Computed]) -> Computed:
        """Return the Computed of a call of the train or test function: replay it, or go on to the next step.

        The first call of the train function in a batch is Keras's; any other comes from a callback.
        """
        if function is not self._functions[0]:
            return Computed(self._logged('val_'), 0) if self.replaying else proceed(inputs)
        if not self._in_batch:
            return proceed(inputs)
        self._in_batch = False
        self._done.add_inputs(inputs)
        if self.replaying:
            function.note_replayed()
        computed = Computed(self._replayed(), 0) if self.replaying else proceed(inputs)
        self._done.batches.append(computed.outputs)
        return computed._replace(outputs=list(computed.outputs))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if 'initial_epoch' not in self._done.fit:
            self._done.fit['initial_epoch'] = epoch
            if self.replaying:
                self._compare()

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._in_batch = True

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        done, saved = self._done, self._saved
        if self._in_batch:  # the batch did not come by `replay_or_compute`
            raise self._not_ours()
        if not self.replaying:
            if done.n_batches % self.every == 0:
                self._save()
        elif done.n_batches == saved.n_batches:
            if saved.batches:
                self._continue()
            elif saved.stopped:
                self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        done, saved = self._done, self._saved
        done.end_epoch()
        if self.replaying:
            if saved.lengths[:len(done.lengths)] != done.lengths:
                self._refuse('holds epochs of %s batches, but those of this fit have %s'
                             % (saved.lengths, done.lengths))
            logs.update(saved.logs_of(len(done.epochs) - 1, 0))
            if saved.stopped and done.n_batches == saved.n_batches:
                self.model.stop_training = True
        done.add_logs(0, logs)

    def on_train_end(self, logs: Any = None) -> None:
        if self.replaying:
            self._continue()
        else:
            self._done.end = random_states()
            self._save()

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
            added = self._saved.logs_of(len(self._done.epochs) - 1, position)
            logs.update(added)
        else:
            before = dict(logs)
            callback.on_epoch_end(epoch, logs)
            added = {name: value for name, value in logs.items() if name not in before or before[name] is not value}
        self._done.add_logs(position, added)

    def _read(self):
        saved = self._file.read(self._check)
        record = FitRecord.from_arrays(saved.extra)
        if not self._run.finished:
            self._run.id = record.run
        elif self._run.id != record.run:
            warn('%s is not of the run that %s is of: this fit begins anew, and replaces the file'
                 % (self._file.path, self.path))
            return
        self._saved, self._state, self._before = record, saved, self._done.begin
        self._compare()
        self._done.begin = record.begin
        set_random_states(record.begin)  # the order of samples follows from these

    def _check(self, saved):
        if 'fit' not in saved.extra:
            raise ValueError('%s was not written by theano_mgpu.keras.Checkpoint; name another file' % saved.path)
        record = FitRecord.from_arrays(saved.extra)
        if not self._run.finished or self._run.id == record.run:
            self._file.check(saved)

    def _save(self):
        self._done.stopped = self.model.stop_training
        self._file.save({**self._done.to_arrays(), **states_of(self._others)})

    def _compare(self):
        ours, theirs = self._done.fit, self._saved.fit
        if any(theirs.get(name) != value for name, value in ours.items()):
            self._refuse('was written by a fit with %s, but this one has %s'
                         % (self._saved.arguments(), self._done.arguments()))

    def _refuse(self, text):
        self._saved = self._state = None
        set_random_states(self._before)
        raise ValueError('%s %s. Pass the same arguments and data to continue from it; to train from the beginning, '
                         'remove the file or name another one' % (self._file.path, text))

    def _replayed(self):
        """Return the results of the replayed batch: its own or, if its epoch is finished, the epoch's."""
        done, saved = self._done, self._saved
        has_arrays = self.params.get('batch_size') is not None  # else a generator gives the data
        if has_arrays and not done.n_batches and done.first_batch != saved.first_batch:
            self._refuse('was written by a fit whose first batch has the checksum %d, but that of this one has %d'
                         % (saved.first_batch, done.first_batch))
        return self._logged('') if len(done.epochs) < len(saved.epochs) else saved.batches[len(done.batches)]

    def _logged(self, prefix):
        logs = self._saved.logs_of(len(self._done.epochs), 0)
        return [logs.get(prefix + name, float('nan')) for name in self.model.metrics_names]

    def _continue(self):
        """Give the model the state of the file, now that the replay is complete."""
        if self._done.all_batches != self._saved.all_batches:
            warn('%s was written after other batches than those that were replayed now, which differ in order or data: '
                 'the training continues from its state, but the result is not that of an uninterrupted one. Do not '
                 'draw random numbers in callbacks, which are not called in a replay, or without a seed'
                 % self._file.path)
        self._restore()

    def _restore(self):
        saved, values = self._saved, self._state
        self._saved = self._state = None
        values.give(self._step.variables())
        restore_states(self._others, values.extra)
        self.model.stop_training = saved.stopped
        if saved.end:
            set_random_states(saved.end)


def file_of_fit(path: str, number: int) -> str:
    """Return the file of a fit, counted from 1, among the fits with this path.

    >>> file_of_fit('a/run.npz', 1), file_of_fit('a/run.npz', 2)
    ('a/run.npz', 'a/run-fit2.npz')
    """
    root, extension = os.path.splitext(path)
    return path if number == 1 else '%s-fit%d%s' % (root, number, extension)
