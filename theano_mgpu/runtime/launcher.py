"""A launcher: it runs tasks on contexts, and turns their failures into errors that name the replica."""
from __future__ import annotations

from typing import Any, Callable, Sequence

from ..devices.context_map import Context
from ..executors import Executor, TaskError, make_executor
from ..graphs.audit import audit
from ..profiling.timeline import on_track
from .advice import error_of
from .batch import Shard


class Launcher:
    """Runs tasks on contexts by an executor.

    Parameters
    ----------
    executor : Executor
    """

    def __init__(self, executor: Executor):
        self.executor = executor

    def run(self, name: str, tasks: Sequence[Callable[[], Any]], contexts: Sequence[Context],
            shards: Sequence[Shard] | None = None) -> list[Any]:
        """Run tasks, shown in the timeline under a name.

        Parameters
        ----------
        name : str
        tasks : list of callable
        contexts : list of Context
            The context of each task. Tasks of one context run one after the other.
        shards : list of Shard, optional
            The shard that each task works on.

        Raises
        ------
        Exception
            The first one of a task, with a note of its replica, context and samples; a ReplicaError if a device failed.
        """
        try:
            return self.executor.run(on_track(tasks, name, contexts), contexts)
        except TaskError as failed:
            index, cause = failed.index, failed.__cause__
        shard = shards[index] if shards else None
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'update'
        error = error_of(cause, shard.replica if shard else index, contexts[index], where,
                         shard.span if shard else None, list(dict.fromkeys(contexts)))
        try:
            raise error
        finally:
            del error, cause  # its traceback has this frame, which would keep it


def choose_executor(name: str, functions: Sequence[Any], n_replicas: int) -> Executor:
    """Return an executor for compiled functions.

    Parameters
    ----------
    name : str
        ``'serial'`` or ``'threads'``; ``'auto'``, and ``'mpi'`` in each of its processes, takes threads where
        functions of two or more GPUs block inside, because ops of theirs fall to the host.
    functions : list of theano.compile.function_module.Function
    n_replicas : int
    """
    if name in ('auto', 'mpi'):
        blocking = {f.mgpu_context for f in functions if f.mgpu_context.kind == 'cuda' and _blocks(f)}
        name = 'threads' if len(blocking) > 1 else 'serial'
    return make_executor(name, n_replicas)


def _blocks(function: Any) -> bool:
    """Return whether a function waits for its device before it returns: it reads from the device on the way."""
    return any('HostFromGpu' in str(entry.op) for entry in audit(function))
