"""Jobs in a real Slurm of two nodes: .ci/test-slurm starts it, and runs these tests. Both nodes are this machine."""
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import theano_mgpu  # noqa: F401

import numpy as np
import pytest
from support import keras_rank_jobs, mpich
from support.launch import INTERPRETED, JOBS, alone, arrays, command_of, launch

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parent.parent.parent
KERAS_JOBS = os.path.abspath(keras_rank_jobs.__file__)
LAUNCH = [sys.executable, '-m', 'theano_mgpu', 'launch']
LIBRARIES = {'Open MPI': ('pmix', {}), 'MPICH': ('pmi2', mpich.ENVIRONMENT)}


def run(*words, expected=0, flags=INTERPRETED, **variables):
    """Run a command to its end, in the folder of the repository; return the CompletedProcess."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, cwd=str(ROOT),
                          env=dict(os.environ, THEANO_FLAGS=flags, **variables))
    assert done.returncode == expected or expected is None, '%s\n%s\n%s' % (done.returncode, done.stdout, done.stderr)
    return done


def srun(*words, mpi=None, nodes=2, tasks=2, **options):
    of_mpi = ['--mpi=%s' % mpi] if mpi else []
    return run('srun', *of_mpi, '--nodes=%d' % nodes, '--ntasks=%d' % tasks, '--kill-on-bad-exit', *words, **options)


def sbatch(path, *words, options=(), wait=True):
    """Submit a script; return its job's number."""
    waiting = ['--wait'] if wait else []
    return int(run('sbatch', '--parsable', *waiting, '--output', '%s.%%j.out' % path, *options, path, *words).stdout)


def batch(tmp_path, text, **options):
    """Submit the text of a script, and return the lines that it printed, sorted."""
    path = tmp_path / 'job.sh'
    path.write_text('#!/bin/bash\n' + text)
    return sorted(Path('%s.%d.out' % (path, sbatch(path, **options))).read_text().splitlines())


def difference(path, other):
    """Return the largest difference of the arrays in two files."""
    pairs = list(zip(arrays(path), arrays(other)))
    assert len(pairs) == len(arrays(other)) > 8
    return max(float(abs(np.asarray(ours, 'float64') - theirs).max()) for ours, theirs in pairs if ours.size)


@pytest.fixture(scope='module', params=sorted(LIBRARIES))
def library(request):
    """Return the type for ``srun --mpi`` that fits a library, and the environment in which mpi4py loads it."""
    if request.param == 'MPICH':
        mpich.install()
    return LIBRARIES[request.param]


@pytest.fixture(scope='module')
def alone_theano(tmp_path_factory):
    path = tmp_path_factory.mktemp('slurm') / 'theano.npz'
    alone('train', path, 'a->cpu', 'plain', flags=INTERPRETED)
    return path


@pytest.fixture(scope='module')
def alone_keras(tmp_path_factory):
    path = tmp_path_factory.mktemp('slurm') / 'keras'
    launch(1, 'fit', path, 'a->cpu;b->cpu', job=KERAS_JOBS, flags=INTERPRETED)
    return '%s.0.npz' % path


