"""Actions that rank 0 takes for all ranks."""
from __future__ import annotations

from typing import Any, Callable

from theano import config

from ..errors import RankError
from .activities import FEED
from .collectives import broadcast_object
from .communicator import Communicator
from .failures import known_to_all, packed, unpacked
from .mailbox import SENT, WRITTEN
from .waiting import REMEDY, poll


def on_rank_0(ranks: Communicator, act: Callable[[], Any]) -> Any:
    """Act on rank 0 alone; the other ranks wait for it, and every rank has to make the call.

    Parameters
    ----------
    ranks : Communicator
    act : callable
        A function without arguments, which must not exchange anything with other ranks.

    Returns
    -------
    object
        The picklable result of ``act()`` on rank 0.

    Raises
    ------
    Exception
        The exception that ``act()`` raised, on every rank.
    """
    ranks.divided.consolidate()
    result: Any = None
    error: BaseException | None = None
    if ranks.rank == 0:
        try:
            result = act()
        except Exception as failure:  # raised below, once the other ranks know
            error = failure
    if ranks.size > 1:
        result, package = broadcast_object(ranks, (result, error and packed(error)))
        error = error or package and unpacked(package, 'rank 0 failed')
    if error is not None:
        raise known_to_all(error)
    return result


def sent_by_rank_0(ranks: Communicator, act: Callable[[], Any]) -> Any:
    """Return the result of ``act()`` on rank 0, as `on_rank_0` does, but rank 0 does not wait for the others."""
    if ranks.size == 1:
        return act()
    if ranks.rank == 0:
        return _act_and_post(ranks, act, None, SENT)
    posted = _posted_by_rank_0(ranks, None, SENT, 'send a value')
    if posted is not None:
        return posted[0]
    return ranks.handshake((FEED,))  # rank 0 does something else: an error


def write_on_rank_0(ranks: Communicator, path: str, write: Callable[[], Any]) -> None:
    """Write a file on rank 0; another rank that makes the same call goes on once the file is written.

    Rank 0 does not wait, so that a script may call it on rank 0 alone. A rank whose file rank 0 does not write at the
    same place of the script writes it itself.

    Parameters
    ----------
    ranks : Communicator
    path : str
        An absolute path.
    write : callable
        A function without arguments.

    Raises
    ------
    Exception
        The exception that ``write()`` raised; as for `on_rank_0` on the other ranks.
    RankError
        If rank 0 neither writes the file nor goes on.
    """
    ranks.divided.consolidate()
    if ranks.size == 1:
        write()
    elif ranks.rank == 0:
        _act_and_post(ranks, write, path, WRITTEN)
    elif _posted_by_rank_0(ranks, path, WRITTEN, 'write %s' % path) is None:
        write()


def _act_and_post(ranks, act, subject, tag):
    """Act on rank 0, and send the other ranks the result, or the error."""
    result = package = None
    try:
        result = act()
    except BaseException as error:
        package = packed(error)
        known_to_all(error)
        raise
    finally:
        for rank in range(1, ranks.size):
            ranks.mailbox.post(rank, (subject, ranks.n_handshakes, result, package), tag)
    return result


def _posted_by_rank_0(ranks, subject, tag, deed):
    """Wait for rank 0's result, and return it in a tuple; None if rank 0 has gone on without it."""
    for waited in poll(lambda: False):
        # Rank 0's messages come in the order in which it sent them: once it is at the next handshake, a message that it
        # has not posted before will not come.
        has_gone_on = ranks.mailbox.has_gone_on(0)
        taken = ranks.mailbox.take(tag)
        if taken:
            posted_subject, n_handshakes, result, package = taken[1]
            if (posted_subject, n_handshakes) == (subject, ranks.n_handshakes):
                if package is not None:
                    raise known_to_all(unpacked(package, '%s failed to %s' % (ranks.name(0), deed)))
                return (result,)
        elif has_gone_on:
            return None
        elif config.mgpu.timeout and waited > config.mgpu.timeout:
            raise RankError('%s has waited %.0f s for %s to %s. Make the call on every rank, or on rank 0 '
                            'alone; %s' % (ranks.name(ranks.rank), waited, ranks.name(0), deed, REMEDY))
    return None
