"""The replay of a run that has ended early: calls that a file has return their results again, and the next computes."""
from __future__ import annotations

import os
import threading
import uuid
import zlib
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ...checks.settings import check_same
from ...comm.collectives import broadcast_object
from ...comm.communicator import Communicator
from ...comm.notice import end, notices
from ...comm.rank_0 import on_rank_0
from ...errors import MgpuError, named, warn
from ...utils.mpi_environment import CHECKPOINT
from ...utils.owned import FileLock, lock_file
from ...utils.rank_process import report, wait_until_needed
from ..call_hooks import CallHooks, Computed
from ..replicas.replicated import Replicated
from . import training_state
from .random_states import generators, random_states, set_random_states
from .state_file import parsing, under


class Run:
    """The replays of a process with the same path: each has a file of its own.

    All files have the `id`, from the first save on: this process may be a restart of the run.
    """

    def __init__(self) -> None:
        self.id, self.finished, self.process = '', 0, os.getpid()


_runs: dict[str, Run] = {}  # by the absolute path of the first file
# The arrays that tell the kinds of files: the first of them counts. The last one was in files of two kinds.
MARKS = 'forms', 'fit', 'calls'


class Record:
    """The number of completed calls, for a file with the variables. Subclasses have the results of calls, too.

    The record of a run, `done`, grows call by call; the record of a file has the results to add. A call has a key, a
    number that tells its arguments and all calls before it apart from others.
    """

    NAME, MARK = '-%d', MARKS[-1]  # what the second file of a run has in its name; an array of each file
    FOREIGN = 'does not say how many steps it comes after; give a file that step.checkpoint wrote, or load this one ' \
        'with step.load'
    moments: Sequence[str] = ()  # 'begin', 'now': a file has the states of random generators at these moments

    def __init__(self, completed: int = 0) -> None:
        self.completed, self.key = completed, 0  # the calls that a checkpoint may follow; the key of the last call

    def add(self, number: int, key: int, results: Any) -> None:
        """Add a call of a function, with its results."""

    def add_failure(self, number: int, key: int, error: Exception) -> None:
        """Add a call of a function that has raised an error."""

    def next(self, path: str, done: Any, number: int, key: int) -> Any:
        """Return the results, or the error, of the first call that is not done; a ValueError if it is another call."""

    def is_replayed(self, done: Any) -> bool:
        """Return whether all calls of this record of a file are done."""
        return True

    def go_on(self, path: str, saved: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the state that a file has beside its variables."""
        self.completed = max(self.completed, saved.completed)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the record as arrays, by name."""
        return {'calls': np.array(self.completed)}

    def of_file(self, path: str, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the record of a file; raise a Damaged if it cannot be read, a ValueError if it is of another run."""
        return Record(int(arrays['calls']))


def check_every(every: int, calls: str) -> None:
    """Raise a ValueError if checkpoints are not at least one call apart."""
    if every < 1:
        raise ValueError('every=%r: give the number of %s between checkpoints, 1 or more' % (every, calls))


class Replay:
    """A file with the state of a run and a record of its calls, and the way from the beginning of the run to there.

    The file is this process's, wherever its current folder is later. Every rank has to make each call. A spare process
    waits here until it is needed. A fork has the object, but neither writes the file nor replays it.

    Parameters
    ----------
    path : str
        The file; if `finish` has ended others with this path, it has a number in its name.
    record : Record
        Of this run: it is empty.
    variables : list of Replicated
    ranks : Communicator
    settings : dict of str to str
        What the results depend on.
    every : int
        Completed calls between checkpoints.
    allow_nan : bool
        See `training_state.save`.
    resume : bool
        Whether to read the file, if it exists.

    Attributes
    ----------
    saved : Record or None
        The record of the file, while it is replayed.

    Raises
    ------
    ValueError
        If the file and the one before it are damaged, or the file is of another run.
    MgpuError
        If another job writes its checkpoints there, or this process is a fork of the one that does.
    """

    def __init__(self, path: str, record: Record, variables: Sequence[Replicated], ranks: Communicator,
                 settings: dict[str, str], every: int, allow_nan: bool, resume: bool = True) -> None:
        wait_until_needed()
        path = os.path.abspath(path)
        self._run = _runs.setdefault(path, Run())
        if self._run.process != os.getpid():
            raise MgpuError('%s belongs to the process %d, of which this one is a fork: name another file'
                            % (path, self._run.process))
        root, extension = os.path.splitext(path)
        self._first, self._number = path, self._run.finished + 1
        self.path = os.path.realpath(path if self._number == 1 else root + record.NAME % self._number + extension)
        self.record, self._variables, self._ranks, self._settings = record, variables, ranks, settings
        self._every, self._allow_nan, self._turn = every, allow_nan, threading.RLock()  # calls have an order
        self._begin, self._is_foreign = random_states(), False
        self.saved: Any = None
        self._content: Any = None
        self._locks: list[FileLock] = []
        notices.watch()
        on_rank_0(ranks, lambda: self._locks.append(lock_file(self.path)))
        exists = on_rank_0(ranks, lambda: os.path.exists(self.path))
        report(CHECKPOINT)
        if exists and resume:
            self._read()

    def call(self, number: int, call: Any, proceed: Callable[..., Computed],
             checksum: Callable[..., int] = lambda call: 0, hooks: CallHooks | None = None,
             completes: bool = True) -> Computed:
        """Return the Computed of a call of a function: it has the results of the file, or the next hook computes.

        Parameters
        ----------
        number : int
            Of the function.
        call, proceed
            As for a hook.
        checksum : callable
            Of a call: its arguments as a number.
        hooks : CallHooks, optional
            Of the function: their account counts calls that are replayed, too.
        completes : bool
            Whether a checkpoint may follow.
        """
        if os.getpid() != self._run.process:
            if completes:
                self.save()  # which says that it is not written
            return proceed(call)
        notices.running += 1
        try:
            # In one line, because Ctrl-C may raise between two lines, before `with` can free the lock.
            with self._turn: return self._next(number, call, proceed, checksum(call), hooks, completes)  # noqa: E701
        finally:
            notices.running -= 1

    def _next(self, number, call, proceed, checksum, hooks, completes):
        record, saved = self.record, self.saved
        key = zlib.crc32(b'%d' % checksum, record.key)
        results = saved.next(self.path, record, number, key) if saved else None
        record.key = key
        try:
            if isinstance(results, Exception):
                raise results
            computed = Computed(results) if saved else proceed(call)
            record.add(number, key, computed.outputs)
            record.completed += completes
        except Exception as error:
            record.add_failure(number, key, error)
            raise
        finally:
            if saved and saved.is_replayed(record):
                self.go_on()
        if saved and hooks and hooks.account:
            hooks.account.steps += 1
        elif not saved and completes:
            ends = self._ranks.notice
            if ends or record.completed % self._every == 0:
                self.save()  # at the end of a call, from where random numbers are drawn again
            if ends:
                end(ends, '%s has all %d calls' % (self.path, record.completed))
        return computed

    def save(self) -> None:
        """Write the state and the record, but not in a fork: a warning says so, once."""
        if os.getpid() != self._run.process:
            if not self._is_foreign:
                warn('%s is the file of process %d, of which this one is a fork: no state of it is written. Name '
                     'another file here to keep it' % (self.path, self._run.process))
            self._is_foreign = True
            return
        if self._number == 1 and not self._run.id:
            self._run.id = broadcast_object(self._ranks, uuid.uuid4().hex)
        arrays = {**self.record.to_arrays(), 'run': np.array(self._run.id)}
        states = {'begin': self._begin, 'now': random_states()}
        arrays.update(('%s/%s' % (moment, name), state)
                      for moment in self.record.moments for name, state in states[moment].items())
        training_state.save(self.path, self._variables, self._ranks, arrays, self._allow_nan, self._settings)

    def go_on(self) -> None:
        """Give the variables the values of the file, and end the replay: the next call computes."""
        content, saved = self._content, self.saved
        self._leave()
        content.give(self._variables)
        self.record.go_on(self.path, saved, content.extra)
        set_random_states(_states_now(content.extra))

    def refuse(self) -> None:
        """End a replay as if there were no file."""
        self._leave()
        set_random_states(self._before)

    def close(self) -> None:
        """End the process if it has got a signal to end; later ones end it at once, if no other replay is there."""
        notices.leave()

    def finish(self) -> None:
        """Leave other files to the replays of this path that this process makes from now on."""
        self._run.finished += 1

    def _read(self):
        content = training_state.read(self.path, self._ranks, self._check)
        if not self._continues(content):
            warn('%s is not of the run that %s is of: the training begins anew here, and replaces the file'
                 % (self.path, self._first))
            return
        arrays = content.extra
        self._run.id = str(arrays.get('run', '')) or self._run.id
        self._content, self.saved = content, self.record.of_file(self.path, arrays)
        self._before, self._begin = self._begin, under('begin/', arrays)
        set_random_states(self._begin)  # from which the script draws again
        for variable in self._variables:
            variable.ask(self._warn_of_read)
        if self.saved.is_replayed(self.record):
            self.go_on()

    def _continues(self, content):
        """Return whether a file is of this run; an earlier version may not have noted the run."""
        return self._number == 1 or content.extra.get('run', '') in ('', self._run.id)

    def _check(self, content):
        record, arrays = self.record, content.extra
        if next((mark for mark in MARKS if mark in arrays), None) != record.MARK:
            raise ValueError('%s %s' % (content.path, record.FOREIGN))
        with parsing('the states of random generators'):
            for states in filter(None, [under('begin/', arrays), _states_now(arrays)]):
                generators(states)
        if self._continues(content):
            content.check(self._variables)
            check_same(content.path, content.settings, self._settings, strict=True)
            record.of_file(content.path, arrays)

    def _leave(self):
        self.saved = self._content = None
        for variable in self._variables:
            variable.ask(None)

    def _warn_of_read(self, variable):
        if self.record.completed:
            for each in self._variables:
                each.ask(None)
            warn('%s is read while finished calls are replayed (%s): it has an old value until the replay is over. '
                 'Skip what reads it while checkpoint.replaying is True' % (named(variable), self.path))


def _states_now(arrays):
    """Return the states of random generators at the end of a file, if any; earlier versions called it another name."""
    return under('now/', arrays) or under('end/', arrays)


def keys_of(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the keys of a file; earlier versions wrote a checksum of the first call, and the key of the last one."""
    if 'keys' in arrays:
        return arrays['keys']
    first, last = arrays['checksums'].tolist()
    return np.array([zlib.crc32(b'%d' % first), last])
