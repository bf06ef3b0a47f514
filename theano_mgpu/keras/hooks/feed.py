"""Batches of generators and Sequences that rank 0 makes, on every rank of a job.

Only rank 0 asks the generator of the user. Whatever it draws at random, in whatever thread, the other ranks take the
batch that rank 0 takes, and so does each error and the end of the data. The functions that the generator calls are
computed by its process alone.
"""
from __future__ import annotations

import itertools
import threading
from typing import Any, Iterator

from ...comm.activities import FEED
from ...comm.alone import computing_alone
from ...comm.collectives import broadcast_object
from ...comm.communicator import Communicator
from ...comm.rank_0 import done_by_rank_0
from ...comm.rank_errors import known_to_all, packed, unpacked
from ...compat import keras_versions
from . import keras_loops

_next, _len = computing_alone()(next), computing_alone()(len)
ITEM, ANNOUNCED, ERROR = range(3)  # a message has a batch; or the batch came with the last message; or it has an error


class Feed:
    """A source of the batches of a loop in place of the user's, which rank 0 alone asks, also in threads of Keras's."""

    def __init__(self, ranks: Communicator, source: Any, enqueuer: Any = None) -> None:
        self._ranks, self._source, self._enqueuer = ranks, source, enqueuer
        self._thread = threading.get_ident()
        self.ahead: Any = None  # the batch after the current one, the same on every rank; None if it is not known

    def __reduce__(self):  # for processes that make batches
        return _same, (self._source,)

    def taken_from(self, enqueuer: Any, items: Iterator[Any]) -> FedIterator:
        """Return an iterator over the batches that the main thread takes from a queue of Keras's, on every rank."""
        return FedIterator(self._ranks, items, enqueuer)


class FedIterator(Feed, Iterator[Any]):
    """A Feed in place of an iterator or generator, or of the batches that come from a queue of Keras's, the `enqueuer`.

    The thread that trains takes the batch that rank 0 takes.
    """

    def __next__(self):
        if threading.get_ident() != self._thread:
            return _next(self._source)
        if keras_loops.running.batches is not None:
            keras_loops.running.batches.queue(self)
        return self._send() if self._ranks.rank == 0 else self._receive()

    def _send(self):
        try:
            item = _next(self._source)
        except BaseException as error:  # also SystemExit, and Ctrl-C, which is one of all ranks
            broadcast_object(self._ranks, (ERROR, packed(error), None), activity=FEED)
            known_to_all(error)
            raise
        kind = ANNOUNCED if self.ahead is item else ITEM
        self.ahead = self._enqueuer and next_of_queue(self._enqueuer)
        broadcast_object(self._ranks, (kind, None if kind == ANNOUNCED else item, self.ahead), activity=FEED)
        return item

    def _receive(self):
        kind, item, following = broadcast_object(self._ranks, activity=FEED)
        if kind == ERROR:
            raise known_to_all(unpacked(item, 'rank 0, which makes the batches of all ranks, raised it'))
        item, self.ahead = self.ahead if kind == ANNOUNCED else item, following
        return item


class FedSequence(Feed, keras_versions.sequence_class()):  # type: ignore[misc]  # a class of any Keras
    """A Feed in place of a Sequence, as long as rank 0's."""

    def __len__(self):
        if threading.get_ident() != self._thread:  # one of Keras's, on rank 0
            return _len(self._source)
        # Rank 0 does not wait: Keras's thread begins an epoch meanwhile.
        return done_by_rank_0(self._ranks, 'count its batches', lambda: _len(self._source))

    @computing_alone()
    def __getitem__(self, index):
        return self._source[index]

    def __iter__(self):
        """Iterate for ever: Keras would begin anew."""
        return FedIterator(self._ranks, itertools.chain.from_iterable(itertools.repeat(self._source)))

    @computing_alone()
    def on_epoch_end(self) -> None:
        if self._ranks.rank == 0:
            self._source.on_epoch_end()


def fed(ranks: Communicator, source: Any) -> Any:
    """Return a Feed in place of a generator or Sequence of a loop, on any rank; arrays are returned as they are."""
    if isinstance(source, Feed):
        return source
    if keras_versions.is_sequence(source):
        return FedSequence(ranks, source)
    if hasattr(source, '__next__'):
        return FedIterator(ranks, source)
    return source


def next_of_queue(enqueuer: Any) -> Any:
    """Return the next batch of a queue of Keras's, which stays in the queue; None if it is not made yet."""
    with enqueuer.queue.mutex:
        queue = enqueuer.queue.queue
        future = queue[0] if queue else None
    return future.get() if future is not None and future.ready() and future.successful() else None


def _same(source):
    return source
