"""Pools of replicas that compute batches, in this process or on all ranks of an MPI job; outputs come in order.

A batch goes to the replica that is free first. Over ranks, rank 0 posts a batch to a rank that has room, and the rank
posts the outputs back. Each has a queue, so that neither waits for the other. Weights are sent with the first batch
that needs them.
"""
from __future__ import annotations

import functools
import time
import traceback
from collections import Counter, deque
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Sequence

from theano import config

from ..comm.communicator import Communicator
from ..comm.waiting import unanswered
from ..errors import PredictionError, RankError
from ..utils import rank_process
from ..utils.worker_threads import Task, WorkerThreads
from .inference_replica import InferenceReplica, Job

NAP = 0.0005  # seconds between two checks for a message


class InlinePool:
    """A replica that runs each job at once, on the calling thread."""

    capacity = 1  # jobs that may be in flight

    def __init__(self, replica: InferenceReplica) -> None:
        self._replica = replica

    def submit(self, job: Job) -> Any:
        """Run a job; return a Task, or on another rank an Answer, that has its outputs as `result`."""
        task = Task(job)
        task.run(self._replica.run)
        return task

    def end(self, pending: Iterable[Any]) -> None:
        """End a run: cancel the jobs that have not begun."""
        for task in pending:
            task.cancel()


class ReplicaPool(InlinePool):
    """The replicas of this process, each of which runs jobs in its own thread; `prefetch` further jobs may wait."""

    def __init__(self, replicas: Sequence[InferenceReplica], prefetch: int) -> None:
        self.capacity = len(replicas) + prefetch
        self._threads = WorkerThreads([replica.run for replica in replicas], 'theano_mgpu')

    def submit(self, job: Job) -> Any:
        return self._threads.submit(Task(job))

    def close(self) -> None:
        """End the threads, once they have finished their jobs."""
        self._threads.close()


class Answer(Task):
    """A job that another rank computes; it is run here once the outputs have come."""

    def __init__(self, pool: RankPool, rank: int) -> None:
        super().__init__()
        self._pool, self.rank = pool, rank

    def done(self) -> bool:
        self._pool.receive()
        return super().done()

    def exception(self) -> BaseException | None:
        self._pool.wait(self.done, lambda: [self.rank], 'a batch to compute')
        return super().exception()

    def cancel(self) -> None:
        """Do nothing: a posted job cannot be cancelled."""


class RankPool:
    """The replicas of all ranks. Rank 0 has the pool; each other rank runs `serve`.

    `own` is the pool of this process, `replicas` has the number of each rank. On each, `prefetch` jobs may wait.
    """

    def __init__(self, own: ReplicaPool, ranks: Communicator, replicas: Sequence[int], prefetch: int) -> None:
        self._own, self._ranks, self._replicas = own, ranks, replicas
        self._mailbox: Any = ranks.mailbox
        self.capacity = sum(replicas) + prefetch * ranks.size
        self._weights: list[Any] = [None] * ranks.size
        self._begin()

    def _begin(self):
        self._here: list[Task] = []
        self._posted: dict[int, Answer] = {}  # by the index of the job
        self._ended: set[int] = set()

    def submit(self, job: Job) -> Any:
        rank = self._least_busy()
        if rank == 0:
            self._here.append(self._own.submit(job))
            return self._here[-1]
        knows_weights, self._weights[rank] = job.weights is self._weights[rank], job.weights
        self._mailbox.post(rank, replace(job, weights=None) if knows_weights else job)
        self._posted[job.index] = Answer(self, rank)
        return self._posted[job.index]

    def _least_busy(self):
        self.receive()
        self._here = [task for task in self._here if not task.done()]
        busy = Counter(answer.rank for answer in self._posted.values())
        busy[0] = len(self._here)
        # Among equally busy ranks, not rank 0, which also reads and writes.
        return min(reversed(range(self._ranks.size)), key=lambda rank: busy[rank] / self._replicas[rank])

    def receive(self) -> None:
        """Take the messages of other ranks."""
        message = None if self._ranks.size == 1 else self._mailbox.take()  # in a fork of rank 0 there are no others
        while message is not None:
            self._heard = time.monotonic()
            rank, outcome = message
            if outcome is None:
                self._ended.add(rank)
            else:
                index, outputs, error, text = outcome
                if error is not None:
                    error.__cause__ = RankError('on %s:\n%s' % (self._ranks.name(rank), text))
                self._posted.pop(index).run(functools.partial(_ended, outputs, error))
            message = self._mailbox.take()

    def wait(self, is_over: Callable[[], bool], owing: Callable[[], list[int]], task: str) -> None:
        """Wait; raise a RankError if ranks owe an answer, and no rank has sent anything for too long."""
        self._heard = time.monotonic()
        while not is_over():
            waited, limit = time.monotonic() - self._heard, config.mgpu.timeout
            if limit and waited > limit:
                text = '%s has had %s for %.0f s and does not answer' % (
                    ', '.join(map(self._ranks.name, owing())), task, waited)
                self._ranks.lost = text
                raise unanswered(text)
            time.sleep(NAP)

    def end(self, pending: Iterable[Any]) -> None:
        """End a run as a `ReplicaPool` does; return once every rank has ended."""
        self._own.end(pending)
        others = set(range(1, self._ranks.size))
        for rank in others:
            self._mailbox.post(rank, None)

        def is_over():
            self.receive()
            return self._ended == others or bool(self._ranks.lost)
        self.wait(is_over, lambda: sorted(others - self._ended), 'a prediction to end')
        self._begin()


