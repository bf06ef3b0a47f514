"""A thread a replica: for functions that block inside, such as those with ops that fall to the host."""
import threading

from ..utils.worker_threads import Task, WorkerThreads
from .base import Executor, outcome_of, results_of


class ThreadsExecutor(Executor):
    """Runs the first task on the calling thread, each other one on a thread of its own.

    Parameters
    ----------
    n_replicas : int
        The most tasks that a run has.
    """

    def __init__(self, n_replicas):
        self._threads = WorkerThreads([outcome_of] * max(1, n_replicas - 1), 'theano_mgpu')
        self._of_caller = threading.local()  # functions share an executor, and user threads may call several of them

    def run(self, tasks):
        self._threads.finish(getattr(self._of_caller, 'underway', ()))  # a second Ctrl-C may have ended the wait below
        self._of_caller.underway = underway = [Task(task) for task in tasks[1:]]
        try:
            for task in underway:
                self._threads.submit(task)
            first = outcome_of(tasks[0])
            return results_of([first] + [task.result() for task in underway])
        finally:  # also after Ctrl-C: no thread may go on with a step that was given up
            self._threads.finish(underway)
            self._of_caller.underway = ()
