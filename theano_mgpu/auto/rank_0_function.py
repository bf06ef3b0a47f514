"""Plain Theano's calls in several processes: the variables stay alike, and so do results that may differ each time."""
from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

from theano.compile.sharedvalue import SharedVariable

from ..checks.ranks import Changes
from ..comm.alone import is_alone
from ..comm.communicator import Communicator
from ..comm.mpi import choose_ranks
from ..comm.rank_0 import done_by_rank_0
from ..devices.transfers import fetch
from ..graph import theano_functions
from ..graph.repeatable import draws
from ..options import Flags
from ..runtime.replicas.replicated import replicated


class RankZeroFunction:
    """A callable in place of the `plain_call` of a `theano.function`: each rank computes what one process would.

    First all take the values of shared variables that rank 0 has changed alone. If the function `draws`, all get the
    results of rank 0: the outputs, and the new values of shared variables and of inputs with an update. The other ranks
    call it, too, for what its ops change in the process. A call that one rank makes alone, or in a thread other than
    the main one, is one of this process.
    """

    def __init__(self, function: Any, name: str, ranks: Communicator, draws: bool) -> None:
        self._function, self._name, self._ranks, self._draws = function, name, ranks, draws
        self._updated = [container for spec, container in zip(function.maker.expanded_inputs, function.input_storage)
                         if spec.update is not None]
        shared = [spec.variable for spec in function.maker.expanded_inputs if isinstance(spec.variable, SharedVariable)]
        self._changes = Changes(ranks, list(map(replicated, shared)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(type(self._function).plain_call, self._function, *args, **kwargs)
        is_first = self._ranks.rank == 0
        if not self.take_changes() or not self._draws:
            return call()
        self._ranks.consolidate()
        results, new = done_by_rank_0(self._ranks, 'call ' + self._name, lambda: (
            call(), [fetch(each.storage[0]) for each in self._updated] if is_first else None))
        if not is_first and new is not None:
            with contextlib.suppress(Exception):  # the values of rank 0 count, see below
                call()  # for what ops change, such as the state of NumPy's random numbers: it stays as on rank 0
            for container, value in zip(self._updated, new):
                container.value = value
        return results

    def take_changes(self) -> bool:
        """Take the values of variables that rank 0 has changed alone; return whether all ranks make this call."""
        if is_alone() or threading.current_thread() is not threading.main_thread():
            return False
        self._changes.take()
        return True

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function in the same way."""
        function.plain_call = RankZeroFunction(function, function.mgpu_name, self._ranks, self._draws)


def keep_alike(function: Any, name: str) -> Any:
    """Have plain Theano's calls of a new function do the same on all ranks; return the function."""
    ranks = choose_ranks(None)
    if ranks.size > 1 and not Flags.now().is_sharded(ranks.size):
        function.plain_call = RankZeroFunction(function, name, ranks, draws(theano_functions.graph_of(function)))
    return function
