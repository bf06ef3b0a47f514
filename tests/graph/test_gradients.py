"""Bugs that were found and fixed, each under its symptom: gradients, and the analysis of graphs."""

import theano_mgpu as mgpu
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.small_models import data, dense_model, momentum
from theano.gof.graph import ancestors, io_toposort
from theano.tensor.nnet import conv
from theano.tensor.nnet.abstract_conv import AbstractConv2d_gradInputs
from theano.tensor.signal.pool import MaxPoolGrad, pool_2d

pytestmark = pytest.mark.verified


@pytest.mark.slow
def test_what_is_made_of_the_gradient_of_a_mean_is_exact(cpu2):
    """Replicas divided by the samples of their sub-batch: wrong by 1e-2, without a word."""
    found = []
    for parallel in (True, False):
        model = dense_model()
        u = theano.shared(np.zeros((7, 9), 'float32'), name='u')
        new = {u: u - np.float32(0.1) * T.grad(model.loss, model.params[0])}
        if parallel:
            step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, batch_updates=new,
                                          mode='FAST_COMPILE')
        else:
            updates = momentum(T.grad(model.loss, model.params), model.params)
            step = theano.function(model.inputs, model.loss, updates=list({**new, **updates}.items()))
        for n in (9, 4, 1):
            step(*data(n, 7, seed=n))
        found.append(u.get_value())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)


def normalised(x):
    axes = (0, 2, 3)
    return (x - x.mean(axes, keepdims=True)) * T.inv(T.sqrt(x.var(axes, keepdims=True) + 1e-4))


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('largest', [
    lambda x: pool_2d(T.nnet.relu(x), (2, 2), ignore_border=True), lambda x: x.max(axis=3, keepdims=True),
    lambda x: T.maximum(x, 0.1 * x ** 2)], ids=['pool', 'max', 'maximum'])
def test_gradients_of_maxima_between_normalisations_reach_their_pixels(largest, cpu2):
    """Batch normalisation, ReLU, max-pooling: gradients before them were wrong by a factor of 2, without a warning.

    The pixels were computed twice, by other ops, and in the last bit were not equal to their maximum.
    """
    found = []
    for divided in (False, True):
        rng = np.random.RandomState(0)
        x = T.dtensor4('x')
        gain, shift = [theano.shared(rng.rand(1, 3, 1, 1) + 0.5, name, broadcastable=(True, False, True, True))
                       for name in ('gain', 'shift')]
        loss = (T.tanh(normalised(largest(normalised(x) * gain + shift))) ** 3).sum()
        updates = [(p, p - 0.01 * T.grad(loss, p)) for p in (gain, shift)]
        make = mgpu.function if divided else theano.function
        step = make([x], loss, updates=updates, mode=theano.Mode('cvm', 'fast_run'))
        images = rng.randn(7, 3, 6, 6)
        found.append([step(images) for _ in range(2)] + [gain.get_value(), shift.get_value()])
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-9)


def test_pixels_and_their_maximum_come_from_one_computation():
    """A later stage that computes the pixels again, by other ops, may round them to something else than the maximum."""
    x = T.dtensor4('x')
    gain = theano.shared(np.ones((1, 3, 1, 1)), broadcastable=(True, False, True, True))
    pooled = pool_2d(T.nnet.relu(normalised(x) * gain), (2, 2), ignore_border=True)
    program = partition([x], [T.grad((normalised(pooled) ** 3).sum(), gain)])
    gradients = [v.owner for stage in program.stages for v in ancestors(stage.outputs)
                 if v.owner and isinstance(v.owner.op, MaxPoolGrad)]
    assert gradients and all(v.owner is None for node in gradients for v in node.inputs[:2])


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_the_gradient_of_the_images_of_a_legacy_convolution_copies_no_image_for_each_element_of_a_kernel(cpu2):
    """A step of a CNN over word vectors (kernels as wide as these) took 11 GB, and minutes; plain Theano some MB."""
    x, w = T.ftensor4('x'), theano.shared(np.random.RandomState(0).randn(4, 1, 3, 9).astype('float32'), 'w')
    known = conv.conv2d(x, w, image_shape=(6, 1, 12, 9), filter_shape=(4, 1, 3, 9))
    outputs = [known.sum()] + T.grad(T.sqr(known).sum(), [w, x])
    values = np.random.RandomState(1).randn(6, 1, 12, 9).astype('float32')
    step, plain = mgpu.function([x], outputs), theano.function([x], outputs)
    for ours, expected in zip(step(values), plain(values)):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    ops = [node.op for stage in step.plan.program.stages for node in io_toposort([], stage.outputs)]
    assert not [op for op in ops if getattr(op, 'border_mode', 'valid') == 'full']
    assert sum(isinstance(op, AbstractConv2d_gradInputs) for op in ops) == 1


