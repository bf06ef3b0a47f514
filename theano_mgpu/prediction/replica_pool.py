"""One thread for each replica: a batch goes to the replica that is free first."""
from ..utils.worker_threads import Task, WorkerThreads


class InlinePool:
    """Runs each job at once, on the calling thread.

    Parameters
    ----------
    replica : InferenceReplica

    Attributes
    ----------
    capacity : int
        Jobs that may be in flight.
    """

    capacity = 1

    def __init__(self, replica):
        self._replica = replica

    def submit(self, job):
        """Run a job; returns a Task, or on another rank a Future, of its outputs."""
        task = Task(job)
        task.run(self._replica.run)
        return task

    def is_done(self, future):
        """Whether a job has ended."""
        return future.done()

    def result(self, future):
        """The outputs of a job, once it has ended; raises its error."""
        return future.result()

    def begin(self):
        """Called before the first job of a run."""

    def end(self, pending):
        """Called after a run: cancel the jobs that have not begun."""
        for future in pending:
            future.cancel()


class ReplicaPool(InlinePool):
    """Runs jobs on the replicas of this process, each in its own thread.

    Parameters
    ----------
    replicas : list of InferenceReplica
    prefetch : int
        Jobs that may wait while each replica has one.
    """

    def __init__(self, replicas, prefetch):
        self.capacity = len(replicas) + prefetch
        self._threads = WorkerThreads([replica.run for replica in replicas], 'theano_mgpu')

    def submit(self, job):
        return self._threads.submit(Task(job))

    def close(self):
        """End the threads, once they have finished their jobs."""
        self._threads.close()
