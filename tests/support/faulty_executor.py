"""An executor that injects faults: a task raises an error, is interrupted, or is delayed, at a chosen run."""
from theano_mgpu.utils.executors import Executor


class FaultyExecutor(Executor):
    """An executor that runs tasks with another one, and begins the tasks of one run with a fault.

    Each phase of a step is a run: on host contexts the stages, then the update; on devices, sending, launching, waiting
    and fetching are runs of their own.

    Parameters
    ----------
    executor : Executor

    Attributes
    ----------
    runs : int
        Runs since the last `inject`, or since the beginning.
    struck : int
        Tasks that began with a fault.

    Examples
    --------
    >>> executor = FaultyExecutor(Executor())
    >>> executor.inject(MemoryError('no memory left'), run=1, replica=0)
    >>> executor.run([lambda: 'first'])
    ['first']
    >>> executor.run([lambda: 'second'])
    Traceback (most recent call last):
        ...
    theano_mgpu.utils.executors.TaskError: task 0 failed
    """

    def __init__(self, executor):
        self.executor, self.runs, self.struck = executor, 0, 0
        self._fault = self._run = self._replica = None

    def inject(self, fault, run=0, replica=None):
        """Have tasks of a later run begin with a fault.

        Parameters
        ----------
        fault : BaseException or callable
            An exception is raised in place of the task. Ctrl-C raises KeyboardInterrupt. A callable is called
            before the task, without arguments: it may wait, or act in another thread's place.
        run : int
            0 is the next run, 1 the one after it. A negative number takes the runs so far as one step and counts from
            the end of the next step: -1 is its last run.
        replica : int, optional
            The number of the task; every task by default.
        """
        self._fault, self._run, self._replica = fault, run if run >= 0 else self.runs + run, replica
        self.runs = 0

    def run(self, tasks, keys=None):
        number, self.runs = self.runs, self.runs + 1
        if self._fault is not None and number == self._run:
            tasks = [self._faulty(task) if self._replica in (None, replica) else task
                     for replica, task in enumerate(tasks)]
        return self.executor.run(tasks, keys)

    def _faulty(self, task):
        def run():
            self.struck += 1
            if isinstance(self._fault, BaseException):
                raise self._fault
            self._fault()
            return task()
        return run


def faulty(function):
    """Give a function over contexts a FaultyExecutor, which runs its tasks by its own executor; return it."""
    function.executable.launcher.executor = FaultyExecutor(function.executable.launcher.executor)
    return function.executable.launcher.executor
