"""Functions that are not divided, on a machine with devices: they run on the first one, where that is faster."""
import subprocess
import sys

import cuda_on_cpu
import pytest
from support.search_path import ROOT, search_path
from support.standin import launched, run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]
FLAGS = 'contexts=dev0->cuda0;dev1->cuda1'

TRAINED = '''
import time
import theano, theano.tensor as T
report = mgpu.enable(tell=print)
random = np.random.RandomState(0)
X = random.rand(64, 512).astype('float32')
w = theano.shared(random.rand(512, 512).astype('float32'), 'w')
x = T.matrix('x')
loss = T.sqr(T.tanh(T.dot(x, w))).mean()
with_batch = mgpu.training_function([x], loss, [w], lambda gradients: [(w, w - .1 * gradients[0])])
norm = theano.function([], T.sqr(T.tanh(T.dot(w, w))).sum(), name='norm')
for step in range(40):
    with_batch(X)
    if step == 38:
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
    value = norm()
end = time.clock_gettime(time.CLOCK_MONOTONIC)
usage = [each for each in report.usages if each.name == 'norm'][0]
expected = np.square(np.tanh(w.get_value().dot(w.get_value()))).sum()
assert abs(value - expected) < 1e-4 * expected, (value, expected)
print(begin, end)
print(usage.contexts[0].name, usage.why)
'''


def copies(trace, start, stop):
    """Return the bytes of the copies from devices to the host in a time, each."""
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [int(words[0]) for when, _, what, _, *words in lines if what == 'DtoH' and start < float(when) < stop]


@pytest.mark.slow
def test_a_function_without_a_batch_reads_the_weights_on_the_device(tmp_path):
    """After each training step, all weights came back to the host, where the function computed."""
    *_, times, usage = run(TRAINED, flags=FLAGS, trace=tmp_path / 'trace', copy_rate=50)
    assert usage.startswith('dev0 whole, ') and '(host ' in usage
    found = copies(tmp_path / 'trace', *map(float, times.split()))
    assert found and max(found) < 4 * 512 * 512


UNDIVIDED = '''
import theano, theano.tensor as T
from support.dispatch_clock import Clock
from theano.sandbox.rng_mrg import MRG_RandomStreams
random = np.random.RandomState(0)
X = random.rand(40, 6).astype('float32')


def shared(*shape):
    return theano.shared(np.random.RandomState(sum(shape)).rand(*shape).astype('float32'))


def sampler():
    """A step of Hamiltonian Monte Carlo of one chain."""
    position, streams, data = shared(6), MRG_RandomStreams(3), theano.shared(X)
    energy = lambda q: T.sqr(T.dot(data, q) - 1).sum() + T.sqr(q).sum()
    velocity = streams.normal((6,))
    (moved, speeds), _ = theano.scan(lambda q, v: (q + .01 * v, v - .01 * T.grad(energy(q + .01 * v), q)),
                                     outputs_info=[position, velocity], n_steps=3)
    change = energy(position) - energy(moved[-1]) + T.sqr(velocity).sum() / 2 - T.sqr(speeds[-1]).sum() / 2
    taken = T.lt(T.log(streams.uniform(())), change)
    return [], [taken, change], [(position, T.switch(taken, moved[-1], position))]


def gibbs():
    """A Gibbs step of a restricted Boltzmann machine, of one chain."""
    w, visible, streams = shared(6, 4), shared(1, 6), MRG_RandomStreams(5)
    hidden = streams.binomial((1, 4), p=T.nnet.sigmoid(T.dot(visible, w)), dtype='float32')
    p = T.nnet.sigmoid(T.dot(hidden, w.T))
    return [], p, [(visible, streams.binomial((1, 6), p=p, dtype='float32'))]


def process():
    """The prediction of a Gaussian process."""
    inputs, width = theano.shared(X[:9]), T.fscalar('width')
    squares = T.sqr(inputs.dimshuffle(0, 'x', 1) - inputs.dimshuffle('x', 0, 1)).sum(axis=2)
    kernel = T.exp(-squares / width) + T.eye(9, dtype='float32')
    return [width], T.dot(kernel, T.slinalg.solve(kernel, inputs[:, 0])), ()


def generator():
    """A generator that is asked for one sample in each call."""
    z, w, v = T.fmatrix('z'), shared(6, 8), shared(8, 5)
    return [z], T.tanh(T.dot(T.nnet.relu(T.dot(z, w)), v)), ()


ARGUMENTS = {process: [np.float32(2)], generator: [X[:1]]}
found = []
for is_enabled in (False, True):
    if is_enabled:
        report = mgpu.enable(strict=True)
        Clock(divided=3e-3, whole=2e-3, first=1e-3).install(setattr)
    for program in (sampler, gibbs, process, generator):
        inputs, outputs, updates = program()
        f = theano.function(inputs, outputs, updates=updates, name=program.__name__)
        results = [f(*ARGUMENTS.get(program, [])) for _ in range(30)]
        found.append(results + [variable.get_value() for variable, _ in updates])
for one, other in zip(found[:4], found[4:]):
    for ours, theirs in zip(other, one):
        for a, b in zip(*[each if isinstance(each, list) else [each] for each in (ours, theirs)]):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
for usage in report.usages:
    print(usage.name, *[context.name for context in usage.contexts], usage.why)
'''


