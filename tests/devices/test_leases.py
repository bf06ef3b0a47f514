"""Leases: which processes take which devices, and the end of processes, however they end."""
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import theano_mgpu as mgpu
from theano_mgpu.devices import contexts, leases, nvml
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import rank_process

import pytest
from support.search_path import search_path

FOUR = parse_context_map('a->cpu;b->cpu;c->cpu;d->cpu')
GPUS = parse_context_map('a->opencl0:0;b->opencl0:1;c->opencl0:2')
# A process that takes a device, says which, and waits.
HOLDER = """
import sys
from theano_mgpu.devices import leases
from theano_mgpu.devices.context_map import parse_context_map
print(leases.take(parse_context_map(sys.argv[1]), wait='wait' in sys.argv)[0].name, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, 'folder', lambda: str(tmp_path / ('theano_mgpu-%d' % os.getuid())))
    monkeypatch.setattr(leases, '_own', None)
    monkeypatch.delenv(leases.RUN, raising=False)
    yield tmp_path / ('theano_mgpu-%d' % os.getuid())
    leases._forget()
    os.environ.pop(leases.RUN, None)


class Holder:
    """A process with a lease."""

    def __init__(self, folder, *words, text='a->cpu;b->cpu;c->cpu;d->cpu', **environment):
        env = dict(os.environ, TMPDIR=str(folder.parent), PYTHONPATH=search_path(), **environment)
        self.process = subprocess.Popen([sys.executable, '-c', HOLDER, text, *words], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def name(self):
        return self.process.stdout.readline().strip()

    def end(self, number=None):
        if number is None:
            return self.process.communicate('\n')[1]
        self.process.send_signal(number)
        return self.process.communicate()[1]


@pytest.mark.slow
def test_processes_take_different_devices_and_the_kernel_frees_them(folder):
    """One ends, one is killed, one is killed by SIGTERM: no lease outlives its process, and no file stays."""
    holders = [Holder(folder, 'wait') for _ in range(4)]
    try:
        assert sorted(holder.name() for holder in holders) == list('abcd')
        assert len(leases.occupants()) == 4 and leases.take(FOUR) == FOUR[:1]
        leases.announce([])
        holders[0].end()
        holders[1].end(signal.SIGKILL)
        holders[2].end(signal.SIGTERM)
        left, = leases.occupants()
        assert left.pid == holders[3].process.pid
    finally:
        for holder in holders:
            holder.end(signal.SIGKILL)
    assert leases.occupants() == []
    assert os.listdir(folder) == [leases._own.name]


@pytest.mark.slow
def test_one_that_waits_takes_the_first_that_is_free(folder):
    """It prints a note after a while; one that does not wait shares a device."""
    holders = [Holder(folder) for _ in range(2)]
    names = {holder.name(): holder for holder in holders}
    try:
        assert len(names) == 2
        pair = 'a->cpu;b->cpu'
        others = [Holder(folder, text=pair), Holder(folder, 'wait', text=pair)]
        shared = others[0].name()
        others[0].end()
        time.sleep(1)
        names.pop('b').end()
        assert shared in 'ab' and others[1].name() == 'b'
        others[1].end()
    finally:
        for holder in names.values():
            holder.end()


def test_more_processes_than_devices_share_evenly(monkeypatch):
    others = []
    monkeypatch.setattr(leases, '_hold', lambda files, contexts: others.append(leases.Lease('lease-x', -1)) or
                        others[-1].contexts.extend(contexts))
    read = leases._freest
    monkeypatch.setattr(leases, '_freest', lambda choice, files, opened: read(choice, others, opened))
    assert ''.join(leases.take(FOUR)[0].name for _ in range(9)) == 'abcdabcda'
    others.clear()
    assert [''.join(context.name for context in leases.take(FOUR, 2)) for _ in range(3)] == \
        ['ab', 'cd', 'ab']


def test_other_programs_and_free_memory_count(monkeypatch):
    """NVML tells of processes that are not this user's, or not of this package."""
    held = [leases.Held('a', 'cuda0', '0000:01:00.0'), leases.Held('b', 'cuda1', '0000:02:00.0'),
            leases.Held('c', 'cuda2', '0000:03:00.0')]
    loads = {'0000:01:00.0': ([99], 8), '0000:02:00.0': ([os.getpid()], 2), '0000:03:00.0': ([], 4)}
    monkeypatch.setattr(nvml, 'load', loads.get)
    numbers = [[(each[0], each[-1]) for each in leases._freest(choice, [], opened)]
               for choice, opened in ((held, ()), (held, ['b']), (held[:1], ()))]
    assert numbers == [[(0, 2), (0, 1), (1, 0)], [(0, 1), (0, 2), (1, 0)], [(1, 0)]]


def test_processes_that_share_all_gpus_have_several(folder, monkeypatch):
    with leases.shared_by(2):
        assert leases.options() == {}  # no run has begun: each process has all
    monkeypatch.setenv(leases.RUN, '{"run": 1}')
    many = [*GPUS, *parse_context_map('d->opencl0:3;e->opencl0:4')]
    for n_processes, among, expected in [(2, many, many[:2]), (9, many, many[:1]), (2, FOUR, FOUR[:1])]:
        with leases.shared_by(n_processes):
            assert leases.take(among) == leases.take(among) == expected
    assert leases.options() == {'run': 1} and leases.take(many) == many[:1]


def test_a_process_keeps_its_device(folder):
    assert leases.take(GPUS) == leases.take(GPUS[::-1]) == GPUS[:1]
    occupant, = leases.occupants()
    assert (occupant.pid, occupant.contexts) == (os.getpid(), [leases.Held('a', 'opencl0:0', 'opencl0:0')])
    assert leases.take(GPUS[1:]) == GPUS[1:2]


