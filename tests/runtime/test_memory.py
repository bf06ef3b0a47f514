"""Memory of devices: the moment at which each array is freed, and the advice in an error where there is too little.

Each test runs in a process on the CUDA stand-in, which counts bytes.
"""
import os
import subprocess
import sys

import cuda_on_cpu
import pytest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRELUDE = '''
import sys
sys.path[:0] = [%r]
import theano_mgpu as mgpu
import contextlib
import numpy as np, pygpu, theano, theano.tensor as T
from support.device_memory import peaks
contexts = mgpu.init('dev0->cuda0;dev1->cuda1')
''' % HERE

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]


def run(code, *arguments, flags='', **settings):
    """Return the lines that a program prints on two stand-in devices."""
    env = cuda_on_cpu.environment(2, **settings)
    env['THEANO_FLAGS'] = ','.join(filter(None, ['floatX=float32,contexts=', flags]))
    done = subprocess.run([sys.executable, '-c', PRELUDE + code] + list(arguments), env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if not line.startswith('Disabling allocation cache')]


EXACT = 'gpuarray.preallocate=-1'  # libgpuarray keeps no freed blocks

FREED = '''
from theano_mgpu.devices.contexts import gpu_context
before = peaks(2) and peaks(2)
for context in contexts:
    for _ in range(3):
        array = pygpu.empty((1 << 20,), 'float32', context=gpu_context(context))
        del array
print([peak - start for peak, start in zip(peaks(2), before)])
'''


@pytest.mark.slow
def test_freed_memory_is_given_back():
    """libgpuarray called cuMemFree without a current context: three arrays took 12 MiB."""
    assert run(FREED, flags=EXACT) == [str([4 << 20, 4 << 20])]


CHAIN = '''
def chain(n_devices, layers, width, **options):
    """A step of dense layers, in equal parts on devices."""
    rng = np.random.RandomState(0)
    x, target, params = T.fmatrix('x'), T.fmatrix('target'), []
    hidden = x
    for i in range(layers):
        place = mgpu.device('dev%d' % (i * n_devices // layers)) if n_devices > 1 else contextlib.nullcontext()
        with place:
            params.append(theano.shared(rng.uniform(-.05, .05, (width, width)).astype('float32'), 'w%d' % i))
            hidden = T.tanh(T.dot(hidden, params[-1]))
            if i == layers - 1:
                loss = T.sqr(hidden - target).mean()
    return params, mgpu.training_function(
        [x, target], loss, params, lambda gradients: [(w, w - np.float32(.1) * g) for w, g in zip(params, gradients)],
        contexts=['dev0', 'dev1'][:n_devices], **options)

def batch(n, width):
    rng = np.random.RandomState(1)
    return [rng.uniform(-1, 1, (n, width)).astype('float32') for _ in range(2)]
'''

PEAKS = CHAIN + '''
import gc
for name, n_devices, options in [('one', 1, {}), ('two', 2, {}), ('slices', 2, dict(micro_batches=4)),
                                 ('again', 2, dict(micro_batches=4, recompute=True))]:
    _, step = chain(n_devices, 8, 64, **options)
    for _ in range(2):
        step(*batch(4096, 64))
    gc.collect()
    peaks(2)
    before = peaks(2)
    step(*batch(4096, 64))
    print(name, *['%.2f' % ((peak - start) / 2 ** 20) for peak, start in zip(peaks(2), before)])
'''


@pytest.fixture(scope='module')
def mib():
    """Return the MiB that a step takes on each device, besides parameters and inputs; an activation has 1 MiB.

    A call that is compared before it becomes a graph takes more.
    """
    return {name: [float(each) for each in found]
            for name, *found in (line.split() for line in run(PEAKS, flags=EXACT + ',mgpu.cuda_graphs=off'))}


@pytest.mark.slow
def test_a_backward_pass_frees_what_a_layer_has_kept(mib):
    """Theano computed the gradients of all activations before the first weights' gradient: 15 MiB with 8 layers."""
    assert mib['one'][0] < 9.5


@pytest.mark.slow
def test_a_placed_layer_keeps_one_activation(mib):
    """1 - h ** 2 was kept beside h for the backward pass: 10 MiB. All gradients were on the second device: 9 MiB."""
    first, second = mib['two']
    assert first < 7.5 and second < 6.5


