"""Pools of replicas that compute batches, in this process or on all ranks of an MPI job; outputs come in order.

A batch goes to the replica that is free first. Over ranks, rank 0 posts a batch to a rank that has room, and the rank
posts the outputs back. Each has a queue, so that neither waits for the other. Weights are sent in the same way, before
the first batch that needs them.
"""
from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
from theano import config

from ..comm.communicator import Communicator
from ..comm.waiting import unanswered
from ..errors import PredictionError, RankError
from ..utils import rank_process
from ..utils.worker_threads import Task, WorkerThreads
from .inference_replica import InferenceReplica, Job

NAP = 0.0005  # seconds between two checks for a message

RUN, WEIGHTS, DONE, FAILED, END = 'run', 'weights', 'done', 'failed', 'end'


class InlinePool:
    """A replica that runs each job at once, on the calling thread.

    Parameters
    ----------
    replica : InferenceReplica

    Attributes
    ----------
    capacity : int
        Jobs that may be in flight.
    """

    capacity = 1

    def __init__(self, replica: InferenceReplica) -> None:
        self._replica = replica

    def submit(self, job: Job) -> Any:
        """Run a job; return a Task, or on another rank a Future, of its outputs."""
        task = Task(job)
        task.run(self._replica.run)
        return task

    def is_done(self, future: Any) -> bool:
        """Return whether a job has ended."""
        return future.done()

    def result(self, future: Any) -> list[np.ndarray]:
        """Return the outputs of a job, once it has ended; raise its error."""
        return future.result()

    def begin(self) -> None:
        """Prepare for the first job of a run."""

    def end(self, pending: Iterable[Any]) -> None:
        """End a run: cancel the jobs that have not begun."""
        for future in pending:
            future.cancel()


class ReplicaPool(InlinePool):
    """The replicas of this process, each of which runs jobs in its own thread.

    Parameters
    ----------
    replicas : list of InferenceReplica
    prefetch : int
        Jobs that may wait while each replica has one.
    """

    def __init__(self, replicas: Sequence[InferenceReplica], prefetch: int) -> None:
        self.capacity = len(replicas) + prefetch
        self._threads = WorkerThreads([replica.run for replica in replicas], 'theano_mgpu')

    def submit(self, job: Job) -> Any:
        return self._threads.submit(Task(job))

    def close(self) -> None:
        """End the threads, once they have finished their jobs."""
        self._threads.close()


class RankPool:
    """The replicas of all ranks. Rank 0 has the pool; each other rank runs `serve`.

    Parameters
    ----------
    own : ReplicaPool
        The pool of this process.
    ranks : Communicator
    replicas : list of int
        Number of replicas of each rank.
    prefetch : int
        Jobs that may wait on each rank.

    Attributes
    ----------
    capacity : int
        Jobs that may be in flight.
    """

    def __init__(self, own: ReplicaPool, ranks: Communicator, replicas: Sequence[int], prefetch: int) -> None:
        self._own, self._ranks, self._replicas = own, ranks, replicas
        self._mailbox: Any = ranks.mailbox
        self.capacity = sum(replicas) + prefetch * ranks.size
        self._weights: list[Any] = [None] * ranks.size

    def begin(self) -> None:
        self._jobs: dict[int, tuple[int, Any]] = {}  # by index, the rank and the future of a job
        self._heard = time.monotonic()

    def submit(self, job: Job) -> Any:
        rank = self._least_busy()
        if rank == 0:
            future = self._own.submit(job)
        else:
            if job.weights is not self._weights[rank]:
                self._mailbox.post(rank, (WEIGHTS, job.weights))
                self._weights[rank] = job.weights
            self._mailbox.post(rank, (RUN, replace(job, weights=None)))
            future = Future()
            future.set_running_or_notify_cancel()  # a posted job cannot be cancelled
        self._jobs[job.index] = rank, future
        return future

    def _least_busy(self):
        self._receive()
        self._jobs = {index: (rank, future) for index, (rank, future) in self._jobs.items() if not future.done()}
        busy = Counter(rank for rank, _ in self._jobs.values())
        # Among equally busy ranks, not rank 0, which also reads and writes.
        return min(reversed(range(self._ranks.size)), key=lambda rank: busy[rank] / self._replicas[rank])

    def is_done(self, future: Any) -> bool:
        self._receive()
        return future.done()

    def result(self, future: Any) -> list[np.ndarray]:
        self._heard = time.monotonic()
        while not self.is_done(future):
            self._check_patience([rank for rank, other in self._jobs.values() if other is future and rank],
                                 'a batch to compute')
            time.sleep(NAP)
        return future.result()

    def _receive(self):
        """Take the messages of other ranks."""
        message = None if self._ranks.size == 1 else self._mailbox.take()  # in a fork of rank 0 there are no others
        while message is not None:
            self._heard = time.monotonic()
            rank, (kind, index, content) = message
            if kind == END:
                self._ended.add(rank)
            elif kind == DONE:
                self._jobs.pop(index)[1].set_result(content)
            else:
                error, text = content
                error.__cause__ = RankError('on %s:\n%s' % (self._ranks.name(rank), text))
                self._jobs.pop(index)[1].set_exception(error)
            message = self._mailbox.take()

    def _check_patience(self, owing, task):
        """Raise a RankError if ranks owe an answer, and no rank has sent anything for too long."""
        waited, limit = time.monotonic() - self._heard, config.mgpu.timeout
        if limit and waited > limit and owing:
            names = ', '.join(map(self._ranks.name, owing))
            text = '%s has had %s for %.0f s and does not answer' % (names, task, waited)
            self._ranks.lose(text)
            raise unanswered(text)

    def end(self, pending: Iterable[Any]) -> None:
        """End a run as a `ReplicaPool` does; return once every rank has ended."""
        self._own.end(pending)
        others = set(range(1, self._ranks.size))
        self._ended: set[int] = set()
        for rank in others:
            self._mailbox.post(rank, (END, None))
        self._heard = time.monotonic()
        while self._ended != others and not self._ranks.lost:
            self._receive()
            self._check_patience(sorted(others - self._ended), 'a prediction to end')
            time.sleep(NAP)


