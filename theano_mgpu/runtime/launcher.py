"""Runs tasks on contexts, and turns their failures into errors that name the replica."""
import functools
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..devices.context_map import Context
from ..executors import Executor, SerialExecutor, TaskError, make_executor
from ..graphs.audit import audit
from ..profiling.timeline import on_track, records
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
        if type(self.executor) is SerialExecutor and not records():
            results, failure = _serially(tasks, contexts)
        else:
            results, failure = self._by_executor(on_track(tasks, name, contexts), contexts)
        if failure is None:
            return results
        index, cause = failure
        del failure  # its traceback has this frame, which would keep it
        shard = shards[index] if shards else None
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'update'
        error = error_of(cause, shard.replica if shard else index, contexts[index], where,
                         shard.span if shard else None, list(dict.fromkeys(contexts)))
        try:
            raise error
        finally:
            del error, cause  # as above

    def _by_executor(self, tasks, contexts):
        groups: Dict[Context, List[int]] = {}
        for i, context in enumerate(contexts):
            groups.setdefault(context, []).append(i)
        done: Dict[Context, List[Any]] = {context: [] for context in groups}  # the task after these has failed

        def run_on(context):
            for i in groups[context]:
                done[context].append(tasks[i]())
        try:
            self.executor.run([functools.partial(run_on, context) for context in groups])
        except TaskError as failed:
            context = list(groups)[failed.index]
            return [], (groups[context][len(done[context])], failed.__cause__)
        results = {i: result for context, indices in groups.items() for i, result in zip(indices, done[context])}
        return [results[i] for i in range(len(tasks))], None


def _serially(tasks, contexts):
    """Run tasks one after the other, without an executor's bookkeeping; what a context has begun is not gone on with.

    Returns
    -------
    results : list
    failure : (int, Exception) or None
        The first task that has failed, and why.
    """
    results, failure = [], None
    for i, (task, context) in enumerate(zip(tasks, contexts)):
        if failure is None or context != contexts[failure[0]]:
            try:
                results.append(task())
            except Exception as error:
                failure = failure or (i, error)
    return results, failure


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
