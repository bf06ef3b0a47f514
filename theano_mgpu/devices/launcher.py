"""A launcher: it runs tasks on contexts, and turns their failures into errors that name the replica, with advice."""
from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Sequence

from ..utils.executors import Executor, TaskError
from ..utils.timeline import HOST, Timings, note, on_track
from .context_map import Context
from .failures import error_of


class Shard(NamedTuple):
    """The part of a batch that a replica works on at a time."""

    replica: int
    span: tuple[int, int]  # its samples of this process: the first, and the one after the last
    number: int = 0        # among the shards of all ranks, where these are logical shards


class Launcher:
    """A launcher of tasks on contexts, by an executor; each run is timed by its name."""

    def __init__(self, executor: Executor, timings: Timings):
        self.executor, self._timings = executor, timings

    def run(self, name: str, tasks: Sequence[Callable[[], Any]], contexts: Sequence[Context],
            shards: Sequence[Shard] = (), numbers: Sequence[int | None] | None = None) -> list[Any]:
        """Run tasks, each on a context; the tasks of one context run one after the other.

        A task works on a shard, or on the one of a number; None is the update. Raise the first exception of a task,
        with a note of its replica, context and samples; it is a ReplicaError if a device failed.
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
        error = error_of(cause, shard.replica if shard else index, contexts[index], 'update',
                         list(dict.fromkeys(contexts)), shard.span if shard else None)
        try:
            raise error
        finally:
            del error, cause  # its traceback has this frame, which would keep it
