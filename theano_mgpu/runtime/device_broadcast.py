"""New values of a divided update: the device that has computed one sends it to all others by NCCL."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from ..comm.activities import GATHER
from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..devices.failures import FailureExplained
from ..devices.nccl import BROADCAST, NO_COPIES, Collectives, communicator_of
from ..devices.nccl_library import DTYPES
from ..exchange.devices import LossExplained
from ..plan import DeviceBroadcast
from .divided_update import check_shape
from .replicas.replicated import Replicated, replicated


class DeviceBroadcasts:
    """The broadcasts of a plan."""

    def __init__(self, planned: Sequence[DeviceBroadcast], ranks: Communicator, memories: Any) -> None:
        self._ranks, self._memories = ranks, memories
        self._each = [(communicator_of(each.contexts, ranks.size),
                       {replicated(variable): owner for variable, owner in each.owners.items()}) for each in planned]

    def start(self, values: Mapping[Replicated, Any]) -> dict[Replicated, tuple[Sequence[Context], Sequence[Any]]]:
        """Begin to send new values, some of other processes, if NCCL works on every rank. Each rank has to call it.

        Return for each variable the contexts of this process, and the value on each, which may still be under way. The
        dict is empty if NCCL does not work.
        """
        works = all(communicator.is_verified and not communicator.has_failed for communicator, _ in self._each)
        # Memory is allocated before other ranks begin to wait for this one.
        prepared = [self._on_devices(*each, values) for each in self._each] if works else []
        if self._ranks.size > 1:
            works = bool(self._ranks.handshake((GATHER,), [works]).all())
        sent: dict[Replicated, tuple[Sequence[Context], Sequence[Any]]] = {}
        for (communicator, owners), devices in zip(self._each if works else [], prepared):
            self._enqueue(communicator, owners, devices)
            sent.update((variable, (communicator.contexts, on)) for variable, on in zip(owners, zip(*devices)))
        return sent

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
                check_shape(variable, value, old)
            like = old if value is None else value
            return memory.contiguous(value) if place == owner else memory.empty(like.shape, like.dtype)
        devices = []
        for i, context in enumerate(communicator.contexts):
            with FailureExplained(i, context, 'update'):
                memory, place = self._memories[context], communicator.first + i
                devices.append([array_on(memory, place, *each) for each in owners.items()])
        return devices
