"""Pools of replicas that compute batches, in this process or on all ranks of an MPI job; outputs come in order.

A batch goes to the replica that is free first. Over ranks, rank 0 posts a batch to a rank that has room, and the rank
posts the outputs back. Each has a queue, so that neither waits for the other. Weights are sent in the same way, before
the first batch that needs them.
"""
from __future__ import annotations

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

RUN, WEIGHTS, DONE, FAILED, END = 'run', 'weights', 'done', 'failed', 'end'


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


class Answer:
    """The result of a job that another rank computes: ``get()`` returns the outputs, once they have come."""

    def __init__(self, pool: RankPool, rank: int) -> None:
        self._pool, self.rank = pool, rank
        self.get: Callable[[], Any] | None = None

    def done(self) -> bool:
        self._pool.receive()
        return self.get is not None

    def result(self) -> Any:
        self._pool.wait(self.done, lambda: [self.rank], 'a batch to compute')
        assert self.get is not None
        return self.get()

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
        if job.weights is not self._weights[rank]:
            self._mailbox.post(rank, (WEIGHTS, job.weights))
            self._weights[rank] = job.weights
        self._mailbox.post(rank, (RUN, replace(job, weights=None)))
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
            rank, (kind, index, content) = message
            if kind == END:
                self._ended.add(rank)
            else:
                self._posted.pop(index).get = _giving(content) if kind == DONE else \
                    _raising(content[0], RankError('on %s:\n%s' % (self._ranks.name(rank), content[1])))
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
            self._mailbox.post(rank, (END, None))

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
        kind, content = message[1]
        if kind == END:
            break
        if kind == WEIGHTS:
            weights = content
        else:
            tasks[content.index] = pool.submit(replace(content, weights=weights))
    pool.end(tasks.values())
    mailbox.post(0, (END, None, None))
    return weights


def outcome(index: int, task: Any) -> tuple[str, int, Any]:
    """Return the message to rank 0 of a job that has ended."""
    error = task.exception()
    if error is None:
        return DONE, index, task.result()
    return FAILED, index, (error, ''.join(traceback.format_exception(type(error), error, error.__traceback__)))


def ordered_outputs(pool: Any, batches: Iterable[Any], make_job: Callable[[int, Any], Job],
                    on_error: str) -> Iterator[Any]:
    """Yield the outputs of batches that a pool computes, as soon as they are there, before further batches are read.

    The capacity of the pool limits how many batches are read before the outputs of the first one are yielded. An error
    in reading them is raised after the outputs of the batches before. `on_error` says whether to raise or to yield the
    PredictionError of a batch. ``make_job(index, batch)`` returns a Job.
    """
    pending: deque[Any] = deque()
    failure = None

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
            except Exception as error:  # raised below, after the outputs of the batches before it
                failure = error
                break
            pending.append(_submitted(pool, make_job, index, batch))
            while pending and (len(pending) >= pool.capacity or pending[0].done()):
                yield first_outcome()
        while pending:
            yield first_outcome()
        if failure is not None:
            raise failure
    finally:
        pool.end(pending)


def _submitted(pool, make_job, index, batch):
    """Submit a batch; return its task, which has the error if no job can be made of the batch."""
    try:
        job = make_job(index, batch)
    except Exception as cause:
        failed = Task()
        failed.run(_raising(PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index),
                            cause))
        return failed
    return pool.submit(job)


def _giving(outputs):
    return lambda: outputs


def _raising(error, cause):
    def fail():
        raise error from cause
    return fail