def of_states(tap):
    """Return the inputs, their axes of samples, and the second gradients of a loop with two states."""
    a, b = T.dmatrix('a') if tap < -1 else T.dvector('a'), T.dvector('b')

    def turn(one, other):
        new = (one + other) ** 2
        return new, new
    first = dict(initial=a, taps=[tap]) if tap < -1 else a
    ones, others = theano.scan(turn, outputs_info=[first, b], n_steps=3)[0]
    slope = T.grad(ones.sum(), a).sum() + T.grad(others.sum(), b).sum()
    return [a, b], [a.ndim - 1, 0], T.grad(slope, [a, b])


def of_a_penalty(tap):
    """Return the same of the gradient of a recurrent network's loss, as a penalty on it has it."""
    x, w = T.tensor3('x', 'float64'), theano.shared(np.random.RandomState(3).rand(4, 4) / 4, 'w')
    states = theano.scan(lambda now, before: T.tanh(now + T.dot(before, w)), sequences=x,
                         outputs_info=dict(initial=T.zeros((-tap, x.shape[1], 4), 'float64'), taps=[tap]))[0]
    slope = T.grad(T.sqr(states[-1]).mean(), x)
    return [x], [1], T.grad(T.sqr(slope).sum(), [w, x])


@pytest.mark.slow
@pytest.mark.parametrize('build, tap', [(of_states, -1), (of_states, -2), (of_a_penalty, -2)])
def test_second_gradients_through_a_loop_are_those_of_one_device(build, tap, cpu2):
    """They were wrong by more than their size, without a word: a check in a gradient's loop mixed up its slices."""
    inputs, axes, outputs = build(tap)
    mode = theano.Mode('py', 'fast_compile')
    plain = theano.function(inputs, outputs, mode=mode)
    divided = mgpu.function(inputs, outputs, samples=dict(zip(inputs, axes)), mode=mode)
    shapes = [(4, 5, 4)] if build is of_a_penalty else [(2, 5), (5,)] if tap < -1 else [(5,), (5,)]
    values = [np.random.RandomState(i).rand(*shape) for i, shape in enumerate(shapes)]
    assert divided.refused is None
    for ours, theirs in zip(divided(*values), plain(*values)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.slow_but_with('0')
@pytest.mark.parametrize('axis', [0, None])
def test_the_gradient_of_a_product_along_samples_with_zeros(axis, cpu2):
    """It was zero where a context had nothing but zeros of a column, without a word."""
    x = T.dmatrix('x')
    outputs = [theano.grad(x.prod(axis=axis).sum(), x), x.prod(axis=axis), T.elemwise.ProdWithoutZeros(axis=axis)(x)]
    divided = mgpu.function([x], outputs, mode='FAST_COMPILE')
    plain = theano.function([x], outputs, mode='FAST_COMPILE')
    zeros = np.array([[1., 2, 3, 4], [0, 5, 6, 7], [0, 0, 8, 9], [3, 0, 2, 1]])
    for rows in zeros[:3], zeros, zeros[2:], np.where(np.eye(4) > 0, 0, zeros + 1):
        for found, expected in zip(divided(rows), plain(rows)):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
