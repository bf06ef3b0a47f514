"""The ranks of a job as computers of groups of batches, which rank 0 reads and deals out."""
from __future__ import annotations

import time
import traceback
from collections import deque
from typing import Any, Callable, Iterator

from theano import config

from ..comm.communicator import Communicator
from ..comm.waiting import poll, unanswered
from ..errors import PredictionError, RankError
from ..utils import rank_process
from .groups import PATIENCE, Group

AHEAD = 2     # the parts that another rank has at a time: one that it computes, and the next one
PART = 0.003  # seconds of a part, where groups take less: messages take some, too
MOST = 4      # the parts for each rank that are read, and whose outcomes are not taken


class Part:
    """Some groups that a `rank` computes; its `outcomes` are None until they are there."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.outcomes: Any = None


class Dealer:
    """The ranks, of which rank 0 gives the next groups to one that has room. The others serve it meanwhile.

    ``compute(group)`` returns the outcome of each batch: outputs, or a PredictionError. ``use(weights)`` is called on
    each rank before it computes groups.
    """

    def __init__(self, ranks: Communicator, compute: Callable[[Group], list[Any]], use: Callable[[Any], None]) -> None:
        self._ranks, self._compute, self._use = ranks, compute, use
        self._others = list(range(1, ranks.size))
        self._mailbox: Any = ranks.mailbox
        self._told: list[Any] = [None] * ranks.size  # the weights that each rank has
        self._size = 1  # the groups in a part

    def deal(self, groups: Iterator[Group], weights: Callable[[], Any]) -> Iterator[Any]:
        """Yield the outcomes of groups in order, on rank 0, computed with the present ``weights()``."""
        self._parts: deque[Part] = deque()  # in the order of their groups
        self._posted: dict[int, deque[Part]] = {rank: deque() for rank in self._others}  # those of them that it has
        self._ended: list[int] = []
        error = None
        try:
            while error is None or self._parts:
                while self._parts and self._parts[0].outcomes is not None:
                    yield from self._parts.popleft().outcomes
                self._receive()
                if error is None and len(self._parts) < MOST * self._ranks.size:
                    rank = min(self._others, key=lambda rank: len(self._posted[rank]))
                    rank = rank if len(self._posted[rank]) < AHEAD else 0
                    read, error = _read(groups, self._size)
                    if read:
                        self._give(rank, read, weights())
                elif self._parts:
                    self._wait(lambda: self._parts[0].outcomes is not None, [self._parts[0].rank],
                               'batches to compute')
            if not isinstance(error, StopIteration):
                raise error
        finally:
            if not self._ranks.lost:
                for rank in self._others:
                    self._mailbox.post(rank, None)
                self._wait(lambda: len(self._ended) == len(self._others), self._others, 'a prediction to end')

    def _give(self, rank, groups, weights):
        """Have a rank compute groups, as the next part."""
        part = Part(rank)
        self._parts.append(part)
        if rank:
            self._posted[rank].append(part)
            self._mailbox.post(rank, (None if self._told[rank] is weights else weights, groups))
            self._told[rank] = weights
        else:
            self._use(weights)
            part.outcomes = [outcome for group in groups for outcome in self._compute(group)]

    def _receive(self):
        """Take the answers of other ranks, each to its first part."""
        message = self._mailbox.take()
        while message is not None:
            rank, answer = message
            if answer is None:
                self._ended.append(rank)
            else:
                outcomes, texts, seconds = answer
                for i, text in texts.items():  # a pickled error has no cause
                    outcomes[i].__cause__ = RankError('on %s:\n%s' % (self._ranks.name(rank), text))
                self._posted[rank].popleft().outcomes = outcomes
                self._size = max(1, int(self._size * min(2, PART / seconds)))
            message = self._mailbox.take()

    def _wait(self, is_over, owing, task):
        """Wait; raise a RankError if the ranks that owe an answer take too long."""
        for waited in poll(lambda: self._receive() or is_over()):
            if config.mgpu.timeout and waited > config.mgpu.timeout:
                self._ranks.lost = text = '%s has had %s for %.0f s and does not answer' % (
                    ', '.join(self._ranks.name(rank) for rank in owing if rank not in self._ended), task, waited)
                raise unanswered(text)

    def serve(self) -> None:
        """Compute the parts that rank 0 gives to this rank, until it ends the call."""
        parts: deque[Any] = deque()
        while True:
            message = self._mailbox.take() if parts else self._awaited()
            if message is not None:
                if message[1] is None:
                    break
                parts.append(message[1])
                continue
            weights, groups = parts.popleft()
            if weights is not None:
                self._use(weights)
            began = time.perf_counter()
            outcomes = [outcome for group in groups for outcome in self._compute(group)]
            texts = {i: ''.join(traceback.format_exception(type(each), each, each.__traceback__))
                     for i, each in enumerate(outcomes) if isinstance(each, PredictionError)}
            self._mailbox.post(0, (outcomes, texts, time.perf_counter() - began))
        self._mailbox.post(0, None)

    def _awaited(self):
        """Return the next message of rank 0, which may read batches for as long as it takes."""
        message, noted = None, 0.0

        def has_come():
            nonlocal message
            message = self._mailbox.take()
            return message is not None
        for waited in poll(has_come):
            if config.mgpu.timeout and waited - noted > config.mgpu.timeout:
                noted = waited
                rank_process.say('%s has waited %.0f s for batches from %s, and goes on waiting'
                                 % (self._ranks.name(self._ranks.rank), waited, self._ranks.name(0)))
        return message


def _read(groups, number):
    """Return at most so many groups, without waiting for long; and the error of the reader, which comes after them."""
    read, began = [], time.monotonic()
    try:
        while len(read) < number and (not read or time.monotonic() - began < PATIENCE):
            read.append(next(groups))
    except Exception as error:
        return read, error
    return read, None
