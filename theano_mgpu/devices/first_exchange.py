"""The first exchange by NCCL: its limit, and the outcome of one that did not end, which is kept for later processes.

On some machines NCCL connects cards that cannot read each other's memory, and then waits for ever: NCCL's issue 2079,
and issue 117 of its tests. So each process would wait anew. A file in Theano's folder of compiled code stands for the
cards, the start of the machine, the driver, NCCL, and the variables ``NCCL_*``: with others, NCCL is tried again.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Sequence, Tuple

from ..compat import cuda_libraries
from ..compat.cuda_libraries.shims import folder
from ..utils.files import whole_text

SECONDS, SLOWEST = 20, 1e8  # of an exchange, and bytes a second that are added to them
CONNECTING = 60             # seconds
BOOT = '/proc/sys/kernel/random/boot_id'  # Linux has it; settings of the BIOS change no earlier
CAUSE = ('Cards hang where they cannot read each other\'s memory, although the driver says so: set NCCL_P2P_DISABLE=1, '
         'or turn off Access Control Services (ACS) of the PCIe bridges, or the IOMMU')
KEPT = ('in an earlier process, %s. NCCL is tried again once this machine was started again, or the driver, NCCL or a '
        'variable NCCL_* has changed, or %s is deleted')

Devices = Sequence[Tuple[str, str]]  # the host of each device, and its PCI bus id


def limit(n_bytes: float) -> float:
    """Return how many seconds the first exchange of some bytes may take."""
    return SECONDS + n_bytes / SLOWEST


def outcome(devices: Devices) -> str:
    """Return why these devices are not connected again, as an earlier process has noted; '' if it has not."""
    with contextlib.suppress(OSError):
        return Path(_file(devices)).read_text()
    return ''


def keep(devices: Devices, why: str) -> None:
    """Keep the outcome for later processes, if the folder can be written."""
    path = _file(devices)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with whole_text(path) as file:
            file.write(KEPT % (why, path))


def forget(devices: Devices) -> None:
    """Have these devices be connected again."""
    with contextlib.suppress(OSError):
        os.remove(_file(devices))


def _file(devices):
    versions = [cuda_libraries.survey().libraries[name].version for name in ('libcuda.so', 'libnccl.so')
                if name in cuda_libraries.survey().libraries]
    boot = Path(BOOT).read_text() if os.path.exists(BOOT) else ''
    variables = sorted(each for each in os.environ.items() if each[0].startswith('NCCL_'))
    key = repr((list(devices), boot, variables, versions))
    return os.path.join(folder(), 'nccl-%s.txt' % hashlib.sha256(key.encode()).hexdigest()[:16])
