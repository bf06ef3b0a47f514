"""Runs tasks on contexts, and turns their failures into errors that name the replica."""
import functools
from typing import Any, Callable, List, Optional, Sequence

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

    def run(self, name: str, tasks: Sequence[Callable], contexts: Sequence[Context],
            shards: Optional[Sequence[Shard]] = None) -> List[Any]:
        """Run tasks, shown in the timeline under a name.

        Parameters
        ----------
        name : str
        tasks : list of callable
        contexts : list of Context
            That of each task. Tasks of one context run one after the other.
        shards : list of Shard, optional
            The shard that each task works on.

        Returns
        -------
        list

        Raises
        ------
        Exception
            The first one of a task, with a note of its replica, context and samples; a ReplicaError for that of a
            device.
        """
        groups = {}
        for i, context in enumerate(contexts):
            groups.setdefault(context, []).append(i)
        done = {context: [] for context in groups}  # results, so that the next one is that of the task that failed
        tasks = on_track(tasks, name, contexts)

        def run_on(context):
            for i in groups[context]:
                done[context].append(tasks[i]())
        error = None
        try:
            self.executor.run([functools.partial(run_on, context) for context in groups])
        except TaskError as failed:
            context = list(groups)[failed.index]
            index = groups[context][len(done[context])]
            shard = shards[index] if shards else None
            where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'update'
            error = error_of(failed.__cause__, shard.replica if shard else index, context, where,
                             shard.span if shard else None, list(groups))
        if error is not None:
            try:
                raise error  # here, since a TaskError tells a user nothing
            finally:
                del error  # its traceback has this frame, which would keep it
        results = {i: result for context, indices in groups.items() for i, result in zip(indices, done[context])}
        return [results[i] for i in range(len(tasks))]


def choose_executor(name: str, functions: Sequence[Callable], n_replicas: int) -> Executor:
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


def _blocks(function):
    """Return whether a function waits for its device before it returns: it reads from the device on the way."""
    return any('HostFromGpu' in str(entry.op) for entry in audit(function))
