"""One thread for each replica: a batch goes to the replica that is free first."""
import threading
from concurrent.futures import Future, ThreadPoolExecutor


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
        """Run a job; returns a Future of its outputs."""
        future = Future()
        try:
            future.set_result(self._replica.run(job))
        except Exception as error:
            future.set_exception(error)
        return future

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
        self._free = list(replicas)
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(len(replicas), 'theano_mgpu', initializer=self._take_replica)

    def _take_replica(self):
        self._own.replica = self._free.pop()

    def submit(self, job):
        return self._threads.submit(self._run, job)

    def _run(self, job):
        return self._own.replica.run(job)

    def close(self):
        """End the threads, once they have finished their jobs."""
        # The garbage collector may call this in one of the threads, which cannot wait for itself.
        self._threads.shutdown(wait=not hasattr(self._own, 'replica'))
