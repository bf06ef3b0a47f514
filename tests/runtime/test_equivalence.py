"""N contexts against plain Theano: the same parameters after 50 ragged steps."""
import theano_mgpu as mgpu
from theano_mgpu.utils.executors import make_executor

import numpy as np
import pytest
import theano
from models import adam, plain_step
from support.modes import LAZY
from support.small_models import batches, conv_model, data, dense_model, largest_relative_difference, momentum

TOLERANCE = {'float32': 1e-5, 'float64': 1e-10}
STEPS = 50
# float64 on devices and with convolutions: in `make test-slow`, since its kernels are compiled for it alone.
FLOAT64_SLOW = pytest.mark.parametrize('dtype', ['float32', pytest.param('float64', marks=pytest.mark.slow)],
                                       indirect=True)


@pytest.fixture(params=['float32', 'float64'])
def dtype(request):
    with theano.configparser.change_flags(floatX=request.param):
        yield request.param


def train_plain(make_model, updates, x, labels, size):
    model = make_model()
    step = plain_step(model, updates)
    losses = train(step, x, labels, size)
    return model, losses


def train(step, x, labels, size):
    """Run STEPS steps; each epoch ends with a ragged batch, and so does the last one."""
    parts = batches(len(x), size)
    assert len(x) % size and STEPS % len(parts) == 0
    return [float(step(x[part], labels[part])) for _ in range(STEPS // len(parts)) for part in parts]


@pytest.fixture(scope='module')
def plain():
    """Return the results of plain Theano, computed once for each model and dtype."""
    known = {}

    def get(key, *args):
        if key not in known:
            known[key] = train_plain(*args)
        return known[key]
    return get


@pytest.mark.slow
@pytest.mark.parametrize('n', [1, 2, 3, 4])
def test_dense_with_adam(contexts, n, dtype, plain):
    """Four contexts compute in Python in float64: code would be compiled for this test alone."""
    with theano.configparser.change_flags(mode=LAZY if (n, dtype) == (4, 'float64') else theano.config.mode):
        check_dense(contexts, 'cpu', n, dtype, plain)


@pytest.mark.opencl
@FLOAT64_SLOW
@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.cuda(opencl='slow')),
                               pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_dense_with_adam_on_devices(contexts, n, dtype, plain):
    check_dense(contexts, 'gpu', n, dtype, plain)


def check_dense(contexts, kind, n, dtype, plain):
    """Check both executors, one after the other, from the same start: all state is set back in between."""
    x, labels = data(93, 7, dtype=dtype)  # 10 batches of 10, the last of 3: fewer than 4 contexts
    expected, losses = plain(('dense', dtype), lambda: dense_model(dtype=dtype), adam, x, labels, 10)
    contexts(kind, n)
    model, start = dense_model(dtype=dtype), dense_model(dtype=dtype)
    made = {}

    def updates(gradients, params):
        made.update(adam(gradients, params))
        return made

    step = mgpu.training_function(model.inputs, model.loss, model.params, updates)
    for executor in ('serial', 'threads'):
        for variable in made:
            variable.set_value(variable.get_value() * 0)
        for param, first in zip(model.params, start.params):
            param.set_value(first.get_value())
        step.executable.launcher.executor = make_executor(executor, n)
        np.testing.assert_allclose(train(step, x, labels, 10), losses, rtol=TOLERANCE[dtype])
        assert largest_relative_difference(model, expected) < TOLERANCE[dtype]
    assert not mgpu.audit(step).wrong


@pytest.mark.parametrize('kind', [pytest.param('cpu', marks=pytest.mark.slow),
                                  pytest.param('gpu', marks=pytest.mark.opencl)])
@pytest.mark.cuda(opencl='slow')
@pytest.mark.needs_compiler
@FLOAT64_SLOW
@pytest.mark.parametrize('n', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_convolution_with_momentum(contexts, kind, n, dtype, plain):
    x, labels = data(37, 2, 8, 8, dtype=dtype)  # 5 batches of 8, the last of 5
    expected, losses = plain(('conv', dtype), lambda: conv_model(dtype=dtype), momentum, x, labels, 8)
    contexts(kind, n)
    model = conv_model(dtype=dtype)
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    np.testing.assert_allclose(train(step, x, labels, 8), losses, rtol=TOLERANCE[dtype])
    assert largest_relative_difference(model, expected) < TOLERANCE[dtype]
    assert not mgpu.audit(step).wrong


@pytest.mark.slow
@pytest.mark.opencl
def test_contexts_of_several_kinds(contexts, plain):
    """One function has a CPU and a GPU context."""
    gpu = contexts('gpu', 1)[0]
    mgpu.init('host0->cpu;%s->%s' % (gpu.name, gpu.device))
    x, labels = data(93, 7)
    expected, _ = plain(('dense', 'float32'), dense_model, adam, x, labels, 10)
    model = dense_model()
    train(mgpu.training_function(model.inputs, model.loss, model.params, adam), x, labels, 10)
    assert largest_relative_difference(model, expected) < TOLERANCE['float32']


@pytest.mark.slow_but_with('20-cpu')
@pytest.mark.parametrize('micro_batches,kind', [(2, 'gpu'), (3, 'cpu'), (20, 'cpu')])
def test_micro_batches_are_exact(contexts, kind, micro_batches, plain):
    x, labels = data(93, 7)
    expected, losses = plain(('dense', 'float32'), dense_model, adam, x, labels, 10)
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, adam, micro_batches=micro_batches)
    np.testing.assert_allclose(train(step, x, labels, 10), losses, rtol=1e-5)
    assert largest_relative_difference(model, expected) < 1e-5


@pytest.mark.cuda
def test_update_state_is_that_of_one_device(contexts, kind):
    x, labels = data(11, 7)
    made = {}

    def keeping(name):
        def updates(gradients, params):
            made[name] = adam(gradients, params)
            return made[name]
        return updates

    reference, model = dense_model(), dense_model()
    plain = plain_step(reference, keeping('plain'))
    contexts(kind, 2)
    step = mgpu.training_function(model.inputs, model.loss, model.params, keeping('mgpu'))
    for _ in range(5):
        plain(x, labels)
        step(x, labels)
    for ours, theirs in zip(made['mgpu'], made['plain']):
        np.testing.assert_allclose(ours.get_value(), theirs.get_value(), rtol=1e-5, atol=1e-7, err_msg=str(ours))