def test_a_theano_loop_of_two_tasks_equals_one_process(library, alone_theano, tmp_path):
    mpi, variables = library
    done = srun(sys.executable, JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain', mpi=mpi, **variables)
    assert sorted(re.findall(r'rank (\d) trained', done.stdout)) == ['0', '1'] and 'freeing' not in done.stderr
    found = difference(tmp_path / 'ranks.npz', alone_theano)
    print('srun --mpi=%s, two tasks, Theano: the largest difference is %.2g' % (mpi, found))
    assert found < 1e-5


def test_a_keras_model_of_two_tasks_equals_one_process(library, alone_keras, tmp_path):
    mpi, variables = library
    srun(sys.executable, KERAS_JOBS, 'fit', tmp_path / 'ranks', 'a->cpu;b->cpu', mpi=mpi, **variables)
    found = difference('%s.0.npz' % (tmp_path / 'ranks'), alone_keras)
    print('srun --mpi=%s, two tasks, Keras: the largest difference is %.2g' % (mpi, found))
    assert found < 1e-5
    assert difference('%s.0.npz' % (tmp_path / 'ranks'), '%s.1.npz' % (tmp_path / 'ranks')) == 0


def test_the_rank_on_its_node():
    code = 'from theano_mgpu.utils.mpi_environment import *; print(rank(), size(), local_rank(), local_size())'
    out = srun(sys.executable, '-c', code, tasks=3).stdout
    assert sorted(out.splitlines()) == ['0 3 0 2', '1 3 1 2', '2 3 0 1']


@pytest.mark.parametrize('mpi', [None, 'none', 'pmi2'])
def test_tasks_that_mpi_does_not_connect(mpi, tmp_path):
    """Open MPI ended the process in MPI_Init, and MPICH trained each task alone."""
    done = srun(sys.executable, JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain', mpi=mpi, expected=None)
    given = 'with --mpi=pmi2' if mpi == 'pmi2' else 'without --mpi'
    assert done.returncode and re.search(
        "Slurm's srun %s started 2 processes, but the MPI library of mpi4py, Open MPI v[^,]*, cannot connect them: "
        'each would train by itself. Use srun --mpi=pmix' % given, done.stderr), done.stderr
    assert not (tmp_path / 'ranks.npz').exists() and 'MPI_Init' not in done.stderr


def test_a_task_that_ends_before_it_joins_ends_the_others(library):
    """They waited in MPI for ever: srun ends no step for a task that ends with exit code 0."""
    mpi, variables = library
    code = 'import os, sys; os.environ["SLURM_PROCID"] == "1" and sys.exit(); import theano_mgpu; theano_mgpu.size()'
    done = srun(sys.executable, '-c', code, mpi=mpi, nodes=1, expected=None, **variables)
    assert done.returncode and 'rank 1 ended before it had imported theano_mgpu' in done.stderr, done.stderr


def test_tasks_that_are_to_be_independent():
    """A user may try several learning rates, for example."""
    code = 'import theano_mgpu as mgpu, theano.tensor as T; x = T.vector(); print(mgpu.function([x], x.sum())([1, 2]))'
    done = srun(sys.executable, '-c', code, flags=INTERPRETED + ',mgpu.executor=threads')
    assert done.stdout.split() == ['3.0', '3.0']


def test_what_is_no_step_is_no_rank(tmp_path):
    """Such are a batch script, salloc's shell, and a script that was submitted from within a step."""
    code = 'from theano_mgpu.utils.mpi_environment import *; print(launcher(), rank(), size(), local_size())'
    show = '%s -c %s 2>/dev/null\n' % (sys.executable, shlex.quote(code))
    assert batch(tmp_path, show, options=['--nodes=2', '--ntasks=3']) == ['None 0 1 1']
    assert run('salloc', '--quiet', '--ntasks=3', 'bash', '-c', show).stdout == 'None 0 1 1\n'
    inner = tmp_path / 'inner.sh'
    inner.write_text('#!/bin/bash\necho "of the step: $SLURM_STEP_NUM_TASKS"\n' + show)
    submit = '[ $SLURM_PROCID = 1 ] || sbatch --wait --ntasks=1 --output=%s.out %s' % (inner, inner)
    srun('bash', '-c', submit, nodes=1)
    assert Path('%s.out' % inner).read_text() == 'of the step: 2\nNone 0 1 1\n'


def test_mpirun_in_an_allocation_counts(tmp_path):
    """The mpirun starts its daemons by srun, so that the ranks have the variables of that step, too."""
    code = 'from theano_mgpu.utils.mpi_environment import *; print(launcher().name, rank(), size(), local_size())'
    out = batch(tmp_path, 'mpirun --allow-run-as-root %s -c %s 2>/dev/null\n' % (sys.executable, shlex.quote(code)),
                options=['--nodes=2', '--ntasks=3'])
    assert out == ["Open MPI's mpirun 0 3 2", "Open MPI's mpirun 1 3 2", "Open MPI's mpirun 2 3 1"]


def test_launch_in_an_allocation(library, alone_theano, tmp_path):
    """The allocation gives hosts and the number of tasks; only rank 0 prints."""
    mpi, variables = library
    job = [JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain']
    allocation = ['salloc', '--quiet', '--nodes=2', '--ntasks=2']
    dry = run(*allocation, *LAUNCH, '--dry-run', *job, **variables).stdout
    assert '/srun --mpi=%s --nodes=2 --ntasks=2 --cpus-per-task=1 ' % mpi in dry
    done = run(*allocation, *LAUNCH, *job, **variables)
    assert done.stdout == 'rank 0 trained on a\n' and 'a step is done' not in done.stderr and '\0' not in done.stderr
    assert difference(tmp_path / 'ranks.npz', alone_theano) < 1e-5


def test_launch_by_mpirun_where_srun_cannot_connect_the_ranks(alone_theano, tmp_path):
    """A Slurm without PMIx cannot; an srun of the test stands for it."""
    fake = tmp_path / 'bin' / 'srun'
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\n[ "$1" = --mpi=list ] && echo "none pmi2" && exit\nexec /usr/bin/srun "$@"\n')
    fake.chmod(0o755)
    job = [JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain']
    allocation, path = ['salloc', '--quiet', '--nodes=2', '--ntasks=2'], '%s:%s' % (fake.parent, os.environ['PATH'])
    assert ' --mca plm slurm ' in run(*allocation, *LAUNCH, '--dry-run', *job, PATH=path).stdout
    done = run(*allocation, *LAUNCH, *job, PATH=path)
    assert done.stdout == 'rank 0 trained on a\n'
    assert difference(tmp_path / 'ranks.npz', alone_theano) < 1e-5


def test_launch_on_one_node_without_srun(tmp_path):
    """A container has no srun, for example."""
    for program in ('mpirun', 'orted', 'ssh'):
        (tmp_path / program).symlink_to('/usr/bin/' + program)
    done = run('salloc', '--quiet', '--nodes=1', '--ntasks=2', 'env', 'PATH=%s' % tmp_path, *LAUNCH, JOBS, 'train',
               tmp_path / 'ranks.npz', 'a->cpu', 'plain')
    assert done.stdout == 'rank 0 trained on a\n'
    done = run('salloc', '--quiet', '--nodes=2', '--ntasks=2', 'env', 'PATH=%s' % tmp_path, *LAUNCH, JOBS, expected=1)
    assert 'srun is not on PATH. In a container, have srun start the container' in done.stderr


def test_launch_within_a_step_of_one_task(tmp_path):
    """The shell of ``srun --pty`` is one: that step has the processors, and a second step waited for them for ever."""
    job = [JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain']
    done = srun('--cpus-per-task=2', *LAUNCH, '-n', 2, *job, nodes=1, tasks=1)
    assert done.stdout == 'rank 0 trained on a\n'


def test_launch_as_one_of_several_tasks(tmp_path):
    done = srun(*LAUNCH, JOBS, 'train', expected=None)
    assert done.returncode and "this is one of 2 processes that Slurm's srun has started" in done.stderr


@pytest.mark.parametrize('arguments,message', [
    (['-n', 9], 'has room for 8 processes'), (['--hosts', 'n1'], 'the hosts of this job are those of its allocation')])
def test_what_an_allocation_cannot_give(arguments, message):
    done = run('salloc', '--quiet', '--nodes=2', '--ntasks=8', *LAUNCH, *arguments, JOBS, expected=2)
    assert message in done.stderr and 'Slurm: 8 tasks on n[1-2]' in done.stderr


def test_a_rank_that_fails():
    done = run('salloc', '--quiet', '--nodes=2', '--ntasks=2', *LAUNCH, JOBS, 'fail', 'raise', expected=None)
    assert done.returncode and len(re.findall(r'rank 1 of 2 \(host \S+, process \d+\) failed', done.stderr)) == 1
    assert 'Job step aborted' not in done.stderr
    assert re.search(r'srun: error: n2: task 1: Exited with exit code \d', done.stderr)


@pytest.mark.parametrize('signal,to,code', [('INT', '-', 130), ('TERM', '', 143)])
def test_a_signal_ends_the_job(signal, to, code, tmp_path):
    """Ctrl-C in a terminal reaches srun, too; a scheduler's signal may reach launch alone."""
    words = shlex.join([*LAUNCH, '--restarts', '2', JOBS, 'wait', str(tmp_path)])
    out = batch(tmp_path, 'set -m; cd %s; %s >log 2>err &\nuntil grep -qs waiting log; do sleep 0.2; done\n'
                'kill -%s -- %s$!; wait $!; echo $?\n' % (tmp_path, words, signal, to),
                options=['--nodes=2', '--ntasks=2'])
    assert out[-1] == str(code) and 'restart' not in (tmp_path / 'err').read_text()
    assert not [pid for pid in os.listdir('/proc') if pid.isdecimal() and 'wait\0%s' % tmp_path in command_of(int(pid))]


def test_the_example(alone_theano, tmp_path):
    """The example runs unchanged: two nodes with two tasks each."""
    script = ROOT / 'examples' / 'cluster.sbatch'
    log = tmp_path / 'log'
    number = sbatch(script, JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain', options=['--output', log])
    assert 'rank 0 trained on a' in log.read_text() and number
    assert difference(tmp_path / 'ranks.npz', alone_theano) < 1e-5


@pytest.mark.parametrize('ends', ['requeue', 'USR1'])
def test_a_job_that_is_requeued_goes_on_to_the_bit(ends, tmp_path):
    """Slurm requeues a job that it ends for another one, or after its time limit; the calls since the last checkpoint
    were lost.
    """
    log, started, job = tmp_path / 'log', tmp_path / 'started', tmp_path / 'job.py'
    job.write_text(REQUEUED % {'file': str(tmp_path / 'run.npz'), 'started': str(started)})
    script, text = tmp_path / 'job.sh', (ROOT / 'examples' / 'cluster.sbatch').read_text()
    asks = r'\1 || { code=$?; [ $code != 138 ] || scontrol requeue $SLURM_JOB_ID; exit $code; }'
    script.write_text(re.sub('exec (theano-mgpu .*)', asks, text) if ends == 'USR1' else text)
    number = sbatch(script, job, options=['--output', log], wait=False)
    wait_until(started.exists, log)
    # Slurm's option --signal=USR1@300 sends it to the steps, as here.
    run(*(['scancel', '--signal=USR1', number] if ends == 'USR1' else ['scontrol', 'requeue', number]))
    wait_until(lambda: 'PENDING' in state_of(number), log)
    time.sleep(5)  # its steps are ending
    run('scontrol', 'update', 'JobId=%d' % number, 'StartTime=now')  # else Slurm waits for two minutes
    wait_until(lambda: 'COMPLETED' in state_of(number), log)
    text = log.read_text()
    begun = re.findall(r'begins at (\d+)', text)
    assert len(begun) == 2, text
    first, second = map(int, begun)
    assert first == 0 and second > 9 and 'restart 1' not in text, text
    whole = run('srun', '--nodes=2', '--ntasks=4', '--mpi=pmix', sys.executable, job, 'whole').stdout
    assert re.findall('weights (.*)', text) == re.findall('weights (.*)', whole)[:1]


REQUEUED = '''
import sys, time
import theano_mgpu as mgpu
import numpy as np, theano, theano.tensor as T
mgpu.init('a->cpu')
theano.config.mgpu.shares = 'equal'  # shares by speed differ from run to run, and with them the last bits
x, w = T.matrix('x'), theano.shared(np.zeros(3, theano.config.floatX), name='w')
step = mgpu.training_function([x], ((T.dot(x, w) - 1) ** 2).mean(), [w], lambda g: {w: w - 0.1 * g[0]})
first = step.checkpoint(%(file)r + ''.join(sys.argv[1:]), every=1000)
print('begins at', first, flush=True)
batches = np.random.RandomState(0).rand(60, 8, 3).astype(theano.config.floatX)
for number in range(first, 60):
    step(batches[number])
    if first == 0 and not sys.argv[1:]:
        time.sleep(.5)
        if number == 9:
            open(%(started)r, 'w').close()
print('weights', [value.hex() for value in w.get_value().tolist()])
'''


def state_of(number):
    return re.search(r'JobState=\S+', run('scontrol', 'show', 'job', number).stdout).group()


def wait_until(condition, log):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else 'nothing was printed'
        time.sleep(0.2)


def finding(name, text):
    """Return the doctor's finding on a check: its status, and the rest."""
    return re.search(r'^%s +(\S+) +(.*)$' % name, text, re.MULTILINE).groups()


def test_the_doctor_in_an_allocation(tmp_path):
    doctor = [sys.executable, '-m', 'theano_mgpu', 'doctor']
    salloc = ['salloc', '--quiet', '--nodes=2', '--ntasks=4']
    status, text = finding('mpirun', run(*salloc, *doctor, expected=None).stdout)
    assert status == 'ok' and text.endswith('srun: 4 processes start and add a number, on 2 hosts')
    for step, expected in (
            (['--ntasks=2'], ('FAIL', "Slurm's srun without --mpi started 2 processes")),
            (['--ntasks=2', '--mpi=pmix'], ('ok', "rank 0 of 2: Slurm's srun has started them, and Open MPI v")),
            (['--ntasks=2', '--mpi=pmix', '--nodes=1'], ('warn', 'all 2 processes are on one host; the allocation'))):
        out = run(*salloc, 'srun', '--output=%s/%%t' % tmp_path, *step, *doctor, expected=None)
        status, text = finding('job', (tmp_path / '0').read_text())
        assert (status, text[:len(expected[1])]) == expected, out.stderr
