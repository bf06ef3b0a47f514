"""A launcher: it runs tasks on contexts, and turns their failures into errors that name the replica, with advice."""
from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Sequence

from ..utils.executors import Executor, TaskError
from ..utils.timeline import HOST, Timings, note, on_track
from .context_map import Context
from .failures import error_of


class Shard(NamedTuple):
    """The part of a batch that a replica works on at a time.

    Attributes
    ----------
    replica : int
    span : (int, int)
        Its samples, of those that this process has: the first, and the one after the last.
    number : int
        Its number among the shards of all ranks, where these are logical shards.
    """

    replica: int
    span: tuple[int, int]
    number: int = 0


class Launcher:
    """A launcher of tasks on contexts, by an executor.

    Parameters
    ----------
    executor : Executor
    timings : Timings
        It gets the time of each run, by its name.
    """

    def __init__(self, executor: Executor, timings: Timings):
        self.executor, self._timings = executor, timings

    def run(self, name: str, tasks: Sequence[Callable[[], Any]], contexts: Sequence[Context],
            shards: Sequence[Shard] = (), numbers: Sequence[int | None] | None = None) -> list[Any]:
        """Run tasks, timed and shown in the timeline under a name.

        Parameters
        ----------
        name : str
        tasks : list of callable
        contexts : list of Context
            The context of each task. Tasks of one context run one after the other.
        shards : list of Shard, optional
            The shard that each task works on;
        numbers : list of (int or None), optional
            or its number among the shards, None in the update.

        Raises
        ------
        Exception
            The first one of a task, with a note of its replica, context and samples; a ReplicaError if a device failed.
        """
        began = time.perf_counter()
        try:
            return self.executor.run(on_track(tasks, name, contexts), contexts)
        except TaskError as failed:
            index, cause = failed.index, failed.__cause__ or failed
        finally:
            note(self._timings.seconds, name, HOST, began)
        number = numbers[index] if numbers else index
        shard = shards[number] if shards and number is not None else None
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'update'
        error = error_of(cause, shard.replica if shard else index, contexts[index], where,
                         shard.span if shard else None, list(dict.fromkeys(contexts)))
        try:
            raise error
        finally:
            del error, cause  # its traceback has this frame, which would keep it
