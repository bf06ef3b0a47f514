"""One task after the other on the calling thread: devices still overlap, since launches return at once."""
from .base import Executor, outcome_of, results_of


class SerialExecutor(Executor):
    """Runs the tasks on the calling thread."""

    def run(self, tasks):
        return results_of([outcome_of(task) for task in tasks])
