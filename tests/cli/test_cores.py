"""`theano-mgpu run` without a GPU and without a map: a context for each core."""
import textwrap

from theano_mgpu.devices import discovery
from theano_mgpu.devices.contexts import are_cores, choose_contexts, init
from theano_mgpu.utils import mpi_environment, processor

import pytest
from support.processes import python

QUICK = 'floatX=float32,cxx=,optimizer=fast_compile'
SCRIPT = textwrap.dedent('''
    import numpy as np, theano, theano.tensor as T
    x, w = T.matrix('x'), theano.shared(np.ones((8, 4), 'float32') / 8, 'w')
    loss = (T.tanh(T.dot(x, w)) ** 2).mean()
    step = theano.function([x], loss, updates=[(w, w - np.float32(.1) * T.grad(loss, w))], name='step')
    data = np.arange(120, dtype='float32').reshape(15, 8) / 100
    for _ in range(20):
        value = step(data)
    print('%.5f' % value, w.get_value().round(4).tolist())
''')


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(discovery, 'discover_best', lambda: ['cpu'])
    monkeypatch.setattr(processor, 'cores', lambda: 3)
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setenv('THEANORC', '/nowhere')
    yield
    init('host0->cpu')


def names(contexts):
    return [context.name for context in contexts]


def test_there_is_a_context_for_each_core(no_gpu):
    cores = init()
    assert names(cores) == ['dev0', 'dev1', 'dev2'] and are_cores(cores) and are_cores(cores[:2])
    assert not are_cores(cores[:1]) and not are_cores(init(2)) and not are_cores(init('a->cpu;b->cpu'))
    assert not are_cores(cores)


def test_a_map_counts_and_so_does_a_gpu(no_gpu, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=a->cpu;b->cpu')
    assert names(init()) == ['a', 'b'] and not are_cores(init())
    monkeypatch.setenv('THEANO_FLAGS', '')
    monkeypatch.setattr(discovery, 'discover_best', lambda: ['opencl0:0'])
    assert [context.device for context in choose_contexts(None)] == ['opencl0:0']


def test_the_processes_of_a_job_share_the_cores_of_a_host(no_gpu, monkeypatch):
    """A process has the part that launch sets for it; without launch, its part of all cores."""
    for name, value in zip(mpi_environment.MPIRUN.variables, '1212'):  # the second of two
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    assert names(init()) == ['dev3', 'dev4', 'dev5']
    monkeypatch.delenv('OMP_NUM_THREADS')
    assert names(init()) == ['dev1']


def run(words, folder, **environment):
    (folder / 'train.py').write_text(SCRIPT)
    return python('-m', 'theano_mgpu', 'run', '--always', *words, 'train.py', folder=folder, flags=QUICK, THEANORC=None,
                  CUDA_VISIBLE_DEVICES='', **environment)


def test_a_script_runs_over_the_cores(tmp_path):
    """One context was there, and nothing was divided. A script that asked for processes has contexts."""
    alone = run([], tmp_path, OMP_NUM_THREADS='1')
    done = run([], tmp_path, OMP_NUM_THREADS=None)
    assert done.stdout == alone.stdout
    code = 'from theano_mgpu.utils import processor; print(processor.cores())'
    cores = int(python('-c', code, OMP_NUM_THREADS=None).stdout)
    assert cores == 1 or 'on %d contexts (dev0->cpu;dev1->cpu' % cores in done.stderr, done.stderr
    for words in ['--processes', '2'], ['--processes=2', '--quiet'], ['--processes', 'auto']:
        done = run(words, tmp_path, OMP_NUM_THREADS='1')
        assert done.stdout == alone.stdout and done.stderr.count('--processes is not needed: ') == 1
        is_told = '--quiet' not in words and 'auto' not in words
        assert ('on 2 contexts (dev0->cpu;dev1->cpu)' in done.stderr) == is_told, done.stderr
