"""`mgpu.Checkpoint`: a crash or kill costs a loop over Theano functions a few calls only."""
from __future__ import annotations

import functools
import os
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..checks import settings
from ..comm.mpi import choose_ranks
from ..comm.rank_0 import on_rank_0
from ..errors import MgpuError, named
from ..options import Flags, Options
from ..runtime.divided_function import DividedFunction
from ..runtime.replicas.replicated import replicated
from ..runtime.state.recorded_calls import RecordedCalls
from ..runtime.state.replay import Replay, check_every
from ..utils import rank_process
from ..utils.values import sampled_checksum
from .function_hooks import hooks_of, source_of

FILE = 'checkpoint.npz'


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
        If another job writes its checkpoints there, or this process is a fork of the one that does; or if each process
        has samples of its own.
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
        check_every(every, 'calls')
        all_functions: list[Any] = list(functions) if isinstance(functions, Iterable) else [functions]
        ranks, hooks = choose_ranks(None), list(map(hooks_of, all_functions))
        _check(all_functions, ranks.size)
        sources = list(map(source_of, all_functions))
        variables = list(dict.fromkeys(replicated(variable) for source in sources for variable in source.updates))
        folder = os.path.abspath(folder)
        on_rank_0(ranks, functools.partial(os.makedirs, folder, exist_ok=True))
        self._replay = Replay(
            os.path.join(folder, FILE), RecordedCalls(len(hooks)), variables, ranks,
            {**settings.of_function(Options()), **settings.of_graphs(sources)}, every, allow_nan, resume)
        for number, (function, each, source) in enumerate(zip(all_functions, hooks, sources)):
            if not isinstance(function, DividedFunction):
                function.mgpu_divided.always = True  # over the contexts, if it can, whatever is faster
            call = functools.partial(self._replay.call, number, checksum=functools.partial(_checksum, number),
                                     hooks=each, completes=bool(source.updates))
            each.surround([call])  # a Checkpoint from before records no more
        if self.replaying:
            rank_process.note('%s: continues after the calls that it has; remove it to begin anew' % self._replay.path)
        self._replay.finish()

    @property
    def replaying(self) -> bool:
        return self._replay.saved is not None

    @property
    def completed(self) -> int:
        return self._replay.record.completed


def _checksum(number, call):
    args, kwargs = call
    if kwargs.get('output_subset') is not None:
        raise ValueError('a Checkpoint records all outputs of a call: leave out output_subset')
    return sampled_checksum([number, list(map(np.asarray, args)), {key: np.asarray(kwargs[key]) for key in kwargs}])


def _check(functions, n_ranks):
    if Flags.now().is_sharded(n_ranks) or any(getattr(function, 'sharded', False) for function in functions):
        raise MgpuError('Checkpoint needs the whole data in every process: with mgpu.data=sharded, processes may have '
                        'finished different numbers of calls')
    for function in functions:
        for spec in [] if isinstance(function, DividedFunction) else function.maker.inputs:
            if not spec.shared and spec.update is not None:
                raise ValueError('the input %s of a function has an update, which a Checkpoint does not hold: use a '
                                 'shared variable for it' % named(spec.variable))
