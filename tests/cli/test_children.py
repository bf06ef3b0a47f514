"""`theano-mgpu run`: processes that the script starts compute on one device each, and `--one`."""
import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from theano_mgpu.cli import main
from theano_mgpu.utils import mpi_environment

import cuda_on_cpu
import pytest
from support.launch import launch
from support.search_path import search_path

GUIDE = Path(__file__).resolve().parents[2] / 'docs' / 'guide' / 'workers.md'
QUICK = 'floatX=float32,cxx=,optimizer=fast_compile,'
COMPILED = 'floatX=float32,optimizer=fast_compile'  # GPUs need a compiler
FOUR = QUICK + 'contexts=a->cpu;b->cpu;c->cpu;d->cpu'
on_standin = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')

# The script starts processes in one of five ways; each computes batches and prints its device and its open contexts.
SCRIPT = '''
import os, signal, subprocess, sys, time
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import numpy as np

kind, n = sys.argv[1], int(sys.argv[2])


def work(number):
    import theano, theano.tensor as T
    import theano_mgpu as mgpu
    from theano.gpuarray.type import list_contexts
    x = T.matrix('x')
    f = theano.function([x], x.sum(axis=1))
    for _ in range(5):
        f(np.ones((8, 2), theano.config.floatX))
    found = mgpu.contexts(), sorted(map(str, list_contexts()))
    ready(number)
    if 'kill' in sys.argv and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return found[0][0].name, found[0][0].device, found[1]


def ready(number):
    """Wait until all have their devices: a worker that is done would take the task of another one."""
    open('%s.ready' % number, 'w').close()
    began = time.monotonic()
    while sum(name.endswith('.ready') for name in os.listdir('.')) < n and time.monotonic() < began + 60:
        time.sleep(.02)


def main():
    if kind == 'worker':
        return work(int(sys.argv[3]))
    if 'opened' in sys.argv:
        import theano, theano.tensor as T
        theano.function([T.matrix()], T.zeros(()), on_unused_input='ignore')
    if 'listed' in sys.argv:
        from theano_mgpu.devices import cards
        cards.cards()
    if kind == 'loky':
        import joblib
        return joblib.Parallel(n)(joblib.delayed(work)(i) for i in range(n))
    if kind == 'subprocess':
        command = [sys.executable, __file__, 'worker', str(n)]
        started = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(n)]
        return [eval(each.communicate()[0]) for each in started]
    if 'kill' in sys.argv:
        context = multiprocessing.get_context(kind)
        started = [context.Process(target=work, args=(i,)) for i in range(n)]
        for each in started:
            each.start()
        for each in started:
            each.join()
        return [each.exitcode for each in started]
    with ProcessPoolExecutor(n, multiprocessing.get_context(kind)) as pool:
        return list(pool.map(work, range(n)))


if __name__ == '__main__':
    print(main())
'''


def environment(folder, flags=FOUR, **variables):
    return dict(os.environ, PYTHONPATH=search_path(), THEANO_FLAGS=flags, TMPDIR=str(folder), **variables)


