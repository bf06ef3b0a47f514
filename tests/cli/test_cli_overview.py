"""`theano-mgpu` without arguments, and the advice at the end of the doctor."""
import os
import re
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import advice, device_checks, host_checks
from theano_mgpu.devices import discovery
from theano_mgpu.utils import mpi_environment

import pytest
from cli_fixtures import *  # noqa: F403  the fixtures

SCRIPT = 'a Keras or Theano script, unchanged, '
BENCH = ('theano-mgpu bench --model cnn', 'measure how a model scales here')
CHECK = ('theano-mgpu doctor', 'check that each context computes')


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes this a machine with some devices, without a job; the flags map no contexts."""
    for name in list(os.environ):
        if name.startswith(('SLURM', 'PMI', 'OMPI_')):
            monkeypatch.delenv(name)
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('POCL_DEVICES', '')  # else these are known without a question
    monkeypatch.setenv('THEANORC', str(tmp_path / 'theanorc'))
    monkeypatch.setattr(device_checks, 'nvidia_gpu_present', lambda: False)

    def have(*devices):
        def discover(kind):
            found = [device for device in devices if discovery.kind_of(device) == kind]
            return found, '' if found else 'none here'
        monkeypatch.setattr(discovery, 'discover', discover)
        monkeypatch.setattr(discovery, 'type_of', lambda device: 'CPU' if device == 'cpu' else 'GPU')
    return have


@pytest.fixture
def overview(capsys):
    """Return a function that runs the command and returns {title: text}, [(command, purpose)]."""
    def run():
        assert main([]) == 0
        text = capsys.readouterr().out
        assert text.startswith('theano-mgpu %s: ' % mgpu.__version__)
        assert text.endswith('theano-mgpu --help lists all commands.\n')
        facts, _, steps = text.partition('\nnext:\n')
        return (dict(re.findall(r'^  (\w+) +(.*)$', facts, re.M)),
                re.findall(r'^  (theano-mgpu .*?)  +(.*)$', steps, re.M))
    return run


def test_the_overview_lists_what_there_is(overview):
    facts, steps = overview()
    assert len(steps) == 3
    assert 'cpu (1 core)' in facts['devices']
    for device in discovery.discover('opencl')[0]:
        assert '%s (%s)' % (device, discovery.type_of(device)) in facts['devices']
    assert 'Theano 1.0.5' in facts['installed'] and 'Keras 2.3.1' in facts['installed']
    assert '->' in facts['contexts'] and 'job' not in facts


@pytest.mark.parametrize('devices,flags,expected', [
    (['cuda0', 'cuda1', 'cpu'], '', [
        CHECK, ('theano-mgpu run train.py', SCRIPT + 'on dev0, dev1'),
        ('theano-mgpu config --write', 'use these devices, with float32, from now on')]),
    (['cuda0', 'cuda1', 'cpu'], 'contexts=a->cuda0;b->cuda1', [
        CHECK, ('theano-mgpu run train.py', SCRIPT + 'on a, b'), BENCH]),
    (['opencl0:0', 'cpu'], 'contexts=a->opencl0:0', [
        CHECK, ('theano-mgpu launch --hosts a,b run train.py', SCRIPT + 'on one device of each of two hosts'), BENCH]),
    (['cpu'], '', [CHECK, ('theano-mgpu run train.py', SCRIPT + 'on 1 core of the CPU'), BENCH]),
    (['cpu'], 'contexts=a->cpu;b->cpu', [CHECK, ('theano-mgpu run train.py', SCRIPT + 'on 2 cores of the CPU'), BENCH]),
])
def test_the_next_steps_are_those_of_the_machine(devices, flags, expected, machine, overview, monkeypatch):
    machine(*devices)
    monkeypatch.setenv('THEANO_FLAGS', flags)
    facts, steps = overview()
    assert steps == expected
    assert re.sub(r' \(.*?\)', '', facts['devices']) == ', '.join(devices)


def test_processes_are_advised_with_what_they_need(machine, overview, monkeypatch):
    """After `pip install '.[keras]'`, without mpi4py, the advised command could not work."""
    machine('opencl0:0', 'cpu')
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->opencl0:0')
    monkeypatch.setenv('PATH', '/nowhere')
    assert overview()[1][1][1].endswith(', once mpi4py and mpirun are installed')


def test_a_theanorc_is_not_written_over(machine, overview, tmp_path):
    machine('cuda0', 'cuda1', 'cpu')
    (tmp_path / 'theanorc').write_text('[global]\nfloatX = float32\n')
    assert overview()[1][2] == ('theano-mgpu config', 'lines for your .theanorc: these devices, with float32')


def test_in_an_allocation_a_script_runs_on_its_hosts(machine, overview, monkeypatch):
    machine('cpu')
    for name, value in {'JOB_ID': '7', 'JOB_NODELIST': 'n[1-2]', 'JOB_NUM_NODES': '2', 'NTASKS': '4',
                        'TASKS_PER_NODE': '2(x2)'}.items():
        monkeypatch.setenv('SLURM_' + name, value)
    facts, steps = overview()
    assert facts['job'] == 'Slurm: 4 tasks on n[1-2]'
    assert steps[1] == ('theano-mgpu launch run train.py', SCRIPT + 'on the hosts of this job')
    for name, value in zip(mpi_environment.MPIRUN.variables, '1414'):
        monkeypatch.setenv(name, value)
    assert overview()[1][1] == ('theano-mgpu run train.py', SCRIPT + 'started as this was, in 4 processes')


@pytest.mark.parametrize('break_it,purpose', [
    (lambda patch: patch.setattr(mgpu, 'theano_error', ValueError('no'), raising=False), 'Theano cannot be imported'),
    (lambda patch: patch.setenv('THEANO_FLAGS', 'contexts=a-cpu'), 'the contexts cannot be read'),
    (lambda patch: Path(os.environ['THEANORC']).write_text('contexts = a->cpu'), 'the contexts cannot be read'),
    (lambda patch: patch.setattr(device_checks, 'nvidia_gpu_present', lambda: True),
     "NVIDIA's GPUs cannot be used yet"),
])
def test_what_is_wrong_comes_first(break_it, purpose, machine, overview, monkeypatch):
    machine('cpu')
    break_it(monkeypatch)
    assert overview()[1][0] == ('theano-mgpu doctor', 'begin here: ' + purpose)


def test_the_doctor_advises_the_first_remedy_that_is_needed(machine):
    machine('cpu')
    setup = host_checks.Setup()

    def advised(**statuses):
        return advice.last_line([(name, host_checks.Finding(status, '')) for name, status in statuses.items()], setup)
    ok, warn, fail = host_checks.OK, host_checks.WARN, host_checks.FAIL
    assert advised(Theano=ok, BLAS=warn, pygpu=fail, dev0=fail) == (
        'Advice: apply the remedy of pygpu first, then run theano-mgpu doctor again.')
    assert advised(Theano=ok, BLAS=warn, Keras=warn) == 'Advice: apply the remedy of BLAS, unless you do not need it.'
    assert advised(Theano=ok) == ('Advice: theano-mgpu run train.py runs a Keras or Theano script, unchanged, on 1 '
                                  'core of the CPU.')