def serve(pool: ReplicaPool, ranks: Communicator, weights: list[Any]) -> list[Any]:
    """Compute the batches that rank 0 dispatches, until it ends; return the last weights that it has sent."""
    mailbox: Any = ranks.mailbox
    tasks: dict[int, Any] = {}
    heard, noted = time.monotonic(), 0.0
    while True:
        message = mailbox.take()
        for index in [index for index, task in tasks.items() if task.done()]:
            mailbox.post(0, outcome(index, tasks.pop(index)))
        if message is None:
            waited = time.monotonic() - heard
            if config.mgpu.timeout and waited - noted > config.mgpu.timeout:  # no error: reading batches may take long
                noted = waited
                rank_process.say('%s has waited %.0f s for batches from %s, and goes on waiting'
                                 % (ranks.name(ranks.rank), waited, ranks.name(0)))
            time.sleep(NAP)
            continue
        heard, noted = time.monotonic(), 0.0
        _, job = message
        if job is None:
            break
        weights = weights if job.weights is None else job.weights
        tasks[job.index] = pool.submit(replace(job, weights=weights))
    pool.end(tasks.values())
    mailbox.post(0, None)
    return weights


def outcome(index: int, task: Any) -> tuple[int, Any, BaseException | None, str]:
    """Return the message to rank 0 of a job that has ended: the outputs, or the error with its traceback."""
    error = task.exception()
    if error is None:
        return index, task.result(), None, ''
    return index, None, error, ''.join(traceback.format_exception(type(error), error, error.__traceback__))


def ordered_outputs(pool: Any, batches: Iterable[Any], make_job: Callable[[int, Any], Job],
                    on_error: str) -> Iterator[Any]:
    """Yield the outputs of batches that a pool computes, as soon as they are there, before further batches are read.

    The capacity of the pool limits how many batches are read before the outputs of the first one are yielded. An error
    in reading them is raised after the outputs of the batches before. `on_error` says whether to raise or to yield the
    PredictionError of a batch. ``make_job(index, batch)`` returns a Job.
    """
    pending: deque[Any] = deque()

    def first_outcome():
        try:
            return pending.popleft().result()
        except PredictionError as error:
            if on_error == 'raise':
                raise
            return error

    try:
        numbered = enumerate(batches)
        while True:
            try:
                index, batch = next(numbered)
            except StopIteration:
                break
            except Exception as error:  # raised after the outputs of the batches before it
                pending.append(_failed(error))
                break
            pending.append(_submitted(pool, make_job, index, batch))
            while pending and (len(pending) >= pool.capacity or pending[0].done()):
                yield first_outcome()
        while pending:
            yield first_outcome()
    finally:
        pool.end(pending)


def _submitted(pool, make_job, index, batch):
    """Submit a batch; return its task, which has the error if no job can be made of the batch."""
    try:
        job = make_job(index, batch)
    except Exception as cause:
        error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
        error.__cause__ = cause
        return _failed(error)
    return pool.submit(job)


def _failed(error):
    task = Task()
    task.run(functools.partial(_ended, None, error))
    return task


def _ended(outputs, error):
    if error is not None:
        raise error
    return outputs
