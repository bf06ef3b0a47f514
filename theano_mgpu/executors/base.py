"""The contract of an executor: run one task a replica, results in replica order."""
from typing import Any, Callable, List, Sequence


class TaskError(Exception):
    """A task failed; ``index`` says which one, ``__cause__`` why."""

    def __init__(self, index):
        super().__init__('task %d failed' % index)
        self.index = index


class Executor:
    """Runs tasks, one a replica."""

    def run(self, tasks: Sequence[Callable[[], Any]]) -> List[Any]:
        """Run every task to its end, also when another one fails.

        Parameters
        ----------
        tasks : list of callable
            Without arguments; task i belongs to replica i.

        Returns
        -------
        list
            The tasks' results, in their order.

        Raises
        ------
        TaskError
            From the exception of the first task, in their order, that failed.
        """
        raise NotImplementedError


def outcome_of(task):
    """Result and exception of a task, one of them None."""
    try:
        return task(), None
    except Exception as error:  # handed on by `results_of` once all tasks have ended
        return None, error


def results_of(outcomes):
    """Results of outcomes; a TaskError from the first exception among them."""
    for index, (_, error) in enumerate(outcomes):
        if error is not None:
            raise TaskError(index) from error
    return [result for result, _ in outcomes]
