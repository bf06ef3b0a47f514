"""Checks of `theano-mgpu doctor` of a container, a scheduler and the administrator's settings."""
import os
import resource
import subprocess
import sys
import types

from theano_mgpu.cli.doctor import device_checks, machine_checks
from theano_mgpu.devices import nvml
from theano_mgpu.devices.cards import Card
from theano_mgpu.devices.context_map import parse_context_map

import pytest

CUDA = types.SimpleNamespace(needs=lambda *kinds: 'cuda' in kinds)
CPU = types.SimpleNamespace(needs=lambda *kinds: False)
SHARED = "from theano_mgpu.cli.doctor import machine_checks as m; print(*m.check_shared_memory(None), sep='|')"


@pytest.mark.skipif(os.getuid() != 0, reason='only root may mount a file system')
def test_a_container_with_64_mb_of_shared_memory():
    """NCCL between processes ended with "unhandled system error", and nothing named /dev/shm."""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(['unshare', '-m', 'sh', '-c', mount, 'sh', sys.executable, '-c', SHARED], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    if done.returncode:
        pytest.skip('no file system may be mounted here: ' + done.stderr[-80:])
    status, text, remedy = done.stdout.strip().split('|')
    assert status == 'warn' and text.startswith('/dev/shm has 64.0 MiB') and '"bus error"' in text
    assert '--shm-size=1g' in remedy and '--ipc=host' in remedy


def test_shared_memory_that_is_large_or_missing(monkeypatch):
    monkeypatch.setattr(machine_checks, 'SHARED', '/')
    monkeypatch.setattr(machine_checks, 'ENOUGH', 1)
    assert machine_checks.check_shared_memory(CPU).status == 'ok'
    monkeypatch.setattr(machine_checks, 'SHARED', '/no/such/folder')
    assert machine_checks.check_shared_memory(CPU).status == 'skip'


def test_what_bounds_the_cores(monkeypatch):
    monkeypatch.setattr('theano_mgpu.utils.processor.usable', lambda: {0, 1, 2})
    monkeypatch.setattr('theano_mgpu.utils.processor.quotas', lambda: iter([1.5]))
    monkeypatch.setattr('os.cpu_count', lambda: 8)
    monkeypatch.setenv('OMP_NUM_THREADS', '2')
    text = machine_checks.check_cores(CPU).text
    assert 'to use, bounded by OMP_NUM_THREADS and a quota (docker run --cpus) and an affinity' in text
    monkeypatch.setattr('os.cpu_count', lambda: 3)
    monkeypatch.setattr('theano_mgpu.utils.processor.quotas', lambda: iter([]))
    monkeypatch.delenv('OMP_NUM_THREADS')
    assert machine_checks.check_cores(CPU).text.endswith(' to use')


def test_limits_that_cuda_and_infiniband_meet(monkeypatch):
    none = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_AS: (none, none), resource.RLIMIT_MEMLOCK: (64 << 10, none)}
    monkeypatch.setattr('resource.getrlimit', limits.get)
    monkeypatch.setattr(machine_checks, 'INFINIBAND', '/no/such/folder')
    assert machine_checks.check_limits(CUDA).status == 'ok'
    monkeypatch.setattr(machine_checks, 'INFINIBAND', '/')
    finding = machine_checks.check_limits(CPU)
    assert finding.status == 'warn' and 'ulimit -l is 64.0 KiB' in finding.text and 'memlock=-1' in finding.remedy
    limits[resource.RLIMIT_AS] = 1 << 35, none
    assert 'ulimit -v is 32.0 GiB' in machine_checks.check_limits(CUDA).text
    assert 'ulimit -v' not in machine_checks.check_limits(CPU).text


def test_cards_that_tasks_hide_from_each_other_and_a_driver_that_is_unloaded(monkeypatch):
    there = [Card('cuda%d' % i, 'A100', '0000:0%d:00.0' % i, i) for i in range(2)]
    kept = {there[0].bus_id: True, there[1].bus_id: False}
    monkeypatch.setattr(machine_checks.cards, 'cards', lambda: there)
    monkeypatch.setattr(nvml, 'is_kept_loaded', kept.get)
    finding = machine_checks.check_cards(CUDA)
    assert finding.status == 'warn' and 'persistence is off (cuda1)' in finding.text
    assert 'nvidia-smi -pm 1' in finding.remedy
    kept[there[1].bus_id] = None  # NVML does not tell
    assert machine_checks.check_cards(CUDA) == ('ok', 'this process sees 2 cards', '')
    del there[1]
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    monkeypatch.setattr(machine_checks, 'local_size', lambda: 4)
    finding = machine_checks.check_cards(CUDA)
    assert 'each of the 4 processes of this host sees one card' in finding.text and '--gpu-bind=none' in finding.remedy
    there.clear()
    assert machine_checks.check_cards(CPU).status == 'skip'


def test_a_sum_that_hangs_does_not_stop_the_doctor(monkeypatch):
    monkeypatch.setattr(device_checks, 'LONGEST', .1)  # the process takes longer to start
    finding = device_checks.check_collectives(types.SimpleNamespace(contexts=parse_context_map('a->cpu;b->cpu')))
    assert finding.status == 'fail' and 'has not ended within 0.1 s' in finding.text
    assert 'mgpu.collectives=host' in finding.remedy
