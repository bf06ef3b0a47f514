"""Checks of `theano-mgpu doctor` of a container, a scheduler and the administrator's settings: cores, memory, cards."""
from __future__ import annotations

import os
import resource

from ...devices import cards, nvml
from ...utils import processor
from ...utils.mpi_environment import local_size
from ...utils.tables import bytes_text, counted
from .host_checks import OK, SKIP, WARN, Finding, Setup

SHARED = '/dev/shm'
ENOUGH = 1 << 28  # bytes of shared memory: NCCL takes some 10 MB for each pair of processes, MPI 4 MB a process
INFINIBAND = '/dev/infiniband'


def check_cores(setup: Setup) -> Finding:
    """Tell how many cores this process may use, and why not all."""
    usable = len(processor.usable())
    bounds = [name for name, is_one in (
        ('OMP_NUM_THREADS', processor.threads() < usable),
        ('a quota (docker run --cpus)', min(processor.quotas(), default=usable) < usable),
        ('an affinity (docker run --cpuset-cpus, taskset, a scheduler)', usable < (os.cpu_count() or 1))) if is_one]
    return Finding(OK, counted(processor.cores(), 'core') + ' to use' + ', bounded by ' * bool(bounds) +
                   ' and '.join(bounds))


def check_shared_memory(setup: Setup) -> Finding:
    """Check that the memory that processes share has room: 64 MB in a container."""
    try:
        status = os.statvfs(SHARED)
    except OSError:
        return Finding(SKIP, 'there is no %s: processes share memory in other ways' % SHARED)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = '%s has %s, %s of it free' % (SHARED, bytes_text(total), bytes_text(free))
    if free < ENOUGH:
        return Finding(WARN, text + ': NCCL between processes, MPI, and workers of data may end with "bus error" or '
                       '"unhandled system error"', 'docker run --shm-size=1g, or --ipc=host; in Kubernetes an emptyDir '
                       'with medium: Memory at %s' % SHARED)
    return Finding(OK, text)


def check_limits(setup: Setup) -> Finding:
    """Check the limits of this process (ulimit) that CUDA and NCCL meet."""
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if setup.needs('cuda') and addresses != resource.RLIM_INFINITY:
        return Finding(WARN, 'ulimit -v is %s: CUDA reserves more addresses than the host and the cards have memory, '
                       'and gives "out of memory"' % bytes_text(addresses), 'ulimit -v unlimited')
    if os.path.isdir(INFINIBAND) and locked != resource.RLIM_INFINITY:
        return Finding(WARN, 'ulimit -l is %s: NCCL and MPI over InfiniBand need page-locked memory'
                       % bytes_text(locked), 'docker run --ulimit memlock=-1; or ulimit -l unlimited')
    return Finding(OK, 'ulimit -v and -l are no obstacle')


def check_cards(setup: Setup) -> Finding:
    """Check that the driver stays loaded, and that processes of a job on this host see each other's cards."""
    seen = cards.cards()
    off = [card.device for card in seen if nvml.is_kept_loaded(card.bus_id) is False]
    if local_size() > 1 and len(seen) == 1 and 'SLURM_JOB_ID' in os.environ:
        return Finding(WARN, 'each of the %d processes of this host sees one card: where the others are hidden, NCCL '
                       'fails, or goes through the host' % local_size(), 'srun --gpu-bind=none, and --gpus-per-node in '
                       'place of --gpus-per-task')
    if off:
        return Finding(WARN, 'persistence is off (%s): the first use of a card takes seconds each time, and its '
                       'settings are lost in between' % ', '.join(off), 'As root: systemctl enable --now '
                       'nvidia-persistenced, or nvidia-smi -pm 1')
    return Finding(OK, 'this process sees %s' % counted(len(seen), 'card')) if seen else Finding(SKIP, 'none')
