"""A thread a replica: for functions that block inside, such as those with ops that fall to the host."""
from concurrent.futures import ThreadPoolExecutor, wait

from .base import Executor, outcome_of, results_of


class ThreadsExecutor(Executor):
    """Runs the first task on the calling thread, each other one on a thread of a pool.

    Parameters
    ----------
    n_replicas : int
        The most tasks that a run has.
    """

    def __init__(self, n_replicas):
        self._pool = ThreadPoolExecutor(max(1, n_replicas - 1), thread_name_prefix='theano_mgpu')

    def run(self, tasks):
        futures = [self._pool.submit(outcome_of, task) for task in tasks[1:]]
        try:
            first = outcome_of(tasks[0])
        finally:  # also after Ctrl-C: no thread may go on with a step that was given up
            wait(futures)
        return results_of([first] + [future.result() for future in futures])
