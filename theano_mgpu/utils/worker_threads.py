"""Threads that wait for tasks, and go on working after Ctrl-C in the main thread.

Where Ctrl-C comes while the main thread asks a `concurrent.futures.Future` whether it is done, or submits another one,
a lock written in Python may stay locked, and the threads of a ThreadPoolExecutor wait for it forever. An interrupt does
not come within a method of a `threading.Lock` or of a `queue.SimpleQueue`: these are written in C.
"""
from __future__ import annotations

import os
import queue
import threading
import weakref
from typing import Any, Callable, Iterable, Sequence


class WorkerThreads:
    """Threads with a function each. Whichever thread is free calls its function with the arguments of the next task.

    The threads, whose names begin with `name`, end when this object is closed, or collected: the functions do not refer
    to it. A process that is forked has threads of its own.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], name: str):
        self._functions, self._name = functions, name
        self._start()

    def _start(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=_work, args=(function, self._tasks), daemon=True,
                                          name='%s_%d' % (self._name, i)) for i, function in enumerate(self._functions)]
        self._end = weakref.finalize(self, _end, self._tasks, len(self._threads))
        self._end.atexit = False
        for thread in self._threads:
            thread.start()
        self._process = os.getpid()

    def submit(self, task: Task) -> Task:
        """Run a Task after the ones that were submitted before; return it."""
        if self._process != os.getpid():  # a fork takes no thread along but the one that calls it
            self._start()
        self._tasks.put(task)
        return task

    def finish(self, tasks: Iterable[Task]) -> None:
        """Wait until tasks have been run, whether or not an interrupt has kept them from being submitted.

        None of them may have been cancelled. Their errors are dropped.
        """
        underway = [task for task in tasks if not task.done()]
        for task in underway:
            self.submit(task)
        for task in underway:
            task.exception()

    def close(self) -> None:
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
    """A call of the thread's function with these arguments, which is made once, however often it is submitted."""

    def __init__(self, *arguments: Any):
        self._arguments, self._result, self._is_done = arguments, None, False
        self._error: Any = None
        self._begun, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()

    def run(self, function: Callable[..., Any]) -> None:
        """Call the function, unless the task was cancelled."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._result = function(*self._arguments)
        except BaseException as error:  # `result` raises it
            self._error = error
        self._arguments, self._is_done = (), True
        self._running.release()

    def cancel(self) -> None:
        """Keep the call from being made, if it has not begun."""
        self._begun.acquire(blocking=False)

    def done(self) -> bool:
        """Return whether the call has been made."""
        return self._is_done

    def exception(self) -> BaseException | None:
        """Wait for the call, and return its error; None if there was none."""
        while not self._is_done:
            with self._running:  # let the next waiting thread, or the frame below a signal handler, have it
                pass
        return self._error

    def result(self) -> Any:
        """Wait for the call, and return its result, or raise its error."""
        if self.exception() is not None:
            raise self._error
        return self._result
