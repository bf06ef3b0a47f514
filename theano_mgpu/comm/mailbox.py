"""Messages from one rank of an MPI job to another one, beside the collectives."""
from __future__ import annotations

from typing import Any, ContextManager

HANDSHAKE, MAIL, PARTS = range(0x6d67, 0x6d67 + 3)  # tags of messages; PARTS is for collectives


class Mailbox:
    """The picklable messages that this rank posts to others, and takes from them."""

    def __init__(self, mpi: Any, single_thread: ContextManager) -> None:
        self._mpi, self._comm, self._single_thread = mpi, mpi.COMM_WORLD, single_thread
        self._unsent: list[Any] = []
        self._incoming: Any = None  # the sender, and MPI's request

    def post(self, rank: int, message: Any) -> None:
        """Send a picklable message to a rank, without waiting for it to be taken."""
        with self._single_thread:
            self._unsent = [request for request in self._unsent if not request.Test()]
            self._unsent.append(self._comm.isend(message, rank, MAIL))

    def take(self) -> tuple[int, Any] | None:
        """Return the next message for this rank, ``(sender, message)``, or None if none has come yet."""
        with self._single_thread:
            if self._incoming is None:
                status = self._mpi.Status()
                matched = self._comm.improbe(tag=MAIL, status=status)
                if matched is None:
                    return None
                self._incoming = status.source, matched.irecv()
            source, request = self._incoming
            has_come, message = request.test()
            if not has_come:
                return None
            self._incoming = None
            return source, message

    def has_gone_on(self, rank: int) -> bool:
        """Return whether a rank is at the next handshake already. Its messages from before have come then, too."""
        return self._comm.iprobe(rank, HANDSHAKE)
