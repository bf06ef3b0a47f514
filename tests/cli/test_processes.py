"""`theano-mgpu run --processes`: the prediction, the choice, and runs of scripts in several processes."""
import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from theano_mgpu.cli import job_command, main, processes
from theano_mgpu.cli import run as run_command
from theano_mgpu.cli.processes import AUTO, CHECKS, GAIN, NOT_KNOWN, Kept, Measured
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.errors import MgpuError
from theano_mgpu.runtime import step_times
from theano_mgpu.runtime.sampled_timings import ENOUGH, SAMPLED, WARM_UP, Compared, SampledTimings
from theano_mgpu.training import training_function
from theano_mgpu.utils import mpi_environment

import cuda_on_cpu
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.search_path import search_path

QUICK = 'floatX=float32,cxx=,optimizer=fast_compile'
on_standin = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
GPUS = parse_context_map('dev0->cuda0;dev1->cuda1')
# An LSTM whose devices wait for launches, and a model whose devices compute.
LSTM = Measured('lstm', 2, launches=8e-3, waited=0.5e-3, seconds=10e-3, used=10e-3, best=10e-3, n_bytes=0, calls=100)
CNN = LSTM._replace(name='cnn', launches=1e-3, waited=20e-3, seconds=25e-3, used=25e-3, best=25e-3)


def parsed(*words):
    """Return the arguments of `theano-mgpu run`."""
    parser = argparse.ArgumentParser()
    run_command.add_parser(parser.add_subparsers())
    return parser.parse_args(['run', *words])


# --- Times that are sampled ----------------------------------------------------------------------

def test_calls_after_the_first_ones_are_sampled():
    timings = SampledTimings()
    for call in range(60):
        timings.begin_call()
        timings.calls += 1
        timings.seconds['launch'] = timings.seconds.get('launch', 0.0) + (9.0 if call < WARM_UP else call)
        if call % 2 and timings.is_sampling:  # the others fail
            timings.end_call(2.0 * call)
    expected = [call for call in range(WARM_UP, 60) if call % 2][:SAMPLED]
    assert [sample['launch'] for sample in timings.samples] == expected
    assert timings.median('launch') == np.median(expected) and timings.median('whole') == 2 * np.median(expected)
    assert timings.median('run') == 0
    timings.reset()
    assert timings.samples == []


def test_a_step_is_sampled_and_cpu_contexts_are_not_recorded(cpu2):
    recorded = step_times.record()
    x, w = T.matrix('x'), theano.shared(np.ones((3, 2), 'float32'), 'w')
    step = training_function([x], T.dot(x, w).sum(), [w], lambda gradients: [(w, w - gradients[0])])
    for _ in range(WARM_UP + 2):
        step(np.ones((4, 3), 'float32'))
    assert len(step.timings.samples) == 2 and 0 < step.timings.median('run') < step.timings.median('whole')
    assert recorded == []


# --- The prediction ------------------------------------------------------------------------------

def test_prediction_by_hand():
    # Launches for one device take 4 ms; the last device ends 0.5 ms after the last launch.
    assert LSTM.compute == pytest.approx(4.5e-3) and LSTM.is_launch_bound and LSTM.gains
    assert LSTM.in_processes == pytest.approx(10e-3 - 4e-3 + CHECKS, abs=1e-5)
    # Launches for one of four devices take 2 ms, and for all of them 8 ms.
    assert LSTM._replace(n=4).in_processes == pytest.approx(10e-3 - 6e-3 + CHECKS, abs=2e-5)
    assert CNN.compute == pytest.approx(20.5e-3) and not CNN.is_launch_bound and not CNN.gains
    assert CNN.in_processes == pytest.approx(25e-3 - 0.5e-3 + CHECKS, abs=1e-5)
    # With 8 ms of launches, a device that is waited for 4 ms computes for 8 ms.
    assert LSTM._replace(waited=3.9e-3).is_launch_bound and not LSTM._replace(waited=4.1e-3).is_launch_bound


def test_a_device_that_computes_longer_than_its_launches():
    """A step in processes takes the launches of one device, or its computation, whichever is longer."""
    rest, own = 1e-3, 3e-3
    for compute in (5e-3, 1e-3):
        waited = max(0.0, compute - own)
        both = LSTM._replace(launches=2 * own, waited=waited, seconds=rest + 2 * own + waited)
        assert both.in_processes == pytest.approx(rest + max(own, compute) + CHECKS, abs=1e-5)


