"""Threads that wait for tasks, and go on working after Ctrl-C in the main thread.

Where Ctrl-C comes while the main thread asks a `concurrent.futures.Future` whether it is done, or submits another one,
a lock written in Python may stay locked, and the threads of a ThreadPoolExecutor wait for it forever. An interrupt does
not come within a method of a `threading.Lock` or of a `queue.SimpleQueue`: these are written in C.
"""
import os
import queue
import threading
import weakref


class WorkerThreads:
    """Threads with a function each. Whichever thread is free calls its function with the arguments of the next task.

    The threads end when this object is closed, or collected. A process that is forked has threads of its own.

    Parameters
    ----------
    functions : list of callable
        One for each thread. They do not refer to this object.
    name : str
        What the names of the threads begin with.
    """

    def __init__(self, functions, name):
        self._functions, self._name = functions, name
        self._start()

    def _start(self):
        self._tasks = queue.SimpleQueue()
        self._threads = [threading.Thread(target=_work, args=(function, self._tasks), daemon=True,
                                          name='%s_%d' % (self._name, i)) for i, function in enumerate(self._functions)]
        self._end = weakref.finalize(self, _end, self._tasks, len(self._threads))
        self._end.atexit = False
        for thread in self._threads:
            thread.start()
        self._process = os.getpid()

    def submit(self, task):
        """Have a Task run after those that were submitted before; returns it."""
        if self._process != os.getpid():  # a fork takes no thread along but the one that calls it
            self._start()
        self._tasks.put(task)
        return task

    def finish(self, tasks):
        """Wait until tasks have been run, whether or not an interrupt has kept them from being submitted.

        None of them may have been cancelled. Their errors are dropped.
        """
        underway = [task for task in tasks if not task.done()]
        for task in underway:
            self.submit(task)
        for task in underway:
            task.exception()

    def close(self):
        """End the threads, once they have finished their tasks."""
        self._end()
        # The garbage collector may call this in one of the threads, which cannot wait for itself.
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join()


def _end(tasks, n_threads):
    for _ in range(n_threads):
        tasks.put(None)


def _work(function, tasks):
    """Run tasks until there is a None."""
    task = tasks.get()
    while task is not None:
        task.run(function)
        task = None  # its result is not kept while this thread waits
        task = tasks.get()


class Task:
    """A call that a thread makes once, however often it is submitted.

    Parameters
    ----------
    *arguments
        Of the thread's function.
    """

    def __init__(self, *arguments):
        self._arguments, self._result, self._error, self._is_done = arguments, None, None, False
        self._begun, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()

    def run(self, function):
        """Call the function, unless the task was cancelled."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._result = function(*self._arguments)
        except BaseException as error:  # `result` raises it
            self._error = error
        self._arguments, self._is_done = None, True
        self._running.release()

    def cancel(self):
        """Do not run it, if that has not begun."""
        self._begun.acquire(blocking=False)

    def done(self):
        """Whether it has been run."""
        return self._is_done

    def exception(self):
        """Its error, once it has been run; None if there was none."""
        while not self._is_done:
            with self._running:  # let the next waiting thread, or the frame below a signal handler, have it
                pass
        return self._error

    def result(self):
        """What the function has returned, once it has been run; raises its error."""
        if self.exception() is not None:
            raise self._error
        return self._result
