"""A channel around the one of NCCL: its first sums are compared with the host's."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..comm.activities import ADD
from ..comm.collectives import all_gather_object
from ..comm.communicator import Communicator
from ..devices.context_map import HOST
from ..devices.transfers import fetch
from ..errors import warn
from ..utils.values import alike, beyond_rounding
from .devices import NcclChannel
from .host import HostChannel
from .orders import Parts


class Checked:
    """A channel whose first sums are compared with the host's: if they differ, or it fails, the host adds instead."""

    by_host = False

    def __init__(self, channel: NcclChannel, host: HostChannel, is_exact: bool, ranks: Communicator) -> None:
        self._channel, self._host, self._is_exact, self._ranks = channel, host, is_exact, ranks
        self._communicator = channel.communicator
        self._parts: Any = None
        self._by_host = False

    @property
    def is_ready(self) -> bool:
        """Return whether the channel can add the next sums, as far as this process knows."""
        return not self._communicator.has_failed

    def prepare(self, parts: Parts) -> None:
        """Take parts; in a process alone, begin to add them."""
        self._parts, self._by_host = parts, not self.is_ready
        if not self._by_host:
            self._channel.prepare(parts)
        if self._ranks.size == 1:
            self.add_over()

    def use_host(self) -> None:
        """Have the host add the parts, because a rank cannot use the channel any more."""
        self._channel.drop()
        self._by_host = True

    def add_over(self) -> None:
        """Add the parts, over the ranks, too, which have just had a handshake."""
        parts, self._parts = self._parts, None
        if not self._by_host and self._communicator.is_verified:
            self._channel.add_over()
            return
        if not self._by_host:
            error = self._verified(parts)
            if not error:
                return
            warn('NCCL does not work here: %s. From now on, sums go through the host, which takes longer; the flag '
                 'mgpu.collectives=host does so without a warning' % error)
            self.use_host()
        self._on_host(parts, is_read=True)

    def _on_host(self, parts, is_read=False):
        self._host.prepare(parts, is_read)
        if self._ranks.size > 1:
            self._ranks.handshake((ADD,))
        self._host.add_over()
        return self._host.views

    def _verified(self, parts):
        """Add by the channel and by the host; return how they differ, or an error, or an empty text."""
        error, is_lost = self._channel.trial()
        if is_lost and self._ranks.size == 1:  # a failure of the device, not of the channel
            return error
        errors = all_gather_object(self._ranks, error)
        if not any(errors):
            errors = all_gather_object(self._ranks, next(filter(None, self._differences(parts)), ''))
        error = next(filter(None, errors), '')
        if error:
            self._communicator.give_up()  # no device of this process waits for others any more
        self._communicator.is_verified = not error
        self._host.drop()  # it may not be needed again
        return error

    def _differences(self, parts):
        """Yield for each sum how it differs from the host's; an empty text if it does not."""
        scales = [0] * len(parts.like)
        if not self._is_exact:
            absolute = [[abs(fetch(array)) for array in part] for part in parts.arrays]
            scales = list(map(np.copy, self._on_host(parts._replace(arrays=absolute, contexts=[HOST] * len(absolute)))))
        n = max(1, len(parts.arrays)) * self._ranks.size  # a rank without samples has no part
        for i, (total, scale) in enumerate(zip(self._on_host(parts), scales)):
            found = list(map(fetch, self._channel.reduced.arrays(i)))
            if self._is_exact:
                yield '' if all(alike(its, total).all() for its in found) else 'a device has another sum than the host'
            elif any(its.tobytes() != found[0].tobytes() for its in found):
                yield 'the devices have different sums'
            elif found:
                error = beyond_rounding(found[0], total, scale, n)
                yield error and 'a sum differs from the sum on the host by %s, which is more than rounding' % error

    def taken(self) -> Sequence[Any]:
        """Return the sums for one step."""
        return (self._host if self._by_host else self._channel).taken()

    def finish(self) -> None:
        """Wait until the sums are there."""
        self._channel.finish()

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices."""
        self._parts = None
        self._channel.drop()
        self._host.drop()