def test_gradients_that_the_host_adds_go_between_processes():
    """Each of two processes sends and gets half of them twice, at 4 GB/s."""
    gradients = LSTM._replace(n_bytes=40e6)
    assert gradients.in_processes - LSTM.in_processes == pytest.approx(2 * 20e6 / 4e9)
    assert gradients.is_launch_bound and not gradients.gains


def test_one_device_that_is_faster_than_processes():
    on_one = LSTM._replace(best=6e-3)
    assert on_one.is_launch_bound and not on_one.gains
    assert 'the faster way in one takes 6 ms' in on_one.reason('COMMAND') and 'COMMAND' not in on_one.reason('COMMAND')
    assert LSTM.reason('COMMAND') == (
        'one process launches for 2 devices in turn, 8 ms a step, and each computes for 4.5 ms at most. In 2 processes '
        'a step is predicted to take 6.2 ms; in one it takes 10 ms. To start them: COMMAND')


def test_the_way_that_is_used_counts():
    timings = SampledTimings()
    timings.samples = [{'launch': 8e-3, 'run': 1e-3, 'exchange': 2e-3, 'whole': 12e-3}] * ENOUGH
    by_nccl = step_times.StepTimes('f', 2, 0.0, ('run', 'exchange'), timings)
    assert by_nccl.are_known and processes.measured(by_nccl)[2:7] == (8e-3, 3e-3, 12e-3, 12e-3, 12e-3)
    assert processes.measured(by_nccl._replace(waits=('run',))).waited == 1e-3
    timings.compared = Compared(7e-3, 11e-3, 7e-3)
    assert processes.measured(by_nccl)[4:7] == (11e-3, 7e-3, 7e-3)
    timings.samples.pop()
    assert not by_nccl.are_known


# --- The choice ----------------------------------------------------------------------------------