def start(words, folder, env=None):
    return subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'run', *words], cwd=str(folder), text=True,
                            env=env or environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def run(words, folder, env=None):
    (folder / 'script.py').write_text(SCRIPT)
    process = start(['script.py', *words], folder, env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return ast.literal_eval(out.splitlines()[-1]), err


def leases(folder):
    return os.listdir(folder / ('theano_mgpu-%d' % os.getuid()))


def summary(err):
    """Return the rows of the table: device, processes, batches, samples."""
    lines = err.partition('processes that the script started:\n')[2].splitlines()[1:]
    return [line.split() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['fork', 'spawn', 'forkserver', 'loky', 'subprocess'])
def test_each_process_has_its_own_device(kind, tmp_path):
    """They computed all over all devices, and the summary said that nothing was divided."""
    found, err = run([kind, '4'], tmp_path)
    assert sorted(name for name, *_ in found) == list('abcd'), err
    assert summary(err) == [[name + '->cpu', '1', '5', '40'] for name in 'abcd']
    assert 'nothing was divided' not in err and leases(tmp_path) == []


@on_standin
@pytest.mark.parametrize('kind', ['spawn', 'fork'])
def test_the_timeline_has_the_tracks_of_all_processes(kind, tmp_path):
    """All wrote one file, and the last one to end won; the process that is killed has its tracks, too."""
    pytest.importorskip('pygpu')
    env = environment(tmp_path, COMPILED + ',mgpu.timeline=trace.json')
    found, _ = run([kind, '2', 'kill'], tmp_path, cuda_on_cpu.environment(2, env))
    assert sorted(found) == [-signal.SIGKILL, 0] and [path.name for path in tmp_path.glob('trace*')] == ['trace.json']
    events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
    names = {event['pid']: event['args']['name'] for event in events if event['name'] == 'process_name'}
    tracks = [(names[event['pid']][:7], event['args']['name']) for event in events if event['name'] == 'thread_name']
    spans = {names[event['pid']] for event in events if event['ph'] == 'X'}
    assert {('process', 'batches on dev0'), ('process', 'batches on dev1')} <= set(tracks), tracks
    assert sum(name.startswith('process') for name in spans) == 2


@pytest.mark.slow
def test_more_processes_than_devices(tmp_path):
    found, err = run(['fork', '9'], tmp_path)
    names = [name for name, *_ in found]
    assert sorted(map(names.count, 'abcd')) == [2, 2, 2, 3]
    assert sorted(int(row[1]) for row in summary(err)) == [2, 2, 2, 3]


def test_a_process_that_is_killed_is_counted(tmp_path):
    codes, err = run(['fork', '2', 'kill'], tmp_path)
    assert codes == [0, -signal.SIGKILL]
    assert summary(err) == [['a->cpu', '1', '5', '40'], ['b->cpu', '1', '5', '40']] and leases(tmp_path) == []


@pytest.mark.slow
@on_standin
@pytest.mark.parametrize('kind', ['fork', 'spawn', 'forkserver', 'loky', 'subprocess'])
def test_no_process_has_a_context_on_another_device(kind, tmp_path):
    pytest.importorskip('pygpu')
    env = environment(tmp_path, COMPILED, CUDA_VISIBLE_DEVICES='1,2,3')
    found, err = run([kind, '3'], tmp_path, cuda_on_cpu.environment(4, env))
    assert sorted(found) == [('dev%d' % i, 'cuda%d' % i, ['dev%d' % i]) for i in range(3)], err
    assert summary(err) == [['dev%d->cuda%d' % (i, i), '1', '5', '40'] for i in range(3)]


@pytest.mark.slow_with('opened')
@on_standin
@pytest.mark.parametrize('first', ['opened', 'listed'])
def test_a_fork_after_a_gpu_was_used_computes_on_the_cpu(first, tmp_path):
    """One note says so, and what helps; processes that are started afresh use the GPUs."""
    pytest.importorskip('pygpu')
    env = cuda_on_cpu.environment(2, environment(tmp_path, COMPILED))
    found, err = run(['fork', '2', first], tmp_path, env)
    assert [device for _, device, _ in found] == ['cpu', 'cpu']
    assert err.count('compute on the CPU, since it has used a GPU before: start processes with') == 1, err
    assert summary(err) == [['host->cpu', '2', '10', '80']]


BLAS = '''
import multiprocessing

def threads(number):
    import theano_mgpu as mgpu
    from threadpoolctl import threadpool_info
    barrier.wait(60)
    mgpu.contexts()
    barrier.wait(60)
    return {each['num_threads'] for each in threadpool_info() if each['user_api'] == 'blas'}

def begin(shared):
    global barrier
    barrier = shared

if __name__ == '__main__':
    context = multiprocessing.get_context('spawn')
    with context.Pool(2, begin, [context.Barrier(2)]) as pool:
        print(pool.map(threads, range(2), 1))
'''


@pytest.mark.slow
def test_processes_share_the_cores_for_products(tmp_path):
    (tmp_path / 'blas.py').write_text(BLAS)
    env = {name: value for name, value in environment(tmp_path).items() if not name.endswith('_NUM_THREADS')}
    out, err = start(['blas.py'], tmp_path, env).communicate(timeout=60)
    expected = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ast.literal_eval(out) == [{expected}] * 2, err


ONE = '''
import sys
import theano_mgpu as mgpu
print(mgpu.contexts()[0].name, len(mgpu.contexts()), flush=True)
input()
'''


@pytest.mark.slow
def test_runs_on_one_device_each_share_a_machine(tmp_path):
    """Two take different devices; a third one that waits takes the first that is free."""
    (tmp_path / 'one.py').write_text(ONE)
    words = ['--contexts', 'a->cpu;b->cpu', '--one', 'one.py']
    both = [start(words, tmp_path) for _ in range(2)]
    lines = [each.stdout.readline() for each in both]
    assert sorted(lines) == ['a 1\n', 'b 1\n']
    waiting = start(['--wait', *words], tmp_path)
    time.sleep(1.5)
    assert waiting.poll() is None
    both[1].communicate('\n')
    assert waiting.stdout.readline() == lines[1]
    errors = [each.communicate('\n')[1] for each in (waiting, both[0])]
    assert all('nothing is divided' not in err for err in errors) and leases(tmp_path) == []


def test_options_that_do_not_fit(tmp_path, monkeypatch, capsys):
    (tmp_path / 'x.py').write_text('')
    process = start(['--wait', 'x.py'], tmp_path)
    assert '--wait goes with --one' in process.communicate()[1] and process.returncode == 2
    for name, value in zip(mpi_environment.MPIRUN.variables, '1212'):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(['run', '--one', __file__])
    assert '--one is for a script in one' in capsys.readouterr().err


FAILS = '''
import multiprocessing

import theano_mgpu

def fail(_):
    import theano
    return {}['missing']

if __name__ == '__main__':
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        pool.map(fail, [0])
'''


@pytest.mark.slow
def test_tracebacks_of_processes_are_as_under_python(tmp_path):
    (tmp_path / 'fails.py').write_text(FAILS)
    traces = []
    for words in ([], ['-m', 'theano_mgpu', 'run', '-q']):
        done = subprocess.run([sys.executable, *words, 'fails.py'], cwd=str(tmp_path), env=environment(tmp_path),
                              capture_output=True, text=True)
        traces.append((done.returncode, done.stderr[done.stderr.index('multiprocessing.pool.RemoteTraceback'):]))
    assert traces[0] == traces[1] and 'missing' in traces[0][1]


@pytest.mark.slow_but_with('2-optuna')
@pytest.mark.parametrize('number,library', enumerate(['sklearn', 'joblib', 'optuna']))
def test_recipes_of_the_guide(number, library, tmp_path):
    """Each process of GridSearchCV, joblib and a study of Optuna has its device, and has trained."""
    pytest.importorskip(library)
    text = GUIDE.read_text(encoding='utf-8')
    (tmp_path / 'recipe.py').write_text(re.findall('```python\n(.*?)```', text, re.DOTALL)[number])
    process = start(['recipe.py'], tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out, err
    rows = summary(err)
    assert [row[:2] for row in rows] == [['a->cpu', '1'], ['b->cpu', '1']] and all(int(row[3]) for row in rows), err


@pytest.mark.slow
def test_xargs_and_the_like_share_a_machine(tmp_path):
    """A run on one device waits for the next one that is free: never do two have the same one."""
    (tmp_path / 'one.py').write_text(TAKES_TURNS)
    command = [sys.executable, '-m', 'theano_mgpu', 'run', *'--contexts a->cpu;b->cpu --one --wait one.py {}'.split()]
    done = subprocess.run(['xargs', '-P', '3', '-I', '{}', *command], input='1\n2\n3\n4\n', capture_output=True,
                          text=True, cwd=str(tmp_path), env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == list('1234')
    assert leases(tmp_path) == []


TAKES_TURNS = '''
import os, sys, time
import theano_mgpu as mgpu
name = mgpu.contexts()[0].name
os.mkdir(name)  # fails if another process has the device
time.sleep(.3)
os.rmdir(name)
sys.stdout.write('%s %s\\n' % (sys.argv[1], name))
'''
A_RANK = '''
import multiprocessing
import theano_mgpu as mgpu

def name(_):
    return mgpu.contexts()[0].name, mgpu.rank()

if __name__ == '__main__':
    mgpu.contexts()
    with multiprocessing.get_context('fork').Pool(1) as pool:
        (name, rank), = pool.map(name, [0])
    assert rank == mgpu.rank() and name in ('ab' if rank == 0 else 'cd'), (name, rank)
    print('done')
'''


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize('words', [[], ['run']])
def test_processes_of_a_rank_share_its_devices(words, tmp_path):
    (tmp_path / 'script.py').write_text(A_RANK)
    job, *arguments = [*words, str(tmp_path / 'script.py')]
    done = launch(2, *arguments, job=job, flags=FOUR)
    assert done.stdout == 'done\n', done.stderr


# A module in the place of PyMC3's, whose processes are started as its are, and tell which contexts they have.
CHAINS = '''
import multiprocessing


def chain(answers, all_have_theirs):
    import theano_mgpu as mgpu
    answers.put([context.name for context in mgpu.contexts()])
    all_have_theirs.wait(120)


class ParallelSampler:
    def __init__(self, draws, tune, chains, cores):
        spawn = multiprocessing.get_context('spawn')
        self.answers, self.barrier = spawn.Queue(), spawn.Barrier(chains)
        self.chains = [spawn.Process(target=chain, args=(self.answers, self.barrier)) for _ in range(chains)]
        for each in self.chains:
            each.start()
'''
SAMPLES = '''
from pymc3 import parallel_sampling
if __name__ == '__main__':
    sampler = parallel_sampling.ParallelSampler(10, 10, 2, 2)
    found = [sampler.answers.get(timeout=120) for _ in sampler.chains]
    for each in sampler.chains:
        each.join()
    print(sorted(found))
'''


@on_standin
def test_chains_share_all_devices(tmp_path):
    """`pm.sample(chains=2, cores=2)` left two of four GPUs idle."""
    (tmp_path / 'pymc3').mkdir()
    (tmp_path / 'pymc3' / '__init__.py').touch()
    (tmp_path / 'pymc3' / 'parallel_sampling.py').write_text(CHAINS)
    script = tmp_path / 'script.py'
    script.write_text(SAMPLES)
    env = dict(cuda_on_cpu.environment(4, environment(tmp_path, COMPILED)), PYTHONPATH=search_path(tmp_path))
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', script], capture_output=True, text=True,
                          env=env, timeout=300)
    assert done.stdout == "[['dev0', 'dev1'], ['dev2', 'dev3']]\n", done.stderr
