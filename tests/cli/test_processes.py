"""`theano-mgpu run --processes`: the choice, and runs of scripts in several processes."""
import argparse
import os
import textwrap

from theano_mgpu.cli import job_command, main, processes
from theano_mgpu.cli import run as run_command
from theano_mgpu.cli.output import add_command
from theano_mgpu.cli.processes import AUTO
from theano_mgpu.devices import discovery
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import mpi_environment

import pytest
from support.processes import python

QUICK = 'floatX=float32,cxx=,optimizer=fast_compile'


def parsed(*words):
    """Return the arguments of `theano-mgpu run`."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), run_command)
    return parser.parse_args(['run', *words])


# --- The choice ----------------------------------------------------------------------------------

@pytest.fixture
def mpi(monkeypatch):
    monkeypatch.setattr(processes, 'check_mpi', lambda: None)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(4)))
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', '/nowhere')


def reason(capsys, *words):
    """Return the number of processes by --processes auto, and the note."""
    os.environ['THEANO_FLAGS'] = ''  # the choice sets contexts for the processes
    args = parsed('--processes', AUTO, *words, __file__)
    return processes.number_of(args), capsys.readouterr().err.strip().rpartition('--processes auto: ')[2]


def test_contexts_on_the_cpu(mpi, capsys, monkeypatch):
    monkeypatch.setattr(discovery, 'discover_best', lambda: ['cpu'])
    assert reason(capsys, '--contexts', 'a->cpu;b->cpu') == (
        2, '2 processes: Python computes one context on the CPU at a time')
    assert reason(capsys, '--gpus', '3')[0] == 3
    assert reason(capsys, '--contexts', 'a->cpu') == reason(capsys) == (1, 'one process: there is one context')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0})
    assert reason(capsys, '--contexts', 'a->cpu;b->cpu') == (1, 'one process: there is one core')


@pytest.mark.parametrize('contexts', ['a->cuda0;b->cuda1', 'a->cpu;b->cuda0', 'a->opencl0:0;b->opencl0:1'])
def test_gpus(contexts, mpi, capsys):
    """One process launches for them; no device is opened, nothing is measured."""
    assert reason(capsys, '--contexts', contexts) == (1, 'one process: it launches for all GPUs')
    assert reason(capsys, '--contexts', contexts, '--quiet') == (1, '')


def test_places_where_processes_are_not_started(mpi, capsys, monkeypatch):
    two = ['--contexts', 'a->cpu;b->cpu']
    assert '--verify compares' in reason(capsys, *two, '--verify')[1]
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    monkeypatch.setenv('SLURM_TASKS_PER_NODE', '2')
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'node1')
    assert reason(capsys, *two) == (1, 'one process: this is a job of Slurm, whose processes launch starts')


def test_one_of_several_processes(monkeypatch):
    for name, value in zip(mpi_environment.MPIRUN.variables, '1212'):
        monkeypatch.setenv(name, value)
    for number in AUTO, '2':
        assert processes.number_of(parsed('--processes', number, __file__)) == 1
    with pytest.raises(MgpuError, match="one of 2 processes that Open MPI's mpirun has started: leave --processes out"):
        processes.number_of(parsed('--processes', '3', __file__))


def test_without_mpi(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(4)))
    assert main(['run', '--processes', '2', __file__]) == 1
    assert 'mpirun, which starts the processes, is not on PATH. Debian: apt-get install' in capsys.readouterr().err
    number, text = reason(capsys, '--contexts', 'a->cpu;b->cpu')
    assert number == 1 and text.startswith('one process: 2 would be faster, but mpirun, which starts the processes, is')
    monkeypatch.setattr(processes, 'find_mpirun', lambda: 'mpirun')
    monkeypatch.setattr(processes.importlib.util, 'find_spec', lambda name: None)
    assert 'need mpi4py and an MPI library' in reason(capsys, '--contexts', 'a->cpu;b->cpu')[1]


def test_launch_starts_the_processes_itself(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['launch', '-n', '2', 'run', '--processes', '2', __file__])
    assert caught.value.code == 2 and 'launch starts the processes' in capsys.readouterr().err


def test_the_command_of_the_processes(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(processes, 'find_mpirun', lambda: 'mpirun')
    monkeypatch.setattr(job_command, 'find_mpirun', lambda: 'mpirun')
    monkeypatch.setattr(processes, 'run_with_restarts', lambda *arguments: started.append(arguments) or 5)
    monkeypatch.setattr(discovery, 'discover_best', lambda: ['cpu'])
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(4)))
    monkeypatch.setenv('THEANO_FLAGS', '')
    assert main(['run', '--processes', '2', '--always', __file__, '-x']) == 5
    assert main(['run', '--processes', 'auto', '-q', '--gpus', '3', __file__]) == 5
    (two, environment, words, restarts), (three, with_contexts, again, _) = started
    assert two.words[:3] == ['mpirun', '-n', '2'] and three.words[:3] == ['mpirun', '-n', '3'] and restarts == 0
    assert environment['THEANO_FLAGS'] == 'mgpu.executor=mpi'
    assert words == [job_command.COMMAND, 'run', '--processes', '2', '--always', __file__, '-x']
    assert again[1:] == ['run', '--processes', 'auto', '-q', '--gpus', '3', __file__]
    assert 'contexts=dev0->cpu;dev1->cpu;dev2->cpu' in with_contexts['THEANO_FLAGS']


# --- Scripts -------------------------------------------------------------------------------------

TRAIN = '''
    import sys
    import numpy as np, theano, theano.tensor as T
    x, w = T.matrix('x'), theano.shared(np.ones((8, 4), 'float32') / 8, 'w')
    loss = (T.tanh(T.dot(x, w)) ** 2).mean()
    step = theano.function([x], loss, updates=[(w, w - np.float32(.1) * T.grad(loss, w))], name='step')
    data = np.arange(120, dtype='float32').reshape(15, 8) / 100
    for _ in range(20):
        value = step(data)
    print('%.5f' % value, w.get_value().round(4).tolist())
    print(sys.stdin.read().strip())
    sys.exit(3)
'''


def run(*words, folder):
    """Return (exit code, stdout, stderr) of `theano-mgpu run`."""
    done = python('-m', 'theano_mgpu', 'run', *words, folder=folder, flags=QUICK, input='typed', expected=None)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.mpi
def test_processes_give_the_result_of_one(tmp_path):
    """The output comes once; the exit code and stdin are the script's."""
    (tmp_path / 'train.py').write_text(textwrap.dedent(TRAIN))
    two = ['--contexts', 'a->cpu;b->cpu', '--always']
    alone = run(*two, 'train.py', folder=tmp_path)
    assert alone[0] == 3 and alone[1].endswith('typed\n')
    for number in ('2', 'auto'):
        code, out, err = run('--processes', number, *two, 'train.py', folder=tmp_path)
        assert (code, out) == alone[:2], err
        assert 'on 1 context (a->cpu) in each of 2 processes' in err
        assert ('--processes auto: 2 processes: ' in err) == (number == 'auto')
