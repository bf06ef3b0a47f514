"""Access of CUDA devices to each other's memory; without it, the driver moves copies between them through the host."""
from __future__ import annotations

import ctypes
import threading
from typing import Any, Sequence

import numpy as np

from ..errors import warn
from .cuda_driver import Driver, load_driver
from .discovery import decoded

# How copies go between two devices. On WRONG ones, the package has to take the way through the host itself: NCCL may
# give the devices access again.
DIRECT, STAGED, WRONG = 'directly', 'through the host', 'wrongly'
ALREADY_ENABLED = 704  # a code of the driver
TRIED = 1 << 20  # bytes
_paths: dict[frozenset[str], str] = {}  # by the PCI bus ids of two cards
_alone = threading.Lock()


def path(one: Any, other: Any) -> str:
    """Return how copies go between the devices of two pygpu contexts: `DIRECT`, `STAGED` or `WRONG`.

    The first call for two CUDA devices gives them access to each other's memory, where the driver can, and compares
    copies. If these are wrong, it takes the access back, and warns.
    """
    if one.kind != b'cuda' or other.kind != b'cuda':
        return STAGED
    cards = [decoded(each.unique_id) for each in (one, other)]
    key = frozenset(cards)
    if key not in _paths:
        with _alone:
            if key not in _paths:
                _paths[key] = _found(one, other, cards) if len(key) == 2 else DIRECT
    return _paths[key]


def _found(one: Any, other: Any, cards: Sequence[str]) -> str:
    driver = load_driver()
    first, second = map(driver.primary_context, cards)
    numbers = list(map(driver.device_at, cards))
    if not _can_access(driver, *numbers) or not _can_access(driver, *reversed(numbers)):
        return STAGED
    codes = [_call(driver, 'cuCtxEnablePeerAccess', *pair, 0) for pair in ((first, second), (second, first))]
    works = all(code in (0, ALREADY_ENABLED) for code in codes)
    if works and _copies(one, other, 1) and _copies(other, one, 2):
        return DIRECT
    for pair in ((first, second), (second, first)):
        _call(driver, 'cuCtxDisablePeerAccess', *pair)
    if not works:
        return STAGED
    warn('%s and %s copy wrong bytes to each other where they have direct access (CUDA peer access): their copies go '
         'through the host. NCCL may fail, too: set NCCL_P2P_DISABLE=1. On most such machines the IOMMU, or Access '
         'Control Services of a PCIe bridge (ACS), has to be turned off' % tuple(cards))
    return WRONG


def _can_access(driver: Driver, device: int, peer: int) -> bool:
    answer = ctypes.c_int()
    driver.call('cuDeviceCanAccessPeer', ctypes.byref(answer), device, peer)
    return bool(answer.value)


def _call(driver: Driver, name: str, context: int, peer: int, *flags: int) -> int:
    """Call a function in a context, and return the driver's code."""
    with driver.current(context):
        return driver.function(name)(peer, *flags)


def _copies(source: Any, target: Any, seed: int) -> bool:
    """Return whether random bytes arrive as they are."""
    from pygpu import gpuarray  # not installed on every machine without a GPU
    values = np.random.RandomState(seed).randint(0, 256, TRIED).astype('uint8')
    there = gpuarray.array(values, context=source)
    there.sync()
    return np.array_equal(there.transfer(target), values)
