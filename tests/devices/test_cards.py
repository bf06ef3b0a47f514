"""The numbers of cards, and the table of `devices --watch`."""
import json
import os
import subprocess
import sys

from theano_mgpu.devices import cards
from theano_mgpu.devices.cards import Card

import cuda_on_cpu
import pytest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
on_standin = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
ONE, OTHER = Card('cuda0', 'A100', '0000:02:00.0', 1), Card('cuda1', 'T4', '0000:01:00.0', 0)


def theano_mgpu(*arguments, **settings):
    """Run the command on stand-in devices; cuda0 is on the second bus."""
    pytest.importorskip('pygpu')
    env = cuda_on_cpu.environment(2, names='A100;T4', **settings)
    env.update(THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1')
    return subprocess.run([sys.executable, '-m', 'theano_mgpu', *arguments], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=300)


def test_cards_that_nvidia_smi_counts_alike_need_no_word():
    alike = [ONE._replace(smi_number=0), OTHER._replace(smi_number=1)]
    assert not cards.differ(alike) and cards.order_note(alike) == ''
    hidden = [ONE._replace(smi_number=3)]  # CUDA_VISIBLE_DEVICES=3
    assert cards.differ(hidden) and cards.order_note(hidden) == ''
    unknown = [card._replace(smi_number=None) for card in (ONE, OTHER)]
    assert not cards.differ(unknown) and cards.order_note(unknown) == ''
    assert cards.differ([ONE, OTHER]) and 'CUDA_DEVICE_ORDER=PCI_BUS_ID' in cards.order_note([ONE, OTHER])


@on_standin
def test_devices_show_the_number_of_nvidia_smi_where_it_differs():
    """nvidia-smi counts by PCI bus, CUDA by speed: a user who looks at GPU 0 there looks at the wrong card."""
    done = theano_mgpu('devices', buses='2;1')
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][-3:] == ['SMI', 'PCI', 'BUS']
    assert [line[-2:] for line in lines[1:]] == [['1', '0000:02:00.0'], ['0', '0000:01:00.0']]
    assert 'cuda0 is GPU 1 of nvidia-smi (A100, 0000:02:00.0)' in done.stderr
    assert 'CUDA_DEVICE_ORDER=PCI_BUS_ID' in done.stderr


@on_standin
@pytest.mark.slow
def test_devices_are_as_ever_where_the_numbers_are_the_same():
    done = theano_mgpu('devices')
    assert done.stdout.splitlines()[0].split()[-1] == 'BUSY' and 'nvidia-smi' not in done.stderr
    entries = json.loads(theano_mgpu('devices', '--json').stdout)
    assert [entry['nvidia_smi_number'] for entry in entries] == [0, 1]


@on_standin
@pytest.mark.slow
@pytest.mark.parametrize('command', ['config', 'doctor'])
def test_other_commands_say_so_too(command):
    done = theano_mgpu(command, buses='2;1')
    assert 'cuda1 is GPU 0 of nvidia-smi (T4, 0000:01:00.0)' in done.stdout + done.stderr


