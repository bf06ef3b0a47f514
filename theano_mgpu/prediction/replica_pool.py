"""One thread for each replica: a batch goes to the replica that is free first."""
import queue
import threading
from concurrent.futures import Future


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
        """Run a job; returns a Future of its outputs, or a Task."""
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
        self._tasks = queue.SimpleQueue()
        self._threads = [threading.Thread(target=_work, args=(replica, self._tasks), daemon=True,
                                          name='theano_mgpu_%d' % i) for i, replica in enumerate(replicas)]
        for thread in self._threads:
            thread.start()

    def submit(self, job):
        task = Task(job)
        self._tasks.put(task)
        return task

    def close(self):
        """End the threads, once they have finished their jobs."""
        for _ in self._threads:
            self._tasks.put(None)
        # The garbage collector may call this in one of the threads, which cannot wait for itself.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()


def _work(replica, tasks):
    """Run tasks until there is a None."""
    task = tasks.get()
    while task is not None:
        task.run(replica)
        task = None  # its outputs are not kept while this thread waits
        task = tasks.get()


class Task:
    """What a thread has to compute: a Future that an interrupt of the main thread cannot harm.

    Where Ctrl-C comes while the main thread asks a Future whether it is done, the Future's lock stays locked, and its
    thread waits forever; so do the threads of a ThreadPoolExecutor. An interrupt does not come within a method of a
    ``threading.Lock`` or a ``queue.SimpleQueue``, which are in C.

    Parameters
    ----------
    job : Job
    """

    def __init__(self, job):
        self._job, self._outputs, self._error, self._is_done = job, None, None, False
        self._running = threading.Lock()
        self._running.acquire()

    def run(self, replica):
        """Compute it, unless it is cancelled."""
        job = self._job
        try:
            if job is not None:
                self._outputs = replica.run(job)
        except BaseException as error:  # `result` raises it
            self._error = error
        self._job, self._is_done = None, True
        self._running.release()

    def cancel(self):
        """Do not compute it, if that has not begun."""
        self._job = None

    def done(self):
        """Whether it has ended."""
        return self._is_done

    def exception(self):
        """Its error, once it has ended; None if there was none."""
        while not self._is_done:
            self._running.acquire()
        return self._error

    def result(self):
        """The outputs, once it has ended; raises its error."""
        if self.exception() is not None:
            raise self._error
        return self._outputs