@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a script; the times of runs are kept beside it."""
    monkeypatch.setattr(processes, '_folder', lambda: str(tmp_path))
    path = tmp_path / 'train.py'
    path.write_text('')
    return str(path)


def kept(script, *words, flags=None, contexts=GPUS):
    return Kept(parsed(*words, script), flags or {}, contexts)


def rows(*functions):
    return [[each.name, each.calls, each.used, each.in_processes] for each in functions]


def test_decisions(script):
    assert kept(script).decision(2) == (1, NOT_KNOWN)
    kept(script).write(one_process=rows(LSTM))
    assert str(kept(script).decision(2)) == \
        '2 processes: a step of lstm takes 10 ms in one process, and is predicted to take 6.2 ms in 2'
    kept(script).write(one_process=rows(CNN))
    assert kept(script).decision(2).processes == 1
    kept(script).write(one_process=rows(LSTM._replace(used=GAIN * LSTM.in_processes * .99)))
    assert kept(script).decision(2).processes == 1  # the difference may be noise
    kept(script).write(one_process=rows(LSTM, CNN._replace(calls=1)))
    assert kept(script).decision(2).processes == 2
    kept(script).write(one_process=rows(LSTM._replace(calls=1), CNN))
    assert kept(script).decision(2) == (1, 'a step of cnn takes 25 ms in one process, and is predicted to take 24.7 ms '
                                           'in 2')


def test_times_of_processes_replace_the_prediction(script):
    kept(script).write(one_process=rows(LSTM))
    kept(script).write(several=[['lstm', 11e-3]])
    assert kept(script).decision(2) == (1, 'a step of lstm takes 10 ms in one process, and took 11 ms in 2')
    kept(script).write(several=[['lstm', 9.5e-3]])
    assert kept(script).decision(2).processes == 2
    kept(script).write(several=[['another', 11e-3]])
    assert 'is predicted' in kept(script).decision(2).reason


def test_a_change_is_measured_again(script):
    single = {'floatX': 'float32'}
    kept(script, '--always', flags=single).write(one_process=rows(LSTM))

    def is_known(*words, flags=single, contexts=GPUS, after=()):
        return Kept(parsed(*words, script, *after), flags, contexts).decision(2).reason != NOT_KNOWN
    assert is_known('--always') and is_known('--always', '--explain', '--processes', 'auto')
    assert is_known('--always', flags={**single, 'contexts': 'x->cuda0', 'mgpu.executor': 'mpi'})
    assert not is_known() and not is_known('--always', after=['--epochs', '5'])
    assert not is_known('--always', flags={}) and not is_known('--always', contexts=GPUS[::-1])
    Path(script).write_text('another')
    assert not is_known('--always')


def test_a_file_that_is_damaged_or_cannot_be_written(script, monkeypatch):
    kept(script).write(one_process=rows(LSTM))
    path = Path(script).with_name(processes.FILE)
    assert json.loads(path.read_text())
    for text in ('{', '[]', json.dumps({'of another script': {'one_process': rows(LSTM)}})):
        path.write_text(text)
        assert kept(script).decision(2).reason == NOT_KNOWN
    monkeypatch.setattr(processes, '_folder', lambda: '/nowhere')
    kept(script).write(one_process=rows(LSTM))
    assert kept(script).decision(2).reason == NOT_KNOWN


def test_the_scripts_that_ran_last_are_kept(script, monkeypatch):
    monkeypatch.setattr(processes, 'MOST', 3)
    every = [{'floatX': 'float%d' % bits} for bits in (16, 32, 64, 128)]
    for flags in [every[0], every[1], every[0], every[2], every[3]]:
        kept(script, flags=flags).write(one_process=rows(LSTM))
    known = [kept(script, flags=flags).decision(2).reason != NOT_KNOWN for flags in every]
    assert known == [True, False, True, True]


@pytest.fixture
def mpi(monkeypatch):
    monkeypatch.setattr(processes, 'check_mpi', lambda: None)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(4)))
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', '/nowhere')


def reason(capsys, *words):
    """Return the number of processes by --processes auto, and the note."""
    args = parsed('--processes', AUTO, *words, __file__)
    return processes.number_of(args, {}), capsys.readouterr().err.strip().rpartition('--processes auto: ')[2]


def test_contexts_on_the_cpu(mpi, capsys, monkeypatch):
    monkeypatch.setattr(discovery, 'discover_best', lambda: ['cpu'])
    assert reason(capsys, '--contexts', 'a->cpu;b->cpu') == (
        2, '2 processes: Python computes one context on the CPU at a time')
    assert reason(capsys, '--gpus', '3')[0] == 3
    assert reason(capsys, '--contexts', 'a->cpu') == reason(capsys) == (1, 'one process: there is one context')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0})
    assert reason(capsys, '--contexts', 'a->cpu;b->cpu') == (1, 'one process: there is one core')
    assert 'some of the contexts are on the CPU' in reason(capsys, '--contexts', 'a->cpu;b->cuda0')[1]


def test_gpus(mpi, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, '_folder', lambda: str(tmp_path))
    words = ['--contexts', 'dev0->cuda0;dev1->cuda1']
    assert reason(capsys, *words) == (1, 'one process: ' + NOT_KNOWN)
    kept(__file__, contexts=GPUS).write(one_process=rows(LSTM))
    number, text = reason(capsys, *words)
    assert number == 2 and text.startswith('2 processes: a step of lstm takes 10 ms')
    assert reason(capsys, *words, '--quiet') == (2, '')


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
    assert processes.number_of(parsed('--processes', AUTO, __file__), {}) == 1
    with pytest.raises(MgpuError, match="one of 2 processes that Open MPI's mpirun has started: leave --processes out"):
        processes.number_of(parsed('--processes', '2', __file__), {})


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


def test_every_option_reaches_the_processes():
    """The words for the processes, parsed, give the same arguments; a new option must be among them."""
    values = {'gpus': '2', 'contexts': 'a->cpu;b->cpu', 'json': 'plans.json', 'processes': '2', 'ledger': 'l.jsonl'}
    options = [action for action in parsed('x.py').parser._actions
               if action.option_strings and action.dest not in ('help', 'module')]
    assert len(options) >= 9
    for option in options:
        words = option.option_strings[-1:] + ([] if option.nargs == 0 else [values[option.dest]])
        for program in (['train.py', '--epochs', '5', '-q'], ['-m', 'package.train', '-q']):
            given = parsed(*words, *program)
            expected = {name: value for name, value in vars(given).items() if name not in ('parser', 'processes')}
            again = vars(parsed(*processes.words_of(given)[1:]))
            assert {name: again[name] for name in expected} == expected, words
    assert processes.command_of(2, parsed('--always', 'a b.py')) == "theano-mgpu launch -n 2 run --always 'a b.py'"


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
    (two, environment, words, restarts), (three, _, again, _) = started
    assert two.words[:3] == ['mpirun', '-n', '2'] and three.words[:3] == ['mpirun', '-n', '3'] and restarts == 0
    assert environment['THEANO_FLAGS'] == 'mgpu.executor=mpi'
    assert words == [job_command.COMMAND, 'run', '--always', __file__, '-x']
    assert again[1:] == ['run', '--quiet', '--contexts', 'dev0->cpu;dev1->cpu;dev2->cpu', __file__]


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
# Launches of a model with many small kernels, without the time to build these: for each device 30 ms.
SLOW_LAUNCHES = '''
    import time
    from theano_mgpu.runtime.executable import CompiledPart
    original = CompiledPart.run
    CompiledPart.run = lambda self, *args: (self.part.is_share or not self.part.sums or time.sleep(0.03),
                                            original(self, *args))[1]
'''


def run(*words, folder, env=None, flags=QUICK):
    """Return (exit code, stdout, stderr) of `theano-mgpu run`."""
    env = dict(env or os.environ, PYTHONPATH=search_path(), THEANO_FLAGS=flags)
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', *words], cwd=str(folder), env=env, text=True,
                          input='typed', stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    return done.returncode, done.stdout, done.stderr


def write(folder, *parts):
    (folder / 'train.py').write_text('\n'.join(map(textwrap.dedent, parts)))
    return 'train.py'


@pytest.mark.mpi
def test_processes_give_the_result_of_one(tmp_path):
    """The output comes once; the exit code and stdin are the script's."""
    name, two = write(tmp_path, TRAIN), ['--contexts', 'a->cpu;b->cpu', '--always']
    alone = run(*two, name, folder=tmp_path)
    assert alone[0] == 3 and alone[1].endswith('typed\n') and 'launch-bound' not in alone[2]
    for number in ('2', 'auto'):
        code, out, err = run('--processes', number, *two, name, folder=tmp_path)
        assert (code, out) == alone[:2], err
        assert 'on 1 context (a->cpu) in each of 2 processes' in err
        assert ('--processes auto: 2 processes: ' in err) == (number == 'auto')