@on_standin
def test_watch_shows_which_context_is_on_which_device(tmp_path):
    """The table is printed again and again, until Ctrl-C."""
    pytest.importorskip('pygpu')
    env = cuda_on_cpu.environment(2, names='A100;T4', buses='2;1')
    env.update(THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', TMPDIR=str(tmp_path))
    user = subprocess.Popen([sys.executable, '-c', "import theano_mgpu as mgpu; mgpu.init('a->cuda1'); "
                             "print('open', flush=True); input()"], env=env, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert user.stdout.readline() == 'open\n'
        watch = subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'devices', '--watch', '.1'], env=env,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines = [watch.stdout.readline() for _ in range(7)]
        watch.send_signal(2)
        watch.stdout.close()
        assert watch.wait(60) in (0, 141)
    finally:
        user.communicate('\n')
    assert lines[0] == lines[4] and lines[0].split() == 'SMI DEVICE NAME USED TOTAL BUSY USED BY'.split()
    assert lines[1].split()[:3] == ['1', 'cuda0', 'A100'] and lines[1].endswith(' -\n')
    assert lines[2].split()[:3] == ['0', 'cuda1', 'T4'] and lines[2].endswith(' a (process %d)\n' % user.pid)
    assert os.listdir(tmp_path / ('theano_mgpu-%d' % os.getuid())) == []


CHOSEN = """
import sys
from theano_mgpu.devices.contexts import choose_contexts, configured, describe
print(describe(configured()))
for asked in map(eval, sys.argv[1:]):
    print(describe(choose_contexts(asked)))
"""
RANK = {'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_LOCAL_RANK': '0'}


@pytest.fixture
def another():
    """Return the number of a process of another user."""
    if os.getuid():
        yield 1
        return
    with subprocess.Popen(['sleep', '600'], preexec_fn=lambda: os.setuid(65534)) as process:
        yield process.pid
        process.kill()


def chosen(code, *asked, devices=4, variables=(), **settings):
    """Run Python on stand-in devices without a map; return its lines, in brief, and its notes about cards."""
    pytest.importorskip('pynvml', reason='nvidia-ml-py is not installed')
    pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
    env = {**cuda_on_cpu.environment(devices, **settings), 'THEANO_FLAGS': 'floatX=float32', **dict(variables)}
    done = subprocess.run([sys.executable, '-c', code, *asked], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return done.stdout.replace('->cuda', '').split(), [line for line in lines if 'Cards that' in line]


@on_standin
def test_cards_that_others_use_or_that_have_little_memory_are_left_out_unless_they_are_named(another):
    """All cards were taken. A context has the name that it has where no card is left out."""
    settings = dict(processes=';%d;%d' % (another, os.getpid()), display='0;0;0;1', memory='8G;8G;8G;3G')
    asked = '2', '3', '4', '[0, 1]', '["dev3"]', '"dev0->cuda1"'
    lines, notes = chosen(CHOSEN, *asked, **settings)
    assert lines == ['dev00;dev22', 'dev00;dev22', 'dev00;dev22;dev33', 'dev00;dev11;dev22;dev33', 'dev00;dev11',
                     'dev33', 'dev01']
    little = 'cuda3 is %s (it has 3.0 GiB of memory and drives a display, and cuda0 has 8.0 GiB)'
    busy = 'cuda1 is %s (other users compute on it, pid {})'.format(another)
    rest = ". Cards that you name are taken: --contexts 'dev0->cuda0;dev1->cuda1;dev2->cuda2;dev3->cuda3', or "
    is_out, is_taken = 'left out', 'taken all the same'
    for note, ways in zip(notes, ((is_out, is_out), (is_taken, is_out), (is_taken, is_taken))):
        assert ', '.join((little, busy)) % ways + rest in note
    assert len(notes) == 3
    # All ranks choose alike, though one of them starts while another user does; a scheduler, or the user, has chosen.
    assert chosen(CHOSEN, variables=RANK, **settings)[0] == ['dev00;dev11;dev22']
    assert chosen(CHOSEN, variables={'CUDA_VISIBLE_DEVICES': '1,3'}, **settings) == (['dev00;dev11'], [])


@pytest.mark.slow
@on_standin
def test_one_card_stays_where_others_compute_on_all(another):
    lines, (note,) = chosen(CHOSEN, devices=2, processes='%d;%d' % (another, another), memory='1G;2G')
    assert lines == ['dev11'] and 'cuda1 is taken all the same (other users' in note and 'cuda0 is left out' in note


@on_standin
def test_a_script_that_names_a_card_or_a_number_has_it(another):
    """The card that is left out is the one of `dev1`; a process that is started says nothing more of it."""
    lines, notes = chosen("""
import subprocess, sys, numpy as np, theano_mgpu as mgpu, theano, theano.tensor as T
from theano_mgpu.devices.asked_contexts import chosen_contexts
print(len(mgpu.contexts()), len(chosen_contexts(2)))
try:
    chosen_contexts(3)
except mgpu.ContextError as error:
    print('as many contexts must be mapped' in str(error))
shared = theano.shared(np.ones(3, 'float32'), target='dev1')
print(shared.type.context_name, len(mgpu.contexts()), len(chosen_contexts(2)))
subprocess.check_call([sys.executable, '-c', 'from theano_mgpu.devices.contexts import configured; configured()'])
""", devices=2, processes=';%d' % another)
    assert lines == ['1', '1', 'True', 'dev1', '2', '2'] and len(notes) == 1


def test_whose_a_process_is(another):
    """NVML counts the processes of the host, also in a container; and NVIDIA's server computes for all users."""
    assert cards.is_of_another_user(another)
    assert not any(map(cards.is_of_another_user, (os.getpid(), 0, 2 ** 22 + 1)))
    server = 'echo nvidia-cuda-mps-server > /proc/self/comm; echo; read line'
    with subprocess.Popen(['sh', '-c', server], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          preexec_fn=lambda: os.getuid() or os.setuid(65534)) as process:
        process.stdout.readline()
        assert not cards.is_of_another_user(process.pid)
