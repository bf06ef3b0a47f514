"""Batch normalisation over shards: by the statistics of the whole batch, to rounding."""
from theano_mgpu.graph.analysis import STACK, CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.stages import run, split
from theano.configparser import change_flags
from theano.tensor.nnet.bn import AbstractBatchNormTrainGrad, batch_normalization_train

N, SIZES = 14, (7, 5, 1, 1)
ROWS = np.random.RandomState(0).randn(N, 6)
SERIES = np.random.RandomState(1).randn(N, 3, 4)


@pytest.fixture(autouse=True)
def float64():
    with change_flags(floatX='float64'):
        yield


def parameter(value, shape, dtype='float64'):
    value = value + np.random.RandomState(len(shape)).rand(*shape)
    return theano.shared(value.astype(dtype), broadcastable=[n == 1 for n in shape])


def normalised(x, shape, axes='per-activation', **options):
    """Return the outputs of batch normalisation with running averages; scale and bias."""
    scale, bias, mean, variance = [parameter(i, shape, x.dtype) for i in range(4)]
    outputs = batch_normalization_train(x, scale, bias, axes, running_mean=mean, running_var=variance, **options)
    return list(outputs), [scale, bias]


def plain(inputs, outputs, *data):
    return theano.function(inputs, outputs, mode=PYTHON)(*data)


def assert_close(ours, theirs, tolerance=1e-9):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * 1e-3)


def over_samples(x):
    return x, (1, 6), 'per-activation'


def over_time_and_samples(x):
    return x.dimshuffle(1, 0, 2), (1, 1, 4), (0, 1)


def over_merged_axes(x):
    return x.dimshuffle(1, 0, 2).reshape((x.shape[0] * x.shape[1], 4)), (1, 4), (0,)


def over_other_axes(x):
    return x, (1, 3, 1), (0, 2)


def of_the_mean_of_all_samples(x):
    return x.mean(axis=0), (1, 4), (0,)


FORMS = [(over_samples, ROWS), (over_time_and_samples, SERIES), (over_merged_axes, SERIES), (over_other_axes, SERIES),
         (of_the_mean_of_all_samples, SERIES)]


@pytest.mark.slow_with('sizes1-over_merged_axes-data2')
@pytest.mark.parametrize('form, data', FORMS)
@pytest.mark.parametrize('sizes', [SIZES, (N,)])
def test_exact_statistics_are_those_of_one_device(form, data, sizes):
    x = T.TensorType('float64', (False,) * data.ndim)('x')
    outputs, parameters = normalised(*form(x))
    loss = (T.sqr(outputs[0]) * T.tanh(outputs[0])).sum()
    outputs[0] = outputs[0] if form is not over_merged_axes else T.sqr(outputs[0]).sum()
    outputs += [T.inv(outputs[2] ** 2)] + theano.grad(loss, parameters + [x])
    assert_close(run(partition([x], outputs), split([data], sizes), PYTHON), plain([x], outputs, data))


def test_statistics_take_one_exchange():
    x = T.dmatrix('x')
    (y, *_), _ = normalised(x, (1, 6))
    (z, *_), _ = normalised(T.tanh(y), (1, 6))
    program = partition([x], [z])
    assert [[exchange.reduction for exchange in stage.exchanges] for stage in program.stages] == [
        [], [STACK, STACK], [STACK]]  # the portion of the samples that each shard has once only


def test_the_gradient_with_any_mean():
    """The op may be applied by hand, to any mean."""
    x, dy = T.dmatrix('x'), T.dmatrix('dy')
    outputs = AbstractBatchNormTrainGrad((0,))(x, dy, *[parameter(i, (1, 6)) for i in range(3)], 1e-4)
    assert_close(run(partition([x, dy], outputs), split([ROWS, ROWS ** 2], SIZES), PYTHON),
                 plain([x, dy], outputs, ROWS, ROWS ** 2))


@pytest.mark.parametrize('centre, deviation', [(0, 1), (1e3, 0.1), (1e3, 0.01), (1e5, 1)])
@pytest.mark.parametrize('sizes', [(7, 5, 2), (40, 1), (3,)])
def test_large_means_cost_no_more_than_on_one_device(centre, deviation, sizes):
    """The statistics over shards in float32 have at most twice the errors of one device."""
    data = (np.random.RandomState(2).randn(sum(sizes), 60) * deviation + centre).astype('float32')

    def statistics(dtype):
        x = T.TensorType(dtype, (False, False))('x')
        (_, mean, inverse, *running), _ = normalised(x, (1, 60), running_average_factor=0.5)
        return x, [mean, inverse, T.inv(inverse ** 2)] + running
    x, outputs = statistics('float64')
    truth = plain([x], outputs, data.astype('float64'))
    with change_flags(floatX='float32'):
        x, outputs = statistics('float32')
        theirs, ours = plain([x], outputs, data), run(partition([x], outputs), split([data], sizes), PYTHON)
    for true, one, other in zip(truth, ours, theirs):
        assert one.dtype == other.dtype == 'float32'
        error, allowed = [np.sqrt(np.mean((found - true) ** 2)) for found in (one, other)]
        # The last place of a mean that is nearly 0 differs from the shards' means.
        assert error <= 2 * allowed + 1e-7 * deviation


def second_gradient(x, y, mean):
    return theano.grad(T.sqr(theano.grad(T.sqr(y).sum(), x)).sum(), x)


@pytest.mark.parametrize('build', [second_gradient, lambda x, y, mean: x - mean,
                                   lambda x, y, mean: T.dot(x, (0.1 * mean + 1).T)])
def test_samples_that_meet_statistics(build):
    x = T.dmatrix('x')
    (y, mean, *_), _ = normalised(x, (1, 6))
    outputs = [build(x, y, mean)]
    assert_close(run(partition([x], outputs), split([ROWS], SIZES), PYTHON), plain([x], outputs, ROWS), 1e-7)


def test_batch_normalisation_in_a_loop_is_an_error():
    x = T.dtensor3('x')
    scale, bias = parameter(1, (1, 4)), parameter(0, (1, 4))
    found, _ = theano.scan(lambda x_t: batch_normalization_train(x_t, scale, bias)[0], x.dimshuffle(1, 0, 2))
    with pytest.raises(CannotCut, match='each turn of the loop needs'):
        partition([x], [found.sum()])