@pytest.mark.parametrize('damage', ['', 'no JSON', 'one byte'])
def test_a_damaged_file_is_removed(damage, folder):
    leases.announce([])
    (folder / 'lease-damaged').write_text(damage)
    (folder / 'notes.txt').write_text('not ours')
    assert leases.occupants() == [] and sorted(os.listdir(folder)) == sorted([leases._own.name, 'notes.txt'])


@pytest.mark.parametrize('is_read_only', [False, True])
def test_a_folder_that_cannot_be_used(is_read_only, folder, monkeypatch, capsys):
    """Others may write there; nobody may. Processes then take devices by their numbers, and say so."""
    open_file = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(30, 'Read-only file system')
        return open_file(path, flags, *mode)
    folder.mkdir(mode=0o700)
    if is_read_only:
        monkeypatch.setattr(leases.os, 'open', refuse)
    else:
        folder.chmod(0o777)
    assert leases.take(FOUR) == [FOUR[os.getpid() % 4]] and os.listdir(folder) == []
    assert 'Set TMPDIR to a folder that can' in capsys.readouterr().err
    assert leases.occupants() == []


def test_a_full_disk(folder, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(leases.os, 'pwrite', full)
    assert leases.take(FOUR) == [FOUR[os.getpid() % 4]] and os.listdir(folder) == []
    assert 'No space left on device' in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_counts_the_processes_that_it_started(folder):
    """A process that takes the device of one that was killed goes on with its file."""
    leases.begin_run(False, False, strict=False, always=False)
    env = {leases.RUN: os.environ[leases.RUN]}
    holders = [Holder(folder, text='a->cpu;b->cpu', **env) for _ in range(2)]
    assert sorted(holder.name() for holder in holders) == ['a', 'b']
    holders[0].end(signal.SIGKILL)
    another = Holder(folder, text='a->cpu;b->cpu', **env)
    another.name()
    holders[1].end()
    another.end()
    assert sorted(lease.numbers for lease in leases.work()) == [[1, 0, 0], [2, 0, 0]]
    leases._end(leases._own, os.getpid())
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_the_children_of_a_killed_run_are_forgotten(folder):
    leases.announce([])
    env = {leases.RUN: json.dumps({'process': 1, 'file': 'lease-gone', 'strict': False, 'always': False})}
    holders = [Holder(folder, **env) for _ in range(2)]
    for holder in holders:
        holder.name()
    assert len(leases.occupants()) == 2
    holders[0].end()
    holders[1].end(signal.SIGKILL)
    assert leases.occupants() == [] and os.listdir(folder) == [leases._own.name]


def test_batches_are_counted_at_once(folder, monkeypatch):
    leases.count(7, 0.1)  # no lease: nothing to do
    leases.announce([])
    leases.count(7, 0.1)  # no run has started this process
    assert leases._own.numbers == [1, 0, 0]
    leases._forget()
    monkeypatch.setenv(leases.RUN, json.dumps({'process': 1, 'file': 'lease-run'}))
    leases.take(FOUR)
    for samples in (7, 5):
        leases.count(samples, 0.1)
    content = (folder / leases._own.name).read_bytes()
    assert leases.NUMBERS.unpack_from(content) == (1, 2, 12)


def test_a_block_computes_on_one_device(contexts):
    before = contexts('cpu', 2)
    with mgpu.lease() as context:
        assert mgpu.contexts() == [context] and [each.name for each in leases.occupants()[0].contexts] == [context.name]
    assert mgpu.contexts() == before and len(leases.occupants()[0].contexts) == 2


def test_the_last_thread_that_leaves_its_block_gives_all_contexts_back(contexts):
    """It put back what it had found, the one context of the thread that had entered before: for ever."""
    before, (first, second) = contexts('cpu', 2), [mgpu.lease() for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        device = one.submit(first.__enter__).result()
        assert other.submit(second.__enter__).result() == device
        one.submit(first.__exit__, None, None, None).result()
        assert mgpu.contexts() == [device]
        other.submit(second.__exit__, None, None, None).result()
    assert mgpu.contexts() == before


def test_a_process_of_a_run_does_not_repeat_its_note(monkeypatch, capfd):
    """Each worker printed that there is no GPU."""
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=x->cpu')
    for process in os.getpid(), 1:
        monkeypatch.setenv(leases.RUN, json.dumps({'process': process, 'file': None, 'gpus': 2}))
        rank_process.note.cache_clear()
        assert len(contexts.choose_contexts(2)) == 2
        assert ('the 2 contexts are on the CPU' in capfd.readouterr().err) == (process == os.getpid())


def test_init_in_a_process_of_a_run_takes_one(monkeypatch):
    mgpu.init('host0->cpu')  # of equal contexts, one that is open is taken
    monkeypatch.setenv(leases.RUN, json.dumps({'process': 1, 'file': None, 'gpus': 1}))
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=x->cpu;y->cpu')
    assert [context.name for context in mgpu.init('a->cpu;b->cpu')] == ['a']
    assert [context.name for context in mgpu.init()] == ['x']
    assert contexts.host_contexts()[0].name == 'x'
    monkeypatch.setenv(leases.RUN, json.dumps({'process': 1, 'file': None, 'gpus': 3}))
    with pytest.raises(MgpuError, match='3 contexts were asked for'):
        mgpu.init()
    monkeypatch.delenv(leases.RUN)
    mgpu.init('host0->cpu')
