"""Dispatches batches to the ranks of an MPI job: rank 0 reads and dispatches them, and gets the outputs in order.

Rank 0 posts a batch to a rank that has room, and the rank posts the outputs back. Each has a queue, so that neither
waits for the other. Weights are sent in the same way, before the first batch that needs them.
"""
import time
import traceback
from concurrent.futures import Future

from theano import config

from ..distributed.waiting import unanswered
from ..errors import RankError
from ..jobs import rank_process

NAP = 0.0005  # seconds between two checks for a message

RUN, WEIGHTS, DONE, FAILED, END = 'run', 'weights', 'done', 'failed', 'end'


class RankPool:
    """Runs jobs on the replicas of all ranks. Rank 0 has it; each other rank runs `serve`.

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

    def __init__(self, own, ranks, replicas, prefetch):
        self._own = own
        self._ranks = ranks
        self._replicas = replicas
        self.capacity = sum(replicas) + prefetch * ranks.size
        self._weights = [None] * ranks.size

    def begin(self):
        self._futures = {}  # jobs of other ranks: index to (rank, future)
        self._mine = []
        self._heard = time.monotonic()

    def submit(self, job):
        rank = self._least_busy()
        if rank == 0:
            future = self._own.submit(job)
            self._mine.append(future)
            return future
        if job.weights is not self._weights[rank]:
            self._ranks.mailbox.post(rank, (WEIGHTS, job.weights))
            self._weights[rank] = job.weights
        self._ranks.mailbox.post(rank, (RUN, job._replace(weights=None)))
        future = Future()
        future.set_running_or_notify_cancel()  # a posted job cannot be cancelled
        self._futures[job.index] = rank, future
        return future

    def _least_busy(self):
        self._receive()
        self._mine = [future for future in self._mine if not future.done()]
        busy = [len(self._mine)] + [0] * (self._ranks.size - 1)
        for rank, _ in self._futures.values():
            busy[rank] += 1
        # Among equally busy ranks, not rank 0, which also reads and writes.
        return min(reversed(range(self._ranks.size)), key=lambda rank: busy[rank] / self._replicas[rank])

    def is_done(self, future):
        self._receive()
        return future.done()

    def result(self, future):
        self._heard = time.monotonic()
        while not self.is_done(future):
            owing = [rank for rank, other in self._futures.values() if other is future]
            self._check_patience(owing, 'a batch to compute')
            time.sleep(NAP)
        return future.result()

    def _receive(self):
        """Take the messages of other ranks."""
        message = self._ranks.mailbox.take()
        while message is not None:
            self._heard = time.monotonic()
            kind, index, content = message[1]
            if kind == END:
                self._ended.add(message[0])
            else:
                _, future = self._futures.pop(index)
                if kind == DONE:
                    future.set_result(content)
                else:
                    error, text = content
                    error.__cause__ = RankError('on %s:\n%s' % (self._ranks.name(message[0]), text))
                    future.set_exception(error)
            message = self._ranks.mailbox.take()

    def _check_patience(self, owing, what):
        """Raise a RankError if ranks owe an answer, and no rank has sent anything for too long."""
        waited, limit = time.monotonic() - self._heard, config.mgpu.timeout
        if limit and waited > limit and owing:
            names = ', '.join(map(self._ranks.name, owing))
            text = '%s has had %s for %.0f s and does not answer' % (names, what, waited)
            self._ranks.lose(text)
            raise unanswered(text)

    def end(self, pending):
        """As for a `ReplicaPool`; returns once every rank has ended."""
        self._own.end(pending)
        self._ended = set()
        for rank in range(1, self._ranks.size):
            self._ranks.mailbox.post(rank, (END, None))
        self._heard = time.monotonic()
        while len(self._ended) < self._ranks.size - 1 and not self._ranks.lost:
            self._receive()
            self._check_patience(sorted(set(range(1, self._ranks.size)) - self._ended), 'a prediction to end')
            time.sleep(NAP)


def serve(pool, ranks, weights):
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
    futures, heard, noted = {}, time.monotonic(), 0.0
    while True:
        message = ranks.mailbox.take()
        for index in [index for index, future in futures.items() if future.done()]:
            ranks.mailbox.post(0, outcome(index, futures.pop(index)))
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
            futures[content.index] = pool.submit(content._replace(weights=weights))
    pool.end(futures.values())
    ranks.mailbox.post(0, (END, None, None))
    return weights


def outcome(index, future):
    """The message of a job that has ended."""
    error = future.exception()
    if error is None:
        return DONE, index, future.result()
    return FAILED, index, (error, ''.join(traceback.format_exception(type(error), error, error.__traceback__)))
