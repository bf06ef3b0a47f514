"""Messages from one rank of an MPI job to another one, beside the collectives."""
from __future__ import annotations

from typing import Any, ContextManager

# Tags of messages: handshakes; posted batches, and results of actions; parts of collectives.
HANDSHAKE = 0x6d67
MAIL, DONE, PARTS = range(HANDSHAKE + 1, HANDSHAKE + 4)


class Mailbox:
    """The picklable messages that this rank posts to others, and takes from them."""

    def __init__(self, mpi: Any, single_thread: ContextManager) -> None:
        self._mpi, self._comm, self._single_thread = mpi, mpi.COMM_WORLD, single_thread
        self._unsent: list[Any] = []
        self._incoming: dict[int, tuple[int, Any]] = {}  # by tag: the sender, and MPI's request

    def post(self, rank: int, message: Any, tag: int = MAIL) -> None:
        """Send a picklable message to a rank, without waiting for it to be taken."""
        with self._single_thread:
            self._unsent = [request for request in self._unsent if not request.Test()]
            self._unsent.append(self._comm.isend(message, rank, tag))

    def take(self, tag: int = MAIL) -> tuple[int, Any] | None:
        """Return the next message for this rank, ``(sender, message)``, or None if none has come yet."""
        with self._single_thread:
            if tag not in self._incoming:
                status = self._mpi.Status()
                matched = self._comm.improbe(tag=tag, status=status)
                if matched is None:
                    return None
                self._incoming[tag] = status.source, matched.irecv()
            source, request = self._incoming[tag]
            has_come, message = request.test()
            if not has_come:
                return None
            del self._incoming[tag]
            return source, message

    def has_gone_on(self, rank: int) -> bool:
        """Return whether a rank is at the next handshake already. Its messages from before have come then, too."""
        return self._comm.iprobe(rank, HANDSHAKE)