def serve(pool: ReplicaPool, ranks: Communicator, weights: list[Any]) -> list[Any]:
    """Compute the batches that rank 0 dispatches, until it ends.

    Parameters
    ----------
    pool : ReplicaPool
        The pool of this process.
    ranks : Communicator
    weights : list of ndarray
        The weights of the first batches.

    Returns
    -------
    list of ndarray
        The last weights that rank 0 has sent.
    """
    mailbox: Any = ranks.mailbox
    futures: dict[int, Any] = {}
    heard, noted = time.monotonic(), 0.0
    while True:
        message = mailbox.take()
        for index in [index for index, future in futures.items() if future.done()]:
            mailbox.post(0, outcome(index, futures.pop(index)))
        if message is None:
            waited = time.monotonic() - heard
            if config.mgpu.timeout and waited - noted > config.mgpu.timeout:  # no error: reading batches may take long
                noted = waited
                rank_process.say('%s has waited %.0f s for batches from %s, and goes on waiting'
                                 % (ranks.name(ranks.rank), waited, ranks.name(0)))
            time.sleep(NAP)
            continue
        heard, noted = time.monotonic(), 0.0
        kind, content = message[1]
        if kind == END:
            break
        if kind == WEIGHTS:
            weights = content
        else:
            futures[content.index] = pool.submit(replace(content, weights=weights))
    pool.end(futures.values())
    mailbox.post(0, (END, None, None))
    return weights


def outcome(index: int, future: Any) -> tuple[str, int, Any]:
    """Return the message to rank 0 of a job that has ended."""
    error = future.exception()
    if error is None:
        return DONE, index, future.result()
    return FAILED, index, (error, ''.join(traceback.format_exception(type(error), error, error.__traceback__)))


def ordered_outputs(pool: Any, batches: Iterable[Any], make_job: Callable[[int, Any], Job],
                    on_error: str) -> Iterator[Any]:
    """Yield the outputs of batches that a pool computes.

    Parameters
    ----------
    pool : InlinePool, ReplicaPool or RankPool
        Its capacity limits how many batches are read before the outputs of the first one are yielded.
    batches : iterable
    make_job : callable
        ``make_job(index, batch)`` returns a Job.
    on_error : {'raise', 'yield'}
        What to do with the error of a batch.

    Yields
    ------
    list of ndarray, or PredictionError
        As soon as they are there, and before further batches are read.

    Raises
    ------
    PredictionError
        The error of a batch, in place of its outputs.
    Exception
        An error in reading `batches`, after the outputs of the batches before it.
    """
    pending: deque[Any] = deque()
    failure = None

    def first_outcome():
        try:
            return pool.result(pending.popleft())
        except PredictionError as error:
            if on_error == 'raise':
                raise
            return error

    pool.begin()
    try:
        numbered = enumerate(batches)
        while True:
            try:
                index, batch = next(numbered)
            except StopIteration:
                break
            except Exception as error:  # raised below, after the outputs of the batches before it
                failure = error
                break
            pending.append(_submitted(pool, make_job, index, batch))
            while pending and (len(pending) >= pool.capacity or pool.is_done(pending[0])):
                yield first_outcome()
        while pending:
            yield first_outcome()
        if failure is not None:
            raise failure
    finally:
        pool.end(pending)


def _submitted(pool, make_job, index, batch):
    """Submit a batch; return its Future, which has the error if no job can be made of the batch."""
    try:
        job = make_job(index, batch)
    except Exception as cause:
        error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
        error.__cause__ = cause
        failed = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(job)