def test_samplers_and_single_samples_run_on_one_device():
    """One card was no choice for such functions: the host of a machine full of them computed."""
    found = dict(line.split(' ', 1) for line in run(UNDIVIDED, flags=FLAGS)[-4:])
    assert list(found) == ['sampler', 'gibbs', 'process', 'generator']
    for name, where in found.items():
        assert where.startswith('dev0 whole, 1 ms (host 2 ms'), (name, where)


THREE_WAYS = """
import theano, theano.tensor as T
from support.dispatch_clock import Clock
X = np.random.RandomState(0).rand(40, 6).astype('float32')
x, found = T.matrix('x'), []
for first, divided in ((None, None), (2e-3, 1e-3), (1e-3, 2e-3)):
    if first:
        report = mgpu.enable(strict=True)
        clock = Clock(divided=divided, whole=3e-3, first=first)
        clock.install(setattr)
    w = theano.shared(np.ones(6, 'float32'))
    f = theano.function([x], T.dot(x, w).mean(), updates=[(w, w - T.grad(T.sqr(T.dot(x, w)).mean(), w) / 9)], name='f')
    with theano.configparser.change_flags(**{'mgpu.shares': 'equal'}):
        found.append([f(X) for _ in range(30)] + [w.get_value()])
    if first:
        usage = report.usages[-1]
        print(*[context.name for context in usage.contexts], usage.why, clock.calls.count('whole'))
for other in found[1:]:
    for one, two in zip(found[0], other):
        np.testing.assert_allclose(two, one, rtol=1e-4)
"""


@pytest.mark.slow
def test_a_function_with_a_batch_is_timed_in_all_three_ways():
    """A call on one device was no news afterwards, and several devices were never tried."""
    assert run(THREE_WAYS, flags=FLAGS)[-2:] == [
        'dev0 dev1 divided, 1 ms (host 3 ms, one device 2 ms) 8',
        'dev0 whole, 1 ms (host 3 ms, divided 2 ms) 8']


CHILD = """
import sys
sys.path[:0] = %r
import theano_mgpu as mgpu, numpy as np, theano, theano.tensor as T
from support.dispatch_clock import Clock
from theano_mgpu.auto.report import reports
Clock(divided=3e-3, whole=2e-3, first=1e-3).install(setattr)
w = theano.shared(np.ones((8, 8), 'float32'))
f = theano.function([], T.tanh(T.dot(w, w)).sum(), name='f')
for _ in range(20):
    assert abs(f() - 64) < 1e-3
usage, = [each for report in reports for each in report.usages if each.name == 'f']
print(mgpu.contexts()[0].device, usage.contexts == mgpu.contexts(), usage.why, flush=True)
input()
"""
SCRIPT = """
import subprocess, sys
processes = [subprocess.Popen([sys.executable, '-c', %r], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
             for _ in range(2)]
lines = [process.stdout.readline().strip() for process in processes]
for process in processes:
    process.communicate('end')
print(*sorted(lines), sep='\\n')
"""


def test_processes_that_a_script_starts_compute_on_their_own_card(tmp_path):
    """All of them took the first card, by the flag `device=cuda0` of the environment."""
    script, child = tmp_path / 'script.py', CHILD % ([str(ROOT / 'tests')],)
    script.write_text(SCRIPT % child)
    env = {**cuda_on_cpu.environment(2), 'THEANO_FLAGS': 'device=cuda0,floatX=float32', 'PYTHONPATH': search_path(),
           'TMPDIR': str(tmp_path)}  # the process of the tests has cards, too
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', str(script)], env=env, capture_output=True,
                          text=True, timeout=300)
    expected = ['cuda%d True whole, 1 ms (host 2 ms; no batch enters it)' % number for number in (0, 1)]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr


RANKS = """
import theano, theano.tensor as T
from theano.tensor.shared_randomstreams import RandomStreams
report = mgpu.enable(tell=str)
w = theano.shared(np.ones((8, 8), 'float32'), 'w')
x = T.matrix('x')
step = mgpu.training_function([x], T.sqr(T.dot(x, w)).mean(), [w], lambda gradients: [(w, w - .1 * gradients[0])])
norm = theano.function([], T.tanh(T.dot(w, w)).sum(), name='norm')
decay = theano.function([], updates=[(w, w * np.float32(.5))], name='decay')
draw = RandomStreams(3).uniform((3,))  # of a state, which has no axes
noise = theano.function([], w.sum() + draw.sum(), no_default_updates=True, name='noise')
drawn = theano.function([], draw.sum(), no_default_updates=True)()
for _ in range(3):
    step(np.ones((4, 8), 'float32'))
    decay()
    value = w.get_value()
    assert abs(noise() - value.sum() - drawn) < 1e-3
    assert abs(norm() - np.tanh(value.dot(value)).sum()) < 1e-3
with open('%%s.%%d' %% (%r, mgpu.rank()), 'w') as file:
    print(*[context.device for context in mgpu.contexts()], *[context.device for each in report.usages[:1]
                                                              for context in each.contexts], file=file)
    print(*[each.why for each in report.usages], sep='; ', file=file)
"""


@pytest.mark.mpi
def test_each_rank_computes_what_is_not_divided_on_its_own_card(tmp_path):
    """Each rank computed a cost over the weights on the host, and all weights came back after each step."""
    launched(2, RANKS % str(tmp_path / 'rank'), tmp_path, 2)
    for rank in range(2):
        devices, why = (tmp_path / ('rank.%d' % rank)).read_text().splitlines()
        assert devices == 'cuda%d cuda%d' % (rank, rank)
        assert why.startswith('whole (no batch enters it); '), why
