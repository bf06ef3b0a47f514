"""The copies and collectives of an exchange between devices, as values."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

BROADCAST, MESSAGE, EVERY = -1, -2, -1  # ops, and a root, as in nccl.cpp


class Copies(NamedTuple):
    """Copies on each device: addresses, a row for each device, and the bytes of each copy.

    Addresses of 0 stand for a copy that a device leaves out.
    """

    to: np.ndarray
    source: np.ndarray
    bytes: np.ndarray


NO_COPIES = Copies(*[np.empty(0, 'uint64') for _ in Copies._fields])


class Collectives(NamedTuple):
    """Reductions, broadcasts and messages of devices: addresses, a row for each device; the rest is the same on each.

    `dtypes` and `ops` have the numbers of `nccl_library`; an op may be `BROADCAST` or `MESSAGE`. The device that
    alone gets a reduction, or that sends a broadcast or a message, is its root: `roots` has its place among the devices
    of all ranks. The root of a reduction that all devices get is `EVERY`.

    `targets` has the device that receives a message; where there are none, it may be empty. Only the root of a message
    has an address to send, and only its target one to receive; the others are 0. Messages from one device to another
    are received in their order.
    """

    send: np.ndarray
    receive: np.ndarray
    counts: np.ndarray
    dtypes: np.ndarray
    ops: np.ndarray
    roots: np.ndarray
    targets: np.ndarray = np.empty(0, 'int32')
