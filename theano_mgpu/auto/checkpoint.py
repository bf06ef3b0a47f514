"""`mgpu.Checkpoint`: a crash or kill costs a loop over Theano functions a few calls only."""
from __future__ import annotations

import functools
import os
import threading
import zlib
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..comm.mpi import choose_ranks
from ..comm.rank_0 import on_rank_0
from ..errors import MgpuError, named, warn
from ..options import Flags, Options
from ..runtime.divided_function import DividedFunction
from ..runtime.replicas.replicated import replicated
from ..runtime.state import training_state
from ..runtime.state.random_states import random_states, set_random_states
from ..runtime.state.recorded_calls import RecordedCalls
from ..runtime.state.state_file import under
from ..runtime.steps import Computed
from ..utils.values import sampled_checksum
from .surrounded_function import divide_always, source_of, steps_of

FILE = 'checkpoint.npz'

_made: dict[tuple[str, int], int] = {}  # Checkpoints, by folder and process: a fork has made none


class Checkpoint:
    """A folder with the state of a loop over Theano functions, from which the same script continues.

    Make it before the loop. After a crash or kill, run the same script again (``theano-mgpu launch --restarts`` does).
    Its loop then runs from the beginning, but each finished call returns the results that were recorded, at once,
    without computing. Then the variables get the values of the checkpoint, and the next call computes. So counters,
    patience and the best score are as before, and an uninterrupted run gives the same result to the bit.

    Parameters
    ----------
    folder : str
        It is made if need be, and holds one file, ``checkpoint.npz``. An interrupted write leaves the old file intact;
        the checkpoint before stays as ``checkpoint.npz.previous``, and is used if the file is damaged. A second
        Checkpoint of the same process with this folder has its own file, ``checkpoint-2.npz``, and so on.
    functions : list of callable
        The functions that the loop calls, of `theano.function`, `mgpu.function` or `mgpu.training_function`: those that
        train, and those whose results the loop depends on. The file has the variables that they update, the results of
        all their calls, and the states of NumPy's and Python's random generators.
    every : int
        Calls with updates between checkpoints, at least 1: the most that a crash can lose.
    allow_nan : bool
        Also write values that are infinite or not a number. Otherwise a warning names them, and the file is not
        written.
    resume : bool
        Whether to continue from the file, if it exists; else the training begins anew, and replaces it.

    Attributes
    ----------
    replaying : bool
        Whether finished calls are replayed, not computed. A script does not read or save weights meanwhile.
    completed : int
        The finished calls with updates, replayed ones included.

    Raises
    ------
    ValueError
        If `every` is less than 1, or an input of a function has an update. If the file is of other functions, or
        damaged, and so is the one before it. In a call, if the loop calls its functions in another order, or with other
        arguments, than the loop that wrote the file; the recorded call then stays the next one.
    MgpuError
        If another job writes its checkpoints there, or each process has samples of its own.
    TypeError
        If one of the functions is none of Theano's or of this package's.

    Warns
    -----
    MgpuWarning
        If the file was written with other settings that results depend on, or if graphs, shapes of data sets or shared
        numbers such as a rate have changed since; in a call of a fork of this process, which does not write the file.

    Notes
    -----
    Variables that the loop itself sets, such as a learning rate, are set again by the loop. What it draws by
    `numpy.random` and `random` is drawn again. A call that failed fails again, with an error of the same class if this
    is one of Python's or of this package's, else of its next base. Calls of several threads wait for each other. A
    variable that the functions update has an old value while calls are replayed: the first one that is read then is
    named by a warning. Functions that `enable` divides are divided from the first call on, without timing. With several
    processes, all make the same calls.

    Examples
    --------
    >>> import tempfile, theano
    >>> count = theano.shared(0.0)
    >>> step = theano.function([], count * 2, updates={count: count + 1}, mode='FAST_COMPILE')
    >>> folder = tempfile.mkdtemp()
    >>> checkpoint = Checkpoint(folder, [step], every=2)
    >>> [float(step()) for _ in range(3)], checkpoint.completed, os.path.exists(os.path.join(folder, 'checkpoint.npz'))
    ([0.0, 2.0, 4.0], 3, True)
    """

    def __init__(self, folder: str, functions: Sequence[Callable[..., Any]], every: int = 100, allow_nan: bool = False,
                 resume: bool = True) -> None:
        if every < 1:
            raise ValueError('every=%r: give the number of calls between checkpoints, 1 or more' % (every,))
        self._every, made = every, (os.path.abspath(folder), os.getpid())
        self._functions: list[Any] = list(functions) if isinstance(functions, Iterable) else [functions]
        self._ranks, before = choose_ranks(None), _made.get(made, 0)
        self._steps = list(map(steps_of, self._functions))
        _check(self._functions, self._ranks.size)
        sources = list(map(source_of, self._functions))
        self._updates = [bool(source.updates) for source in sources]
        self._variables = list(dict.fromkeys(replicated(variable) for source in sources for variable in source.updates))
        self._saved: Any = None  # the file, while it is replayed
        self._calls, self._begin = RecordedCalls(len(self._steps)), random_states('begin/')
        self._key, self._turn = 0, threading.RLock()  # the key of the last call; a lock, as calls have an order
        self.completed = 0
        on_rank_0(self._ranks, functools.partial(os.makedirs, made[0], exist_ok=True))
        path = os.path.join(made[0], FILE if not before else 'checkpoint-%d.npz' % (before + 1))
        self._file = training_state.CheckpointFile(path, self._variables, self._ranks, Options(), sources, allow_nan)
        if self._file.exists and resume:
            self._read()
        for number, (function, steps) in enumerate(zip(self._functions, self._steps)):
            divide_always(function)
            steps.surround([functools.partial(self._call, number)])  # a Checkpoint from before records no more
        _made[made] = before + 1

    @property
    def replaying(self) -> bool:
        return self._saved is not None

    def _read(self):
        self._saved = saved = self._file.read(self._check)
        self._calls = RecordedCalls.from_arrays(saved.extra)
        self._begin = {name: saved.extra[name] for name in self._begin}
        set_random_states(under('begin/', self._begin))
        for variable in self._variables:
            variable.ask(self._warn_of_read)

    def _check(self, saved):
        if 'forms' not in saved.extra:
            raise ValueError('%s was not written by mgpu.Checkpoint; name another folder' % saved.path)
        self._file.check(saved)
        RecordedCalls.from_arrays(saved.extra).check(saved.path, len(self._functions))

    def _call(self, number, call, proceed):
        """Return the Computed of a call, replayed or computed: a step, once the number of the function is bound."""
        if os.getpid() != self._file.process:
            if self._updates[number]:
                self._file.save({})  # which says that it is not written
            return proceed(call)
        # In one line, because Ctrl-C may raise between two lines, before `with` can free the lock.
        with self._turn: return self._next(number, call, proceed)  # noqa: E701

    def _next(self, number, call, proceed):
        args, kwargs = call
        if kwargs.get('output_subset') is not None:
            raise ValueError('a Checkpoint records all outputs of a call: leave out output_subset')
        crc = sampled_checksum([number, list(map(np.asarray, args)), {key: np.asarray(kwargs[key]) for key in kwargs}])
        key = zlib.crc32(b'%d' % crc, self._key)
        if self.replaying:
            return self._replayed(number, key)
        self._key = key
        try:
            computed = proceed(call)
            self._calls.add(number, key, computed.outputs)
        except Exception as error:
            self._calls.add_failure(number, key, error)
            raise
        if self._updates[number]:
            self.completed += 1
            if self.completed % self._every == 0:  # at the end of a call, from where random numbers are drawn again
                self._file.save({**self._calls.to_arrays(), **self._begin, **random_states('now/')})
        return computed

    def _replayed(self, number, key):
        outputs = self._calls.next(self._file.path, number, key)
        self._key = key
        is_error = isinstance(outputs, Exception)
        self.completed += self._updates[number] and not is_error
        if self._calls.is_replayed:
            self._continue()
        if is_error:
            raise outputs
        return Computed(outputs)

    def _continue(self):
        """Give the variables the values of the file, now that the replay is complete."""
        saved, self._saved = self._saved, None
        for variable in self._variables:
            variable.ask(None)
        saved.give(self._variables)
        set_random_states(under('now/', saved.extra))
        for number, steps in enumerate(self._steps):
            if steps.account is not None:
                steps.account.steps = self._calls.count(number)

    def _warn_of_read(self, variable):
        if self.completed:
            for each in self._variables:
                each.ask(None)
            warn('%s is read while finished calls are replayed (%s): it has an old value until the replay is over. '
                 'Skip what reads it while checkpoint.replaying is True' % (named(variable), self._file.path))


def _check(functions, n_ranks):
    if Flags.now().is_sharded(n_ranks) or any(getattr(function, 'sharded', False) for function in functions):
        raise MgpuError('Checkpoint needs the whole data in every process: with mgpu.data=sharded, processes may have '
                        'finished different numbers of calls')
    for function in functions:
        for spec in [] if isinstance(function, DividedFunction) else function.maker.inputs:
            if not spec.shared and spec.update is not None:
                raise ValueError('the input %s of a function has an update, which a Checkpoint does not hold: use a '
                                 'shared variable for it' % named(spec.variable))
