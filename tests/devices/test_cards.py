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
