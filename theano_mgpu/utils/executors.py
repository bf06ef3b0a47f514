"""Executors: how the tasks of the replicas of a process are run."""
from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Hashable, Iterable, Sequence

from ..errors import MgpuError
from .worker_threads import Task, WorkerThreads


class TaskError(Exception):
    """The failure of a task: ``index`` is its number, and ``__cause__`` its exception."""

    def __init__(self, index: int):
        super().__init__('task %d failed' % index)
        self.index = index


class Executor:
    """A way to run tasks: one after the other on the calling thread, unless a subclass has another one.

    Devices still overlap, since launches return at once.
    """

    def run(self, tasks: Sequence[Callable[[], Any]], keys: Sequence[Hashable] | None = None) -> list[Any]:
        """Run tasks to their end, also when another one fails; return their results, in their order.

        Tasks of one key run one after the other; once one of them has failed, the others of its key do not run. By
        default each task has a key of its own. Raises a TaskError from the exception of the first task that failed.
        """
        return _results([_outcomes(zip(range(len(tasks)), tasks, keys or range(len(tasks))))])


class ThreadsExecutor(Executor):
    """An executor with a thread for each key but the first, which has the calling thread, up to so many keys.

    It is for functions that block inside, such as those with ops that fall to the host.
    """

    def __init__(self, n_replicas: int):
        self._threads = WorkerThreads([_outcomes] * max(1, n_replicas - 1), 'theano_mgpu')
        self._of_caller = threading.local()  # functions share an executor, and user threads may call several of them

    def run(self, tasks: Sequence[Callable[[], Any]], keys: Sequence[Hashable] | None = None) -> list[Any]:
        self._threads.finish(getattr(self._of_caller, 'underway', ()))  # a second Ctrl-C may have ended the wait below
        groups: dict[Hashable, list[Any]] = {}
        for i, (task, key) in enumerate(zip(tasks, keys or range(len(tasks)))):
            groups.setdefault(key, []).append((i, task, key))
        first, *others = groups.values()
        self._of_caller.underway = underway = [Task(group) for group in others]
        try:
            for each in underway:
                self._threads.submit(each)
            return _results([_outcomes(first)] + [each.result() for each in underway])
        finally:  # also after Ctrl-C: no thread may go on with a step that was given up
            self._threads.finish(underway)
            self._of_caller.underway = ()


@functools.lru_cache(maxsize=None)
def make_executor(name: str, n_replicas: int) -> Executor:
    """Return the executor of a name, serial or threads, which all functions over as many replicas share."""
    if name == 'serial' or (name == 'threads' and n_replicas == 1):
        return Executor()
    if name == 'threads':
        return ThreadsExecutor(n_replicas)
    raise MgpuError('executor %r is none of auto, serial, threads, mpi; set executor= or the flag '
                    'mgpu.executor' % (name,))


def _outcomes(numbered: Iterable[Any]) -> tuple[dict[int, Any], dict[Hashable, Any]]:
    """Run tasks one after the other; return the results by number, and for each key the first failure with its number.
    """
    results: dict[int, Any] = {}
    failures: dict[Hashable, Any] = {}
    for i, task, key in numbered:
        if not failures or key not in failures:
            try:
                results[i] = task()
            except Exception as error:  # handed on by `_results` once all tasks have ended
                failures[key] = i, error
    return results, failures


def _results(groups: Sequence[tuple[dict[int, Any], dict[Hashable, Any]]]) -> list[Any]:
    """Return the results of all groups, in order; raise a TaskError from the first exception."""
    failed = [failure for _, failures in groups for failure in failures.values()]
    if failed:
        number, error = min(failed, key=lambda each: each[0])
        for _, failures in groups:
            failures.clear()  # the traceback of an error has a frame with these, which would keep it
        raise TaskError(number) from error
    results = {number: result for of_group, _ in groups for number, result in of_group.items()}
    return [results[number] for number in range(len(results))]
