"""New values of a divided update: the device that has computed one sends it to all others by NCCL."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from ..comm.activities import GATHER
from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..devices.contexts import gpu_context
from ..devices.nccl import BROADCAST, DTYPES, Collectives, Copies, communicator_of
from ..errors import ExchangeError
from ..plan import DeviceBroadcast
from .device_sums import contiguous, named
from .divided_update import check_shape
from .replicas.replicated import Replicated, replicated

NO_COPIES = Copies(*[np.empty(0, 'uint64') for _ in Copies._fields])


class DeviceBroadcasts:
    """The broadcasts of a plan.

    Parameters
    ----------
    planned : list of DeviceBroadcast
    ranks : Communicator
    """

    def __init__(self, planned: Sequence[DeviceBroadcast], ranks: Communicator) -> None:
        self._ranks = ranks
        self._each = [(communicator_of(each.contexts, ranks.size),
                       {replicated(variable): owner for variable, owner in each.owners.items()}) for each in planned]

    def are_possible(self) -> bool:
        """Return whether NCCL works on every rank. Each rank has to ask."""
        works = all(communicator.is_verified and not communicator.has_failed for communicator, _ in self._each)
        return works if self._ranks.size == 1 else bool(self._ranks.handshake((GATHER,), [works]).all())

    def start(self, values: Mapping[Replicated, Any]) -> dict[Replicated, tuple[Sequence[Context], Sequence[Any]]]:
        """Begin to send new values.

        Parameters
        ----------
        values : dict of Replicated to pygpu.gpuarray.GpuArray
            Those that this process has computed, at least.

        Returns
        -------
        dict of Replicated to (list of Context, list of pygpu.gpuarray.GpuArray)
            For each variable the devices of this process, and the value on each. It may still be under way.
        """
        sent: dict[Replicated, tuple[Sequence[Context], Sequence[Any]]] = {}
        for communicator, owners in self._each:
            arrays = [self._on_devices(communicator, variable, owner, values) for variable, owner in owners.items()]
            addresses = np.array([[array.gpudata for array in of_device] for of_device in zip(*arrays)], 'uint64')
            n = len(arrays)
            communicator.exchange(NO_COPIES, Collectives(
                addresses, addresses, np.array([first.size * first.itemsize for first, *_ in arrays], 'uint64'),
                np.full(n, DTYPES['uint8'], 'int32'), np.full(n, BROADCAST, 'int32'),
                np.array(list(owners.values()), 'int32')))
            sent.update((variable, (communicator.contexts, on)) for variable, on in zip(owners, arrays))
        return sent

    def finish(self) -> None:
        """Wait until all devices have the values.

        Raises
        ------
        ReplicaError
            If a device is lost.
        ExchangeError
            If a broadcast has failed otherwise.
        """
        for communicator, _ in self._each:
            try:
                communicator.wait()
            except ExchangeError as error:
                raise named(error, communicator, {}) from error.__cause__

    def _on_devices(self, communicator, variable, owner, values):
        """Return the value on its owner, and new memory on the other devices of this process."""
        from pygpu import gpuarray
        value = like = values.get(variable)
        if self._ranks.size > 1:
            like = variable.variable.container.storage[0]  # of the shape that the other ranks know
            if value is not None:
                check_shape(variable, value, like)
        return [contiguous(context, value) if communicator.first + i == owner else
                gpuarray.empty(like.shape, like.dtype, context=gpu_context(context))
                for i, context in enumerate(communicator.contexts)]
