"""`theano_mgpu.keras.Checkpoint`: a training that a crash, or a kill, sets back by a few batches only."""
import os
import uuid

import keras

from ..checkpoints import training_state
from ..checkpoints.lock import lock_checkpoint
from ..errors import MgpuError, warn
from .callback_states import restore_states, states_of
from .fit_record import FitRecord, random_states, set_random_states
from .functions import BatchFunction


class Run:
    """The fits of this process that had a Checkpoint of the same path."""

    def __init__(self):
        self.id = None      # of the run of the script, of which this process may be a restart
        self.finished = 0


_runs = {}  # by absolute path


class Checkpoint(keras.callbacks.Callback):
    """Save the whole training state every so many batches; when `fit` begins, go on from what was saved.

    Run the same script again after a crash (``theano-mgpu launch --restarts`` does): `fit` and `fit_generator` of a
    parallel model then pass over the batches that are done, in the same order of samples, with the history that
    they had, and compute from the next one on. What is saved are weights, the states of the optimizer, the metrics
    and the random streams, and that history.

    Parameters
    ----------
    path : str
        An .npz file, always a whole one. Each checkpoint replaces the one before, which stays as
        ``path + '.previous'`` and is taken where the file turns out to be damaged. A second fit of the same process
        with this path has a file of its own, ``run-fit2.npz`` for ``run.npz``, and so on; a fit that ends with an
        error, or is interrupted, leaves its file to the next one.
    every : int
        Training batches between checkpoints, at least 1: what a crash can lose.
    allow_nan : bool
        Write a state that is infinite or not a number, too. Otherwise a warning names what is, and the file stays as
        it is.

    Raises
    ------
    ValueError
        If `every` is less than 1. In `fit`, if the file is damaged, and so is the one before it; if it is of another
        model, or of a fit with other epochs, steps, samples, batches or data. Where a generator gives the data, other
        batches than before are only warned of, since it may draw them at random.

    Notes
    -----
    Other callbacks are not called for what is passed over, so that files which they wrote stay as they are; but a
    CSVLogger that begins its file anew is. What they put into `logs` is remembered, and so are the states of
    EarlyStopping, ReduceLROnPlateau and ModelCheckpoint; a callback of your own has seen only what came after the
    restart. Remove the file to train from the beginning.
    """

    def __init__(self, path, every=100, allow_nan=False):
        super().__init__()
        if every < 1:
            raise ValueError('every=%r: give the number of batches between checkpoints, 1 or more' % (every,))
        self.path, self.every, self.allow_nan = path, every, allow_nan
        self.others = []    # the other callbacks of the fit
        self._functions = []  # only during a fit, so that they do not outlive a model's next compile()
        self._lock = None
        self._saved = None  # the FitRecord of the file, while what is in it is passed over

    @property
    def replaying(self):
        """Whether what comes next is done already."""
        return self._saved is not None

    @property
    def _step(self):
        """The TrainingFunction of the fit."""
        return self._functions[0].function

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Leave the model's functions, however `fit` ended, with the state of the file at least."""
        trained = bool(self._functions)
        try:
            if self.replaying:
                self._restore()
        finally:
            for function in self._functions:
                function.checkpoint = None
            self._functions, self._lock = [], None
        if trained and kind is None:
            self._run.finished += 1

    def on_train_begin(self, logs=None):
        train = self.model.train_function
        if not isinstance(train, BatchFunction):
            raise MgpuError('Checkpoint is for a model that runs over contexts, if only one: of multi_gpu_model, or '
                            'after enable(), which theano-mgpu run does for a script. %s is left to plain Keras'
                            % self.model.name)
        self._functions = [f for f in (train, self.model.test_function) if f is not None]
        ranks = self._step.ranks
        if self._step.sharded:
            raise MgpuError('Checkpoint needs every process to be given the whole data: with mgpu.data=sharded the '
                            'processes have done different numbers of batches')
        self._run = _runs.setdefault(os.path.abspath(self.path), Run())
        self._file = file_of_fit(self.path, self._run.finished + 1)
        self._done, self._in_batch = FitRecord(self.params), False
        if ranks.by_first(self._keep_file):
            self._read()
        if self._run.id is None:
            self._run.id = ranks.broadcast_object(uuid.uuid4().hex)
        self._done.run = self._run.id
        for function in self._functions:
            function.checkpoint = self

    def replay_or_compute(self, function, inputs, compute):
        """Results of a call of the train or the test function: remembered ones, or computed ones.

        Of the train function, the first call in each batch is Keras's; others are a callback's own.
        """
        if function is not self._functions[0]:
            return self._logged('val_') if self.replaying else compute()
        if not self._in_batch:
            return compute()
        self._in_batch = False
        self._done.add_inputs(inputs)
        results = self._replayed() if self.replaying else compute()
        self._done.batches.append(results)
        return list(results)

    def on_epoch_begin(self, epoch, logs=None):
        if 'initial_epoch' not in self._done.fit:
            self._done.fit['initial_epoch'] = epoch
            if self.replaying:
                self._compare()

    def on_batch_begin(self, batch, logs=None):
        self._in_batch = True

    def on_batch_end(self, batch, logs=None):
        done, saved = self._done, self._saved
        if not self.replaying:
            if done.n_batches % self.every == 0:
                self._save()
        elif saved.batches and done.n_batches == saved.n_batches:
            self._go_on()
        elif saved.stopped and done.n_batches == saved.n_batches:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        done, saved = self._done, self._saved
        done.end_epoch({})
        if self.replaying:
            if saved.lengths[:len(done.lengths)] != done.lengths:
                self._refuse('holds epochs of %s batches, but those of this fit have %s'
                             % (saved.lengths, done.lengths))
            logs.update(self.logs_after(0))
            if done.n_batches == saved.n_batches and saved.stopped:
                self.model.stop_training = True
        done.add_logs(0, logs)

    def on_train_end(self, logs=None):
        if self.replaying:
            self._go_on()
        else:
            self._done.end = random_states()
            self._save()

    def logs_after(self, position):
        """What a callback had put into the logs of the epoch that is passed over."""
        return self._saved.logs_of(len(self._done.epochs) - 1, position)

    def note_logs(self, position, logs):
        self._done.add_logs(position, logs)

    def _keep_file(self):
        """Keep the file to this process; whether it exists."""
        self._lock = lock_checkpoint(self._file)
        return os.path.exists(self._file)

    def _read(self):
        saved = training_state.Saved(self._file, self._step.ranks, len(self._step.contexts))
        if 'fit' not in saved.extra:
            raise ValueError('%s was not written by theano_mgpu.keras.Checkpoint; name another file' % self._file)
        record = FitRecord.from_arrays(saved.extra)
        if not self._run.finished:
            self._run.id = record.run
        elif self._run.id != record.run:
            warn('%s is not of the run that %s is of: this fit begins anew, and replaces it' % (self._file, self.path))
            return
        saved.check(self._step.variables())
        self._saved, self._state, self._before = record, saved, self._done.begin
        self._compare()
        self._done.begin = record.begin
        set_random_states(record.begin)  # the orders of samples follow from these

    def _save(self):
        self._done.stopped = self.model.stop_training
        arrays = dict(self._done.to_arrays(), **states_of(self.others))
        self._step.save_with(self._file, arrays, self.allow_nan)

    def _compare(self):
        ours, theirs = self._done.fit, self._saved.fit
        if any(theirs.get(name) != value for name, value in ours.items()):
            self._refuse('was written by a fit with %s, but this one has %s'
                         % (self._saved.arguments(), self._done.arguments()))

    def _refuse(self, text):
        """An error about the file; nothing is changed."""
        self._saved = self._state = None
        set_random_states(self._before)
        raise ValueError('%s %s. Give the same arguments and data to go on from it; to train from the beginning, '
                         'remove the file or name another one' % (self._file, text))

    def _replayed(self):
        """Results of the batch that is passed over: its own, or where its epoch is finished, those of the epoch."""
        done, saved = self._done, self._saved
        given = self.params.get('samples') is not None  # else a generator gives the data
        if given and not done.n_batches and done.first_batch != saved.first_batch:
            self._refuse('was written by a fit whose first batch has the checksum %d, but that of this one has %d'
                         % (saved.first_batch, done.first_batch))
        return self._logged('') if len(done.epochs) < len(saved.epochs) else saved.batches[len(done.batches)]

    def _logged(self, prefix):
        """The loss and metrics at the end of the epoch that is passed over."""
        logs = self._saved.logs_of(len(self._done.epochs), 0)
        return [logs.get(prefix + name, float('nan')) for name in self.model.metrics_names]

    def _go_on(self):
        """All is passed over: give the model the state that it had then."""
        if self._done.all_batches != self._saved.all_batches:
            warn('%s was written after other batches than those that were passed over now, in another order or of '
                 'other data: the training goes on from its state, but not as if it had not been interrupted. Draw '
                 'random numbers neither in callbacks, which are not called meanwhile, nor without a seed' % self._file)
        self._restore()

    def _restore(self):
        saved, values = self._saved, self._state
        self._saved = self._state = None
        values.give(self._step.variables(), self._step.contexts)
        restore_states(self.others, values.extra)
        self.model.stop_training = saved.stopped
        if saved.end:
            set_random_states(saved.end)


def file_of_fit(path, number):
    """The file of a fit, counted from 1, among those with this path.

    Examples
    --------
    >>> file_of_fit('a/run.npz', 1), file_of_fit('a/run.npz', 2)
    ('a/run.npz', 'a/run-fit2.npz')
    """
    root, extension = os.path.splitext(path)
    return path if number == 1 else '%s-fit%d%s' % (root, number, extension)