@pytest.mark.slow
def test_what_was_copied_for_a_micro_batch_is_freed(mib):
    """The activations of the first device, a quarter of a MiB a micro-batch, stayed on the second one."""
    assert mib['slices'][1] < 2.2


@pytest.mark.slow
def test_what_is_computed_again_is_not_kept(mib):
    assert mib['again'][0] < 0.6 * mib['slices'][0]


TOO_LARGE = CHAIN + '''
placed = sys.argv[1] == 'placed'
try:
    params, step = chain(1 + placed, 8, 1024)
    losses = [float(step(*batch(32, 1024))) for _ in range(3)]
    print(losses[0] > losses[1] > losses[2])
except mgpu.ReplicaError as error:
    print(error)
    print(repr(error.__cause__), error.context.name, error.samples)
'''
ADVICE = ['give smaller batches', 'micro_batches=2 or more', "update_on='host'", "with mgpu.device('dev1')",
          'recompute=True']


@pytest.mark.slow
def test_a_model_that_does_not_fit_on_one_device_trains_on_two():
    """The step holds eight layers of 4 MiB, as many new values, and the results of the ops."""
    assert run(TOO_LARGE, 'placed', memory='56M') == ['True']


@pytest.mark.slow
@pytest.mark.parametrize('memory,doing,samples', [('56M', 'samples 0 to 31', '(0, 32)'),
                                                  ('24M', 'copies of shared variables', 'None')])
def test_a_lack_of_memory_comes_with_advice(memory, doing, samples):
    """The lack occurs in a step, or before it."""
    message, cause = run(TOO_LARGE, 'whole', memory=memory, flags='mgpu.micro_batches=1')
    assert message.startswith('replica 0 (context dev0->cuda0, %s) failed, nothing was changed' % doing)
    assert 'cuda0 has %s MiB of memory' % memory[:-1] in message and all(text in message for text in ADVICE)
    assert 'CUDA_ERROR_OUT_OF_MEMORY' in cause and cause.endswith('dev0 ' + samples)


LARGEST = CHAIN + '''
from theano_mgpu.plan.explain import explanation
from theano_mgpu.plan.largest_batch import estimated
_, step = chain(1, 6, 128)
before, size = estimated(step.plan, step.built.meter), int(sys.argv[1])
for _ in range(3):
    step(*batch(size, 128))
known = explanation(step.plan, memory=estimated(step.plan, step.built.meter))
row, = known['memory']
print(before, row['used'] is None, known['fits'])
print(row['largest_batch'], known['largest_batch'], len(step.built.splitter.slices))
'''


@pytest.mark.slow
def test_the_largest_batch_is_about_the_one_that_fits():
    sentence, numbers = run(LARGEST, '16000', memory='256M')
    largest, of_all, slices = map(int, numbers.split())
    assert largest == of_all and slices == 0
    assert sentence == ('None False Batches of up to about %d samples fit at once; larger ones are computed in slices.'
                        % largest)
    for part, expected in ((.9, 0), (1.1, 1)):
        assert run(LARGEST, str(int(part * largest)), memory='256M')[1].split()[-1] == str(expected)


@pytest.mark.slow_but_with('-1')
@pytest.mark.parametrize('preallocate', [-1, .2])
def test_a_plan_says_that_memory_is_not_measured(preallocate):
    """The memory in use after a step is the most that was in use in it with the usual cache alone."""
    line, _ = run(LARGEST, '100', flags='gpuarray.preallocate=%s' % preallocate)
    assert line.startswith('MemoryEstimate(used={}') and 'True The memory of the devices is not measured' in line


KERAS = '''
from keras.layers import Dense
from keras.models import Sequential
from theano_mgpu.keras import multi_gpu_model
model = multi_gpu_model(Sequential([Dense(1024, input_dim=1024), Dense(1024)]), gpus=2)
model.compile('adam', 'mse')
try:
    model.fit(np.ones((8, 1024), 'float32'), np.ones((8, 1024), 'float32'), verbose=0)
except mgpu.ReplicaError as error:
    print(error)
'''


@pytest.mark.slow
def test_fit_gives_the_same_advice():
    message, = run(KERAS, flags='optimizer=fast_compile', memory='16M')
    assert 'cuda0 has 16 MiB of memory' in message and all(text in message for text in ADVICE)
