"""Actions that rank 0 takes for all ranks."""
from __future__ import annotations

from typing import Any, Callable

from ..errors import RankError
from ..options import present_flag
from .alone import is_alone
from .collectives import broadcast_object
from .communicator import Communicator
from .rank_errors import failing_together, known_to_all, packed, unpacked
from .waiting import REMEDY, poll


def on_rank_0(ranks: Communicator, act: Callable[[], Any]) -> Any:
    """Return the picklable result of ``act()`` on rank 0 alone, or raise its exception, on every rank.

    The other ranks wait for it, and every rank has to make the call. `act` exchanges nothing with other ranks.
    """
    ranks.consolidate()
    with failing_together(ranks):
        return broadcast_object(ranks, act() if ranks.rank == 0 else None)


def done_by_rank_0(ranks: Communicator, deed: str, act: Callable[[], Any]) -> Any:
    """Act on rank 0, as `on_rank_0` does, but rank 0 does not wait for the ranks that make the same call.

    So a script may make the call on rank 0 alone. Another rank acts itself if rank 0 does not at the same place, and
    raises a RankError if rank 0 does not go on, either. The deed, such as "write model.h5", tells actions apart.
    """
    if ranks.size == 1 or is_alone():
        return act()
    if ranks.rank == 0:
        result = package = None
        try:
            result = act()
            return result
        except BaseException as error:
            package = packed(error)
            known_to_all(error)
            raise
        finally:
            for rank in range(1, ranks.size):
                ranks.mailbox.post(rank, (deed, ranks.n_handshakes, result, package))
    for waited in poll(lambda: False):
        # Rank 0's messages come in the order in which it sent them: once it is at the next handshake, a message that it
        # has not posted before will not come.
        has_gone_on = ranks.mailbox.has_gone_on(0)
        taken = ranks.mailbox.take()
        if taken:
            done, n_handshakes, result, package = taken[1]
            if (done, n_handshakes) == (deed, ranks.n_handshakes):
                if package is not None:
                    raise known_to_all(unpacked(package, '%s failed to %s' % (ranks.name(0), deed)))
                return result
        elif has_gone_on:
            break
        elif present_flag('mgpu.timeout') and waited > present_flag('mgpu.timeout'):
            raise RankError('%s has waited %.0f s for %s to %s. Make the call on every rank, or on rank 0 '
                            'alone; %s' % (ranks.name(ranks.rank), waited, ranks.name(0), deed, REMEDY))
    return act()


def write_on_rank_0(ranks: Communicator, path: str, write: Callable[[], Any]) -> None:
    """Write a file, of an absolute path, on rank 0, see `done_by_rank_0`; another rank goes on once it is written."""
    ranks.consolidate()
    done_by_rank_0(ranks, 'write ' + path, write)
