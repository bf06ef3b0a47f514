"""Checks of `theano-mgpu doctor` of a container, a scheduler, the administrator's settings, MPI and devices."""
import os
import resource
import subprocess
import sys
import types

from theano_mgpu.cli.doctor import device_checks, machine_checks, mpi_checks, sums
from theano_mgpu.comm.allocation import Allocation
from theano_mgpu.devices import nvml
from theano_mgpu.devices.cards import Card
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.devices.nccl import BY_FLAG
from theano_mgpu.errors import MgpuError

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


def ran(stdout='size 2, total 3, hosts 1', stderr='', error=None):
    """Return a function in place of subprocess.run, whose program prints some text, or raises an error."""
    def run(command, **options):
        if error:
            raise error
        return types.SimpleNamespace(stdout=stdout + '\n', stderr=stderr)
    return run


def test_ranks_that_add_a_number(monkeypatch):
    """The finding names the library, and the cause in what mpirun prints."""
    monkeypatch.setattr(mpi_checks, 'installed', lambda name: '4.0')
    monkeypatch.setattr(mpi_checks.mpi_library, 'loaded', lambda: 'Open MPI v4.1.4\nand more')
    monkeypatch.setattr(mpi_checks, 'allocation', lambda: None)
    monkeypatch.setattr(mpi_checks, 'choose_start', lambda *arguments: types.SimpleNamespace(
        words=['mpirun'], command=lambda environment, words: ['mpirun', *words]))
    monkeypatch.setattr(subprocess, 'run', ran())
    assert mpi_checks.check_mpirun(CPU) == ('ok', 'mpirun: two processes start and add a number', '')
    monkeypatch.setattr(subprocess, 'run', ran('size 1, total 1, hosts 1', '----\nImportError: no libmpi\nthe end'))
    finding = mpi_checks.check_mpirun(CPU)
    assert finding.status == 'warn' and 'must belong to the same MPI' in finding.remedy
    assert finding.text == '2 processes of mpirun cannot add a number with Open MPI v4.1.4: ImportError: no libmpi'
    monkeypatch.setattr(subprocess, 'run', ran(error=subprocess.TimeoutExpired('mpirun', 60)))
    finding = mpi_checks.check_mpirun(CPU)
    assert finding[:2] == ('warn', '2 processes did not end within 60 s') and finding.remedy.endswith(': mpirun -c')


def test_ranks_of_an_allocation(monkeypatch):
    nodes = Allocation('Slurm', 'a,b', 2, [2, 1])
    monkeypatch.setattr(mpi_checks, 'installed', lambda name: '4.0')
    monkeypatch.setattr(mpi_checks, 'allocation', lambda: nodes)
    monkeypatch.setattr(mpi_checks, 'choose_start', lambda *arguments: types.SimpleNamespace(
        words=['srun'], command=lambda environment, words: ['srun', *words]))
    monkeypatch.setattr(subprocess, 'run', ran('size 3, total 6, hosts 2'))
    assert mpi_checks.check_mpirun(CPU)[:2] == ('ok', 'srun: 3 processes start and add a number, on 2 hosts')
    monkeypatch.setattr(subprocess, 'run', ran('size 3, total 6, hosts 1'))
    one_host = 'warn', 'all 3 processes are on one host; the allocation has 2 (a,b)', mpi_checks.SPREAD
    assert mpi_checks.check_mpirun(CPU) == one_host
    monkeypatch.setattr(mpi_checks, 'allocation', lambda: nodes._replace(nodes=1, tasks=[1]))
    assert mpi_checks.check_mpirun(CPU).status == 'skip'

    def none():
        raise MgpuError('SLURM_TASKS_PER_NODE is odd. Set it')
    monkeypatch.setattr(mpi_checks, 'allocation', none)
    assert mpi_checks.check_mpirun(CPU) == ('warn', 'SLURM_TASKS_PER_NODE is odd', 'Set it')
    monkeypatch.setattr(mpi_checks, 'installed', lambda name: None)
    assert mpi_checks.check_mpirun(CPU).status == 'skip'


