"""New values of a sharded update: each process, or device, computes some of them, and sends what others need."""
from __future__ import annotations

import itertools
from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from ..comm.activities import GATHER, READ
from ..comm.communicator import Communicator
from ..devices.exchange_operations import BROADCAST, NO_COPIES, Collectives
from ..devices.failures import FailureExplained
from ..devices.nccl import communicator_of
from ..devices.nccl_library import DTYPES
from ..devices.transfers import fetch
from ..errors import GraphError, RankError, named
from ..exchange.nccl_channel import LossExplained
from ..plan import DeviceBroadcast, ShardedUpdate
from .replicas.replicated import Replicated, Storages, replicated, storages_of


class UpdateOwners:
    """The processes that have the new values of a sharded update.

    Values that the next step of every process needs, such as parameters, are sent in the step. The others, such as the
    state of the optimizer, stay where they were computed, until one of them is read: by `gather`, on every process.
    """

    def __init__(self, ranks: Communicator, divided: ShardedUpdate, broadcasts: Sequence[DeviceBroadcast]):
        self._ranks, self._n_shares = ranks, len(divided.shares)
        owned = [(replicated(v), owner) for owner, share in enumerate(divided.shares) for v in share]
        by_devices = {variable for each in broadcasts for variable in each.owners}
        self._sent = [(variable, owner) for variable, owner in owned
                      if variable.variable in divided.sent and variable.variable not in by_devices]
        self._left = [(variable, owner) for variable, owner in owned if variable.variable not in divided.sent]

    def exchange(self, values: dict[Replicated, Any]) -> dict[Replicated, np.ndarray]:
        """Return the new values of other processes, for the values of this one, on the host or on a device."""
        return self._gathered(self._sent, values) if self._sent else {}

    def leave(self) -> None:
        """Note that a step is committed: each process alone has the latest values of its share."""
        for variable, owner in self._left:
            variable.divide(self.gather, owner == self._ranks.rank)
        self._ranks.divided[self.gather] = None

    def gather(self) -> None:
        """Give every process the latest values of all shares. All processes have to call it at the same place."""
        if self._n_shares > self._ranks.size:
            raise RankError("%s is divided among %d ranks (update_on='sharded'), and this is a fork of one: read it on "
                            'every rank before the fork' % (named(self._left[0][0].variable), self._n_shares))
        self._ranks.handshake((READ,))
        values = {variable: variable.latest() for variable, owner in self._left if owner == self._ranks.rank}
        of_others = self._gathered(self._left, values)
        for variable, _ in self._left:
            variable.give(of_others.get(variable))
        self._ranks.divided.pop(self.gather, None)

    def _gathered(self, owned: Sequence[tuple[Replicated, int]], values: dict[Replicated, Any]):
        outdated = [variable.variable.container.storage[0] for variable, _ in owned]  # they have the right shape
        arrays = [fetch(_checked(variable, values[variable], old)) if owner == self._ranks.rank else old
                  for (variable, owner), old in zip(owned, outdated)]
        with self._ranks.single_thread:
            self._ranks.handshake((GATHER,))
            gathered = self._ranks.all_gather_owned(arrays, [owner for _, owner in owned])
        return {variable: value for (variable, owner), value in zip(owned, gathered) if owner != self._ranks.rank}


class DeviceBroadcasts:
    """New values of a sharded update: the device that has computed one sends it to all others by NCCL."""

    def __init__(self, planned: Sequence[DeviceBroadcast], ranks: Communicator, memories: Any) -> None:
        self._ranks, self._memories = ranks, memories
        self._each = [(communicator_of(each.contexts, ranks.size),
                       {replicated(variable): owner for variable, owner in each.owners.items()}) for each in planned]
        self._storages = [storages_of(list(owners), communicator.contexts) for communicator, owners in self._each]

    def start(self, values: Mapping[Replicated, Any]) -> Iterator[tuple[Storages, list[Any]]]:
        """Send new values, and yield where they and the values of other processes go. Each rank has to call it.

        Values are on the devices of this process: all of them on the first one, then on the next. They may still be
        under way.
        """
        # Memory is allocated before other ranks begin to wait for this one.
        prepared = [self._on_devices(*each, values) for each in self._each]
        if self._ranks.size > 1:
            self._ranks.handshake((GATHER,))
        for each, devices, storages in zip(self._each, prepared, self._storages):
            self._enqueue(*each, devices)
            yield storages, list(itertools.chain(*devices))

    def _enqueue(self, communicator, owners, devices):
        addresses = np.array([[array.gpudata for array in arrays] for arrays in devices], 'uint64')
        sizes = [array.size * array.dtype.itemsize for array in devices[0]]
        collectives = Collectives(
            addresses, addresses, np.array(sizes, 'uint64'), np.full(len(sizes), DTYPES['uint8'], 'int32'),
            np.full(len(sizes), BROADCAST, 'int32'), np.array(list(owners.values()), 'int32'))
        with LossExplained(communicator, {}):
            communicator.exchange(NO_COPIES, collectives)

    def finish(self) -> None:
        """Wait until all devices have the values; raise an ExchangeError, or a ReplicaError for a lost device."""
        for communicator, _ in self._each:
            with LossExplained(communicator, {}):
                communicator.wait()

    def _on_devices(self, communicator, owners, values):
        """Return the arrays of each device of this process: the values that it owns, and memory for the others."""
        def array_on(memory, place, variable, owner):
            value, old = values.get(variable), variable.variable.container.storage[0]
            if self._ranks.size > 1 and value is not None:
                _checked(variable, value, old)
            like = old if value is None else value
            return memory.contiguous(value) if place == owner else memory.empty(like.shape, like.dtype)
        devices = []
        for i, context in enumerate(communicator.contexts):
            with FailureExplained(i, context, 'update'):
                memory, place = self._memories[context], communicator.first + i
                devices.append([array_on(memory, place, *each) for each in owners.items()])
        return devices


def _checked(variable: Replicated, value: Any, old: Any) -> Any:
    """Return a new value; raise a GraphError if it has another shape than the old one, which other processes expect."""
    if value.shape != old.shape:
        raise GraphError("the update of %s changes its shape from %s to %s, which other processes do not know: use "
                         "update_on='device'" % (named(variable.variable), old.shape, value.shape))
    return value
