"""The advice at the end of `theano-mgpu doctor`, and `theano-mgpu` alone."""
import os

from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import advice, host_checks
from theano_mgpu.devices import discovery
from theano_mgpu.utils import mpi_environment

import pytest

SCRIPT = 'a Keras or Theano script, unchanged, '


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes this a machine with some devices, without a job, and returns its Setup."""
    for name in list(os.environ):
        if name.startswith(('SLURM', 'PMI', 'OMPI_')):
            monkeypatch.delenv(name)
    monkeypatch.setenv('THEANORC', str(tmp_path / 'theanorc'))

    def have(*devices, flags=''):
        def discover(kind):
            found = [device for device in devices if discovery.kind_of(device) == kind]
            return found, '' if found else 'none here'
        monkeypatch.setattr(discovery, 'discover', discover)
        monkeypatch.setattr(discovery, 'type_of', lambda device: 'CPU' if device == 'cpu' else 'GPU')
        monkeypatch.setenv('THEANO_FLAGS', flags)
        return host_checks.Setup()
    return have


def test_the_command_alone_prints_its_help(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith('usage: theano-mgpu') and 'theano-mgpu doctor ' in text


@pytest.mark.parametrize('devices,flags,expected', [
    (['cuda0', 'cuda1', 'cpu'], '', ('theano-mgpu run train.py', SCRIPT + 'on dev0, dev1')),
    (['cuda0', 'cuda1', 'cpu'], 'contexts=a->cuda0;b->cuda1', ('theano-mgpu run train.py', SCRIPT + 'on a, b')),
    (['opencl0:0', 'cpu'], 'contexts=a->opencl0:0', (
        'theano-mgpu launch --hosts a,b run train.py', SCRIPT + 'on one device of each of two hosts')),
    (['cpu'], '', ('theano-mgpu launch -n 2 run train.py', SCRIPT + 'in two processes on the CPU')),
])
def test_the_next_step_is_one_of_the_machine(devices, flags, expected, machine):
    assert advice.first_script(machine(*devices, flags=flags)) == expected


@pytest.mark.parametrize('devices, flags', [(['cpu'], ''), (['opencl0:0', 'cpu'], 'contexts=a->opencl0:0')])
def test_processes_are_advised_with_what_they_need(devices, flags, machine, monkeypatch):
    """After `pip install '.[keras]'`, without mpi4py, the advised command could not work."""
    setup = machine(*devices, flags=flags)
    monkeypatch.setenv('PATH', '/nowhere')
    assert advice.first_script(setup)[1].endswith(', once mpi4py and mpirun are installed')


def test_in_an_allocation_a_script_runs_on_its_hosts(machine, monkeypatch):
    setup = machine('cpu')
    for name, value in {'JOB_ID': '7', 'JOB_NODELIST': 'n[1-2]', 'JOB_NUM_NODES': '2', 'NTASKS': '4',
                        'TASKS_PER_NODE': '2(x2)'}.items():
        monkeypatch.setenv('SLURM_' + name, value)
    assert advice.first_script(setup) == ('theano-mgpu launch run train.py', SCRIPT + 'on the hosts of this job')
    for name, value in zip(mpi_environment.MPIRUN.variables, '1414'):
        monkeypatch.setenv(name, value)
    assert advice.first_script(setup) == ('theano-mgpu run train.py', SCRIPT + 'started as this was, in 4 processes')


def test_the_doctor_advises_the_first_remedy_that_is_needed(machine):
    setup = machine('cpu')

    def advised(**statuses):
        return advice.last_line([(name, host_checks.Finding(status, '')) for name, status in statuses.items()], setup)
    ok, warn, fail = host_checks.OK, host_checks.WARN, host_checks.FAIL
    assert advised(Theano=ok, BLAS=warn, pygpu=fail, dev0=fail) == (
        'Advice: apply the remedy of pygpu first, then run theano-mgpu doctor again.')
    assert advised(Theano=ok, BLAS=warn, Keras=warn) == 'Advice: apply the remedy of BLAS, unless you do not need it.'
    assert advised(Theano=ok) == ('Advice: theano-mgpu launch -n 2 run train.py runs a Keras or Theano script, '
                                  'unchanged, in two processes on the CPU.')
