"""Bugs that were found and fixed, each under its symptom: contexts beside a default device, by the flag `device=cuda0`.

Theano's shared variables are then arrays of this device, in a context without a name.
"""

import cuda_on_cpu
import pytest
from support.data_set_cases import CASES
from support.inner_graphs import CASES as INNER
from support.standin import launched, run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.verified,
              pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')]

FLAGS = 'contexts=dev0->cuda0;dev1->cuda1,device=cuda0,floatX=float64'

TRAINED = '''
import theano, theano.tensor as T
X = np.random.RandomState(0).rand(30, 4)
data, rate, w = theano.shared(X, 'data'), theano.shared(np.array([.1]), 'rate'), theano.shared(np.ones(5), 'w')
i, rows = T.lscalar('i'), T.matrix('rows')
x = data[i * 10:(i + 1) * 10]
loss = T.sqr(T.dot(x, w[:-1]) + w[-1] - x.shape[1]).mean()
update = w - rate.sum() * T.grad(loss, w)
assert 'Gpu' in type(data).__name__

step = mgpu.training_function([i], loss, [w], lambda gradients: [(w, w - rate.sum() * gradients[0])])
one_device = theano.function([i], [loss, update])
with mgpu.Predictor([rows], T.dot(rows, w[:-1])) as predictor:
    np.testing.assert_allclose(predictor.predict(X), X.dot(np.ones(4)))
    for number in range(3):
        cost, new = one_device(number)
        np.testing.assert_allclose(step(number), cost, 1e-12)
        np.testing.assert_allclose(w.get_value(), new, 1e-12)
print(*sorted(each.variable.name for each in step.variables()))
'''

COMPUTED = '''
from support.data_set_cases import CASES, differences
for name in %r:
    difference, usage = differences(CASES[name], None)
    assert difference < 1e-12 and (usage.why, usage.calls) == ('divided', 3), (name, difference, usage.why)
    print(name)
'''


@pytest.mark.slow
def test_a_model_trains_on_slices_of_a_data_set_of_the_default_device():
    """A device was given arrays of another one, "Expected 2 dimensions input", "context name dev0.1 not defined"."""
    assert run(TRAINED, flags=FLAGS) == ['rate w']


@pytest.mark.slow
@pytest.mark.parametrize('names', [
    ['logistic', 'numbered', 'noisy', 'sampler'], list(CASES)], ids=str)
def test_data_sets_of_the_default_device_are_the_batch(names):
    """Replicas in threads read the memory of one device at once: "invalid device context"."""
    assert run(COMPUTED % (names,), flags=FLAGS) == names


WITHIN = '''
from functools import partial
import theano
from support.inner_graphs import CASES, results
for name, make in CASES.items():
    expected, _ = results(make, partial(theano.shared, target='cpu'), theano.function)
    found, step = results(make, theano.shared, mgpu.function)
    assert step.plan.program.is_divided, step.plan
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, 1e-12, 1e-12, err_msg=name)
    print(name)
'''
INTERPRETED = 'linker=py,optimizer=fast_compile,optimizer_excluding=gpuarray_opt:gpuarray'


@pytest.mark.slow
@pytest.mark.parametrize('flags', [
    'a->cpu;b->cpu,device=cuda0,floatX=float64,' + INTERPRETED, FLAGS[len('contexts='):]], ids=['cpu', 'cuda'])
def test_graphs_within_ops_are_divided(flags):
    """A function with a Hessian, or with a graph of its own within an op, stayed on one device."""
    assert run(WITHIN, flags='contexts=' + flags) == list(INNER)


CHILD = """
import os, subprocess
code = 'import theano_mgpu, theano, numpy; print(type(theano.shared(numpy.ones(3))).__name__)'
print(subprocess.run([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True).stdout.strip())
"""


@pytest.mark.slow
def test_a_child_process_opens_the_default_device():
    """Processes that a process started printed "You can't initialize the GPU in a subprocess"."""
    assert run(CHILD, flags=FLAGS) == ['GpuArraySharedVariable']


RESERVED = """
import theano
mgpu.init('dev0->cuda0;dev1->cuda1;dev2->cuda0')
from theano.gpuarray.type import get_context
default = get_context(None)
print(get_context('dev0') is default, get_context('dev1') is default, get_context('dev2') is default)
"""


@pytest.mark.slow
@pytest.mark.parametrize('flags, same', [
    ('device=cuda', 'True False False'), ('device=cuda0', 'True False False'),
    ('device=cuda1', 'False True False')])
def test_memory_of_the_default_device_is_reserved_once(flags, same):
    """A context could not reserve as much again: "Trying to preallocate 80 MB, while only 20 MB are available".

    Two contexts of one device that are asked for stay two, since each thread needs its own.
    """
    assert run(RESERVED, flags=flags + ',gpuarray.preallocate=30', memory='100M')[-1] == same


OF_A_JOB = """
import theano, theano.tensor as T
w = theano.shared(np.ones(3, 'float32'), 'w')
x = T.matrix('x')
step = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w], lambda gradients: [(w, w - .1 * gradients[0])])
print(float(step(np.ones((4, 3), 'float32'))), type(w).__name__, *theano.gpuarray.type.list_contexts())
"""


@pytest.mark.mpi
def test_processes_of_a_job_leave_the_default_device(tmp_path):
    """All reserved memory of the first device, and the second process found too little."""
    flags = 'device=cuda,gpuarray.preallocate=30'
    assert launched(2, OF_A_JOB, tmp_path, 2, flags, memory='100M')[-1] == '9.0 TensorSharedVariable dev0'


ONE_COPY = """
import theano, theano.tensor as T
from support.device_memory import peaks
X = np.random.RandomState(0).rand(64, 1000).astype('float32')
w = theano.shared(np.ones((1000, 500), 'float32'), 'w')
x = T.matrix('x')
step = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w], lambda gradients: [(w, w - .1 * gradients[0])])
plain = theano.function([x], T.sqr(T.dot(x, w)).mean())
for _ in range(3):
    step(X)
    cost = plain(X)
expected = np.ones((1000, 500))
for _ in range(3):
    expected -= .1 * 2 / 64 / 500 * X.T.dot(X.dot(expected))
np.testing.assert_allclose(w.get_value(), expected, rtol=1e-4)
np.testing.assert_allclose(cost, np.square(X.dot(expected)).mean(), rtol=1e-4)

step(X), plain(X), peaks(2)
print(*[round(each / 2e6, 1) for each in peaks(2)])
"""


def test_a_variable_of_the_default_device_has_one_copy_there(tmp_path):
    """The first context had a second copy on the same device, and each change of hands went through the host."""
    trace = tmp_path / 'trace'
    flags = FLAGS.replace('float64', 'float32') + ',gpuarray.preallocate=-1,mgpu.cuda_graphs=off'
    copies = run(ONE_COPY, flags=flags, trace=trace, nccl_memory='1')[-1]  # results of graphs are copies
    assert all(1 <= float(each) < 1.5 for each in copies.split()), copies
    moved = [line.split() for line in trace.read_text().splitlines()]
    large = [words[3] for words in moved if words[2] in ('HtoD', 'DtoH') and int(words[4]) == 2000000]
    assert large == ['dev0', 'dev0', 'dev1', 'dev0'], large  # one for each device, and the script's own read
