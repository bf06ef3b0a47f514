"""NVML, NVIDIA's library that tells who uses a card, and how much; it finds cards by their PCI bus ids.

Each question is asked on a thread of its own: NVML hangs where the driver does, for example while a card is reset.
"""
from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, Iterable, List, NamedTuple, Tuple, TypeVar

from ..utils import rank_process

Answer = TypeVar('Answer')
LONGEST = 3.0    # seconds of an answer
MOST = 1 << 31   # numbers of processes
_hangs = False


class Use(NamedTuple):
    """The memory of a card, in bytes, and its utilisation in percent."""

    free: int
    total: int
    utilisation: int


def use(bus_id: str) -> Use | None:
    """Return the use of a card; None where NVML is missing or does not know the card, as of a slice of one (MIG)."""
    def read(library: Any, card: Any) -> Use:
        memory = library.nvmlDeviceGetMemoryInfo(card)
        return Use(memory.free, memory.total, library.nvmlDeviceGetUtilizationRates(card).gpu)
    return _ask_of(bus_id, read, None)


def load(bus_id: str) -> Tuple[List[int], int]:
    """Return the processes that compute on a card, and its free memory in bytes; none, and 0, if unknown."""
    unknown: Tuple[List[int], int] = [], 0
    return _ask_of(bus_id, lambda library, card: (_processes(library, card),
                                                  library.nvmlDeviceGetMemoryInfo(card).free), unknown)


def uses(bus_ids: Iterable[str]) -> List[Tuple[List[int], bool]]:
    """Return for each card the processes that compute on it, and whether it drives a display, if NVML tells."""
    unknown: Tuple[List[int], bool] = [], False
    return [_ask_of(bus_id, lambda library, card: (_processes(library, card),
                                                   bool(library.nvmlDeviceGetDisplayActive(card))), unknown)
            for bus_id in bus_ids]


def bus_ids() -> List[str]:
    """Return the PCI bus ids of all cards of this machine, also of those that CUDA does not see; none if unknown."""
    def read(library: Any) -> List[str]:
        handles = map(library.nvmlDeviceGetHandleByIndex, range(library.nvmlDeviceGetCount()))
        found = [library.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
        return [each.decode() if isinstance(each, bytes) else each for each in found]  # by the version of pynvml
    return _ask(read, [])


def is_kept_loaded(bus_id: str) -> bool | None:
    """Return whether the driver stays loaded while nobody uses a card (persistence mode); None if unknown."""
    return _ask_of(bus_id, lambda library, card: bool(library.nvmlDeviceGetPersistenceMode(card)), None)


def exists(process: int) -> bool:
    """Return whether there is a process, another user's, too. In a container, NVML has the numbers of the host."""
    try:
        if 0 < process < MOST:
            os.kill(process, 0)  # sends no signal
        return 0 < process < MOST
    except OSError as error:
        return isinstance(error, PermissionError)  # there is one, which /proc may hide


def _processes(library, handle):
    """Return the processes that compute on a card, as far as this process can know them."""
    return [each.pid for each in library.nvmlDeviceGetComputeRunningProcesses(handle) if exists(each.pid)]


def _ask_of(bus_id: str, read: Callable[[Any, Any], Answer], otherwise: Answer) -> Answer:
    """Return ``read(pynvml, card)``, as `_ask` does, of the card with a PCI bus id."""
    return _ask(lambda library: read(library, library.nvmlDeviceGetHandleByPciBusId(bus_id)), otherwise)


def _ask(read: Callable[[Any], Answer], otherwise: Answer) -> Answer:
    """Return ``read(pynvml)``; `otherwise` where NVML is missing, gives an error, hangs now, or has hung before."""
    global _hangs
    answers: List[Answer] = []

    def ask() -> None:
        # There is no module, or without NVIDIA's driver an NVMLError; an old NVML lacks functions.
        with contextlib.suppress(Exception):
            import pynvml
            pynvml.nvmlInit()
            with contextlib.suppress(pynvml.NVMLError):
                answers.append(read(pynvml))
            pynvml.nvmlShutdown()
    if not _hangs:
        thread = threading.Thread(target=ask, name='theano_mgpu NVML', daemon=True)
        thread.start()
        thread.join(LONGEST)
        _hangs = thread.is_alive()
        if _hangs:
            rank_process.note('NVML has not answered for %g s, and is not asked again: use and memory of cards are '
                              'unknown. Does nvidia-smi answer?' % LONGEST)
    return answers[0] if answers else otherwise