def test_the_ranks_of_this_job(monkeypatch):
    monkeypatch.setattr(mpi_checks, 'allocation', lambda: Allocation('Slurm', 'a,b', 2, [2, 1]))
    for name, number in ('size', 3), ('local_size', 2), ('rank', 1):
        monkeypatch.setattr(mpi_checks.mpi_environment, name, lambda number=number: number)
    library = types.SimpleNamespace(Get_library_version=lambda: 'MPICH Version: 4.0\nmore')
    monkeypatch.setattr(mpi_checks.mpi_library, 'import_mpi', lambda: library)
    assert mpi_checks.check_job(CPU) == (
        'ok', 'rank 1 of 3: something has started them, and MPICH Version: 4.0 finds them', '')
    monkeypatch.setattr(mpi_checks.mpi_environment, 'local_size', lambda: 3)
    assert mpi_checks.check_job(CPU).text.startswith('all 3 processes are on one host')

    def fails():
        raise MgpuError('MPI is broken. Install another')
    monkeypatch.setattr(mpi_checks.mpi_library, 'import_mpi', fails)
    assert mpi_checks.check_job(CPU) == ('fail', 'MPI is broken', 'Install another')


def test_a_convolution_by_cudnn(monkeypatch):
    """The finding has the reason that Theano gives, or the error that cuDNN raises."""
    dnn = types.SimpleNamespace(dnn_available=lambda name: True)
    monkeypatch.setitem(sys.modules, 'theano.gpuarray.dnn', dnn)
    monkeypatch.setattr('theano.gpuarray.dnn', dnn, raising=False)
    monkeypatch.setattr(device_checks, 'init', lambda contexts: None)
    cudnn = types.SimpleNamespace(problem='no cuDNN')
    monkeypatch.setattr(device_checks.cuda_libraries, 'find_cudnn', lambda: cudnn)
    context, = parse_context_map('dev0->cuda0')
    assert device_checks.check_convolution(CUDA, context) == ('skip', 'needs cuDNN', '')
    cudnn.problem = ''
    agrees = "cuda0: a convolution and its gradients agree with NumPy's"
    assert device_checks.check_convolution(CUDA, context) == ('ok', agrees, '')
    dnn.dnn_available = lambda name: False
    dnn.dnn_available.msg = 'a convolution fails'
    finding = device_checks.check_convolution(CUDA, context)
    assert finding.status == 'warn' and finding.text == 'a convolution fails; ' + device_checks.SLOWER

    def fails(name):
        raise RuntimeError('no memory\nat all')
    dnn.dnn_available = fails
    finding = device_checks.check_convolution(CUDA, context)
    assert finding[:2] == ('fail', 'no memory') and 'dnn.enabled=False' in finding.remedy


@pytest.mark.parametrize('chosen, reason, factor, found', [
    ('NCCL', 'by chance', 1, 'ok NCCL adds sums between a, b, as NumPy does'),
    ('the host', BY_FLAG, 1, 'ok sums go through the host: ' + BY_FLAG),
    ('the host', 'one device', 1, 'warn sums go through the host, which takes longer: one device'),
    (None, '', 1, 'skip sums go through the host: no CUDA device is among the contexts'),
    ('NCCL', 'by chance', 2, 'fail dot(x.T, x) ')])
def test_who_adds_sums(chosen, reason, factor, found, monkeypatch, contexts):
    def made(*arguments, **options):
        choice = types.SimpleNamespace(what='collectives', chosen=chosen, reason=reason)
        computed = types.SimpleNamespace(plan=types.SimpleNamespace(choices=[choice] if chosen else []),
                                         contexts=parse_context_map('a->cpu;b->cpu'))
        return type('Made', (), dict(vars(computed), __call__=lambda self, a: factor * a.T.dot(a)))()
    monkeypatch.setattr('theano_mgpu.function', made)
    finding = sums.check('a->cpu;b->cpu')
    contexts('cpu', 1)
    assert ('%s %s' % finding[:2]).startswith(found)