@pytest.mark.slow
@on_standin
@pytest.mark.mpi
def test_a_launch_bound_script(tmp_path):
    """The first run measures, and says so; the next one starts processes, and the third one knows how these did."""
    pytest.importorskip('pygpu')
    env = cuda_on_cpu.environment(2, quiet=True)
    flags = 'floatX=float32,contexts=dev0->cuda0;dev1->cuda1,mgpu.shares=equal'
    name = write(tmp_path, SLOW_LAUNCHES, TRAIN)

    def lines(*words):
        code, out, err = run('--processes', 'auto', '--always', *words, name, folder=tmp_path, env=env, flags=flags)
        assert code == 3, err
        return out.splitlines()[-2:], [line for line in err.splitlines()
                                       if '--processes auto' in line or 'launch' in line]
    first, notes = lines('--explain')
    assert NOT_KNOWN in notes[0]
    row, note, following = notes[1:]
    assert row.startswith('processes    one')
    launches, compute = map(float, re.findall(r'([\d.]+) ms (?:a step|at most)', note))
    assert note.startswith('theano-mgpu: note: step is launch-bound: ') and launches >= 60 > compute >= 30
    assert note.endswith('To start them: theano-mgpu launch -n 2 run --always --explain train.py')
    assert following.startswith('theano-mgpu: note: the next run with --processes auto: 2 processes: a step of step')
    second, notes = lines()
    assert second == first and len(notes) == 1 and 'auto: 2 processes: a step of step takes' in notes[0]
    assert 'is predicted to take' in notes[0]
    assert ' in one process, and took ' in lines()[1][0]


@on_standin
@pytest.mark.slow
@pytest.mark.mpi
def test_a_script_that_computes(tmp_path):
    """Its devices compute for longer than the launches take: no word of them, and one process goes on."""
    pytest.importorskip('pygpu')
    env, flags = cuda_on_cpu.environment(2, quiet=True), 'floatX=float32,contexts=dev0->cuda0;dev1->cuda1'
    name = write(tmp_path, TRAIN.replace('(8, 4)', '(600, 600)').replace('(15, 8)', '(600, 600)')
                 .replace('120', '360000').replace('range(20)', 'range(90)')
                 .replace('w.get_value()', 'w.get_value()[:1, :3]'))
    for reason in (NOT_KNOWN, 'one process: a step of step takes '):
        code, _, err = run('--processes', 'auto', '--always', '--explain', name, folder=tmp_path, env=env, flags=flags)
        assert code == 3 and reason in err and 'launch-bound' not in err and 'processes    one' not in err, err
