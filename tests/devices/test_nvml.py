"""NVML that hangs, that gives numbers of the host's processes, or that knows slices of a card by the card alone."""
import json
import os
import subprocess
import sys
import time

import cuda_on_cpu
import pytest

pytest.importorskip('pynvml', reason='nvidia-ml-py is not installed')
pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')


def python(*arguments, devices=2, variables=(), **settings):
    env = {**cuda_on_cpu.environment(devices, **settings), 'THEANO_FLAGS': 'floatX=float32', **dict(variables)}
    return subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


@pytest.mark.slow
def test_an_nvml_that_hangs_is_asked_once(tmp_path):
    """`devices --watch`, and each process that takes a device, waited for ever."""
    with python('-m', 'theano_mgpu', 'devices', '--watch', '.2', nvml_hang=True) as watch:
        began = time.monotonic()
        table = [watch.stdout.readline() for _ in range(8)]
        assert time.monotonic() - began < 60
        watch.terminate()
        assert sum(line.startswith('cuda0') for line in table) == 2
        assert watch.stderr.read().count('NVML has not answered for 3 s') == 1
    with python('-c', 'from theano_mgpu.devices import leases\nfrom theano_mgpu.devices.contexts import configured\n'
                'print(leases.take(configured())[0].device)', nvml_hang=True,
                variables={'TMPDIR': str(tmp_path)}) as taken:  # the process of the tests has devices, too
        assert taken.communicate(timeout=60)[0] == 'cuda0\n'


LOADS = '''
import json
from theano_mgpu.devices import leases, nvml
from theano_mgpu.devices.contexts import configured
held = leases.held(configured())
print(json.dumps([[each.device, each.place, nvml.uses([each.place])[0][0]] for each in held]))
'''


def test_processes_that_do_not_exist_here_are_not_counted():
    """Each own process counted as a stranger's, too: in a container NVML numbers the processes of the host."""
    with python('-c', LOADS, processes='4194302,%d;4194303' % os.getpid()) as process:
        found = json.loads(process.communicate(timeout=60)[0])
    assert [processes for _, _, processes in found] == [[os.getpid()], []]


def test_slices_of_a_card_are_places_of_their_own():
    """A process that waits for one slice waited for another user's."""
    with python('-c', LOADS, devices=3, slices='0;1;1', buses='1;2;2', processes=';%d' % os.getpid(),
                names='A100;A100 MIG 3g.20gb;A100 MIG 3g.20gb') as process:
        (_, card, _), (_, one, of_one), (_, other, of_other) = json.loads(process.communicate(timeout=60)[0])
    assert card == '0000:01:00.0' and one != other and not of_one and not of_other
    assert {one, other} == {'0000000200000000000000000000000' + number for number in '23'}
