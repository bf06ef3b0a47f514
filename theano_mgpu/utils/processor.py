"""The processor of this host, as Linux describes it, and how much of it this process may use."""
from __future__ import annotations

import contextlib
import itertools
import math
import os
from pathlib import Path
from typing import Iterator

CPUINFO = '/proc/cpuinfo'  # Linux has it
# A processor of Linux is a hardware thread. All threads of a core have the same list.
SIBLINGS = '/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list'
CGROUPS, CGROUP = '/sys/fs/cgroup', '/proc/self/cgroup'


def description() -> str:
    """Return Linux's description of the first core, but for its speeds, which vary; empty where there is none."""
    with contextlib.suppress(OSError), open(CPUINFO) as file:
        return ''.join(line for line in itertools.takewhile(str.strip, file)
                       if not line.lower().startswith(('cpu mhz', 'bogomips')))
    return ''


def threads() -> int:
    """Return how many threads this process may run at once, by its affinity; fewer where OMP_NUM_THREADS says so."""
    wished = os.environ.get('OMP_NUM_THREADS', '').split(',')[0].strip()
    n = len(usable())
    return max(1, min(n, int(wished))) if wished.isdigit() else n


def cores() -> int:
    """Return how many physical cores this process may use at once.

    Its affinity, the quotas of its cgroups, which containers have, and OMP_NUM_THREADS bound them.
    """
    physical = {_siblings(each) for each in usable()}
    return max(1, math.ceil(min(len(physical), threads(), *quotas())))


def usable() -> set[int]:
    """Return the processors of Linux that this process may use."""
    affinity = getattr(os, 'sched_getaffinity', None)  # not on macOS
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))


def _siblings(processor):
    with contextlib.suppress(OSError):
        return Path(SIBLINGS % processor).read_text()
    return str(processor)


def quotas() -> Iterator[float]:
    """Yield the quotas of the cgroups that this process is in, of both versions of cgroups, in processors."""
    with contextlib.suppress(OSError):
        for line in Path(CGROUP).read_text().splitlines():
            _, controllers, path = line.split(':', 2)
            root = Path(CGROUPS, controllers)
            for folder in itertools.accumulate(Path(path.lstrip('/')).parts, Path.joinpath, initial=root):
                yield from _quota_of(folder)


def _quota_of(folder):
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        quota, period = (folder / 'cpu.max').read_text().split()
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = [int((folder / name).read_text()) for name in ('cpu.cfs_quota_us', 'cpu.cfs_period_us')]
        if quota > 0:
            yield quota / period
