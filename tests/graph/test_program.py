"""Graphs that are cut where samples meet give the results of one device, whatever the shards."""
from theano_mgpu.errors import GraphError
from theano_mgpu.graph.analysis import MAX, CannotCut
from theano_mgpu.graph.partition import partition
from theano_mgpu.options import Options
from theano_mgpu.runtime.batches.batch_inputs import BatchInputs

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.stages import compiled, n_stages, run, split
from theano.configparser import change_flags
from theano.gradient import disconnected_grad
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.elemwise import CAReduce
from theano.tensor.nnet.abstract_conv import conv2d
from theano.tensor.nnet.bn import batch_normalization_train
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

N, SIZES = 14, (7, 5, 2)
RNG = np.random.RandomState(0)
ROWS, LABELS, POINTS = RNG.randn(N, 6), RNG.randint(0, 3, N).astype('int32'), RNG.rand(N, 5)
WORDS, SERIES, IMAGES = RNG.randint(0, 9, (N, 5)).astype('int32'), RNG.randn(N, 5, 4), RNG.randn(N, 3, 8, 8)
CASES = {}


def case(*data, stages, marks=()):
    """Register a case with its input data and the number of stages that it must be cut into."""
    def register(build):
        CASES[build.__name__] = pytest.param(build, data, stages, id=build.__name__, marks=marks)
        return build
    return register


# Convolutions exist in C++ only; everything else is quicker in Python than it is compiled.
COMPILED = theano.Mode('cvm', 'fast_compile')


def weight(*shape):
    return theano.shared(np.random.RandomState(len(shape) + shape[-1]).randn(*shape) * 0.5)


def with_gradients(loss, *weights):
    return [loss] + theano.grad(loss, list(weights))


def hidden(x):
    w = weight(6, 5)
    return T.tanh(T.dot(x, w) + weight(5)), w


@case(ROWS, LABELS, stages=1)
def classifier(x, y):
    h, w = hidden(x)
    v = weight(5, 3)
    return with_gradients(-T.mean(T.log(T.nnet.softmax(T.dot(h, v)))[T.arange(y.shape[0]), y]), w, v)


@case(ROWS, LABELS, stages=2)
def classifier_with_a_penalty(x, y):
    h, w = hidden(x)
    v = weight(5, 3)
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(h, v)), y).mean() + 0.01 * (w ** 2).sum()
    return with_gradients(loss, w, v)


@case(ROWS, stages=3)
def statistics(x):
    return [x.sum(), x.mean(0), x.sum(1), x.max(), x.min(0), x.std(0), x.var(), (x > 0).any(), (x > -9).all(),
            x.prod(0), x.shape[0], x.size]


@case(ROWS, stages=3)
def centred(x):
    return with_gradients(((x - x.mean(0)) / (x.std(0) + 1e-3) * x.sum(1, keepdims=True) * weight(6)).sum())


@case(ROWS, stages=4)
def batch_normalisation(x):
    w = weight(6, 5)
    gamma, beta = [theano.shared(np.ones((1, 5)) * i, broadcastable=(True, False)) for i in (1, 2)]
    y, mean, inverse, running_mean, running_variance = batch_normalization_train(
        T.dot(x, w), gamma, beta, running_mean=beta, running_var=gamma)
    return with_gradients(T.sqr(y * T.dot(x, w)).mean(), w, gamma, beta) + [mean, running_mean, running_variance]


@case(ROWS, POINTS, stages=2)
def dice(x, t):
    w = weight(6, 5)
    p = T.nnet.sigmoid(T.dot(x, w))
    return with_gradients(1 - 2 * (p * t).sum() / (p.sum() + t.sum()), w)


@case(ROWS, stages=3)
def softmax_over_samples(x):
    s = T.nnet.softmax(x.T)
    return [s, (s ** 2).sum()]


@case(ROWS, stages=3)
def contrastive(x):
    h, w = hidden(x)
    return with_gradients(T.log(T.exp(T.dot(h, h.T)).sum(1)).mean(), w)


@case(ROWS, stages=2)
def norm_of_the_batch(x):
    w = weight(6, 5)
    return with_gradients((x / x.norm(2) * T.dot(x, w).sum(1, keepdims=True)).sum(), w)


@case(WORDS, stages=1)
def embedding(words):
    table = weight(9, 4)
    return with_gradients((T.tanh(table[words]).sum(axis=1) ** 2).mean(), table)


@case(WORDS, stages=1)
def embedding_flattened(words):
    table = weight(9, 4)
    looked_up = table[words.flatten()].reshape((words.shape[0], words.shape[1], 4))
    return with_gradients(T.tanh(looked_up).mean(), table)


@case(IMAGES, stages=1, marks=[pytest.mark.needs_compiler, pytest.mark.slow])
def convolution_and_pooling(x):
    w = weight(2, 3, 3, 3)
    y = conv2d(x, w)
    highest = pool_2d(T.tanh(y), (2, 2), ignore_border=True).flatten(2)
    average = pool_2d(y, (2, 2), ignore_border=True, mode='average_exc_pad').flatten(2)
    return with_gradients((highest ** 2 + average).mean(), w)


@case(IMAGES, stages=3, marks=[pytest.mark.needs_compiler, pytest.mark.slow])
def convolution_and_batch_normalisation(x):
    w = weight(2, 3, 3, 3)
    gamma = theano.shared(np.ones((1, 2, 1, 1)), broadcastable=(True, False, True, True))
    y = conv2d(x, w)
    return with_gradients((batch_normalization_train(y, gamma, gamma * 0, 'spatial')[0] ** 2 * y).mean(), w)


@case(SERIES, stages=1)
def recurrent(x):
    w, u = weight(4, 4), weight(4, 4)
    states, _ = theano.scan(lambda x_t, h: T.tanh(T.dot(x_t, w) + T.dot(h, u)), x.dimshuffle(1, 0, 2),
                            T.zeros((x.shape[0], 4), 'float64'))
    return with_gradients((states[-1] ** 2).mean(), w, u)


@case(SERIES, stages=1)
def sum_in_a_loop(x):
    sums, _ = theano.scan(lambda x_t, total: total + (x_t ** 2).sum(), x.dimshuffle(1, 0, 2), np.float64(0))
    return [sums[-1] / x.shape[0], sums]


@case(SERIES, stages=1)
def reshapes(x):
    return [x.reshape((x.shape[0] * x.shape[1], 4)).sum(1), x.dimshuffle(1, 0, 2).reshape((-1, 4)).mean(0),
            x.flatten(2), x.reshape((x.shape[0], -1))]


@case(SERIES, stages=1)
def time_major(x):
    w = weight(4, 4)
    flat = x.dimshuffle(1, 0, 2).reshape((x.shape[0] * x.shape[1], 4))
    return with_gradients(T.dot(flat, w).reshape((x.shape[1], x.shape[0], 4))[-1].mean(), w)


@case(SERIES, stages=1)
def counts(x):
    """Return numbers of samples, which are known without an exchange."""
    ones = T.ones_like(x)
    flat = T.ones_like(x.dimshuffle(1, 0, 2).reshape((x.shape[0] * x.shape[1], 4)))
    return [ones.sum(), ones.sum(axis=0), ones.sum(axis=1), ones.sum(axis=(0, 2)), flat.sum(axis=0), flat.sum(),
            x.sum() * T.fill(x, 2).sum(), T.zeros_like(x[:, 0, 0]).sum()]


@case(ROWS, POINTS, stages=2)
def shape_of_rows_of_a_later_stage(x, t):
    """Return a mean over a loss that is weighted by sample: its gradient needs the shape of the weighted loss only."""
    w = weight(6, 5)
    loss = T.sqr(T.tanh(T.dot(x, w)) - t).mean() * t[:, 0]
    return with_gradients(loss.sum() / T.ones_like(loss).sum(), w)


@case(ROWS, stages=1)
def tiled_to_a_shape_that_is_joined(x):
    """Return a loss with a mask of the shape of a state, as Keras makes it."""
    h, w = hidden(x)
    mask = T.gt(x[:, :1], 0)
    return with_gradients(T.switch(T.tile(mask, T.concatenate([[1], h.shape[1:]], 0), ndim=2), h, 0).mean(), w)


@case(ROWS, LABELS, stages=1)
def one_hot_codes(x, y):
    h, w = hidden(x)
    return with_gradients((h * T.extra_ops.to_one_hot(y, 5)).mean(), w)


@case(ROWS, stages=1)
def branch_that_is_known(x):
    """Return known branches: nobody needs the other one, and shares of a sum stay shares."""
    return [ifelse(T.constant(1), x.sum(), T.sqr(x.sum()).sum()) * 2, ifelse(T.constant(0), x - x.max(0), x + 1)]


@case(ROWS, stages=1)
def dropout(x):
    streams, others = MRG_RandomStreams(4), RandomStreams(5)
    kept = streams.binomial(x.shape, p=0.5, dtype='float64')
    noise = streams.normal(x.shape, dtype='float64') + others.uniform(x.shape)
    w = weight(6, 5)
    return with_gradients(T.dot(T.tanh(x * kept + noise), w).mean(), w) + [x + noise] \
        + [update[1] for update in streams.state_updates]


@case(SERIES, stages=1)
def loop_whose_state_is_a_sum_that_it_does_not_read(x):
    squares, _ = theano.scan(lambda x_t, last: T.sqr(x_t).sum(), x.dimshuffle(1, 0, 2), np.float64(0))
    return [squares, squares[-1]]


@case(SERIES, stages=1)
def time_merged_into_samples_twice(x):
    flat = x.dimshuffle(1, 0, 2).reshape((x.shape[1] * x.shape[0], 4)).T
    places = T.arange(flat.size)
    return [(flat.flatten() * places).sum(), (flat.reshape((-1,)) * places).sum()]


@case(SERIES, stages=1)
def index_with_a_slice_between_arrays(x):
    return [x.dimshuffle(0, 1, 'x', 2)[:, [0, 1], :, [0, 3]], x.dimshuffle(1, 0, 2)[[0, 1], :, [0, 3]],
            theano.grad(T.sqr(x.dimshuffle(0, 1, 'x', 2)[:, [0, 1], :, [0, 3]]).sum(), x)]


@case(ROWS, LABELS, stages=1)
def a_vector_written_beside_each_sample(x, y):
    """Return an array with a vector that is as long as the batch, but lies along another axis."""
    return [T.inc_subtensor(T.zeros((x.shape[0], 4, N))[T.arange(x.shape[0]), y], T.arange(N) * 0.5)]


@case(ROWS, stages=1)
def written_by_a_matrix_of_places(x):
    places = x[:, np.array([[0, 1], [2, 3], [1, 1]])]
    return [T.inc_subtensor(places, weight(3, 2)), theano.grad(T.sqr(places).sum(), x)]


@case(SERIES, stages=1)
def batched_products(x):
    return [T.batched_dot(x, x.dimshuffle(0, 2, 1)), T.batched_dot(weight(5, 4), x.dimshuffle(1, 2, 0)),
            T.batched_dot(x.dimshuffle(1, 0, 2), weight(5, 4, 3))]


@case(SERIES, stages=1)
def batched_products_summed_over_samples(x):
    last = x.dimshuffle(1, 2, 0)
    return [T.batched_dot(last, weight(5, N, 2)), T.batched_dot(last, x.dimshuffle(1, 0, 2)),
            T.batched_dot(weight(4, N), x[:, 0].T), T.batched_dot(x[:, 0].T, x[:, 1].T)]


@case(SERIES, stages=3)
def batched_products_of_all_pairs(x):
    w = weight(4, 4)
    heads = T.dot(x, w).dimshuffle(1, 0, 2)
    return with_gradients(T.tanh(T.batched_dot(heads, heads.dimshuffle(0, 2, 1))).mean(), w)


@case(SERIES, LABELS, stages=1)
def places_along_any_axis(x, y):
    places, time_major = T.arange(x.shape[0]), x.dimshuffle(1, 0, 2)
    return [time_major[y, places], x[places.dimshuffle(0, 'x'), [[0, 1]]], time_major[:, places, y],
            x[places, :, y], x[places.reshape((-1, 1)), T.stack([y, y], axis=1), [[1, 2]]],
            T.inc_subtensor(time_major[y, places], 2.0), T.set_subtensor(time_major[:, places, y], time_major[:, :, 0]),
            theano.grad(T.sqr(T.sort(x, axis=1)).sum() + T.sqr(time_major[y, places]).sum(), x)]


@case(ROWS, stages=1)
def index_of_nothing(x):
    n, total = x.shape[0], x.shape[()]
    return [T.concatenate([T.stack([n, 3])[()], total]), x[()], x.reshape(T.stack([n, 6])[()], ndim=2).sum(1),
            T.concatenate([T.arange(n)[()], [1]])]


@case(ROWS, stages=1)
def what_is_known_to_be_0_is_a_share(x):
    return [x.sum() + 0 * (weight(3) ** 2).sum()]


@case(ROWS, stages=1)
def shape_that_is_checked(x):
    checked = T.specify_shape(x, (x.shape[0], 6))
    return [T.specify_shape(checked, (N, 6)).sum(0), T.opt.Assert('')(x, T.all(x > -9), T.lt(x.shape[0], N + 1)),
            T.specify_shape(x.T, x.T.shape), T.specify_shape(x.sum(0), (6,))]


@case(SERIES, stages=3)
def loop_of_sums_beside_a_counter(x):
    w = weight(4)
    (sums, counter, _), _ = theano.scan(
        lambda x_t, total, i, h: [0.5 * total + (h * w).sum(0), i + 1, T.tanh(h + x_t * disconnected_grad(i))],
        x.dimshuffle(1, 0, 2), [w * 1, np.float64(0), T.zeros_like(x[:, 0])])
    return with_gradients(sums[-1].sum() + sums.mean(), w) + [sums, counter]


@case(SERIES, stages=1)
def loop_of_extremes(x):
    (highest, lowest), _ = theano.scan(lambda x_t: [x_t.max(0), x_t.min(0)], x.dimshuffle(1, 0, 2))
    return [highest, lowest]


@case(ROWS, stages=1)
def loop_as_long_as_the_batch(x):
    states, _ = theano.scan(lambda i, h, x: T.tanh(h + x / (i + 1.0)), T.arange(x.shape[0]), x, x)
    return with_gradients(T.dot(states[-1], weight(6)).mean())


@case(ROWS, stages=3)
def distances_of_all_pairs(x):
    h, w = hidden(x)
    return with_gradients(T.sqr(h.dimshuffle(0, 'x', 1) - h.dimshuffle('x', 0, 1)).sum(2).mean(), w) \
        + [T.dot(h, h.T) + T.dot(h, h.T).T]


@case(LABELS, stages=2)
def sums_of_small_whole_numbers(y):
    total = (T.cast(y, 'int8') * 30).sum(dtype='int8')
    return [total, T.cast(total, 'int64'), total * 0.5, T.stack([total, total]).sum()]


@case(SERIES, stages=4)
def merged_samples_that_meet(x):
    flat = (x - x.mean(0)).dimshuffle(1, 0, 2).reshape((-1, 4))
    flat = flat - flat.mean(0)
    return [(flat * T.arange(flat.shape[0]).dimshuffle(0, 'x') * T.sqr(flat).sum()).sum(0)]


@pytest.mark.slow_with('loop_of_sums_beside_a_counter', 'loop_of_extremes', 'loop_as_long_as_the_batch',
                       'classifier_with_a_penalty')
@pytest.mark.parametrize('build, data, stages', list(CASES.values()))
def test_cut_graphs_give_what_one_device_gives(build, data, stages):
    inputs = [T.TensorType(array.dtype, (False,) * array.ndim)() for array in data]
    outputs = build(*inputs)
    program = partition(inputs, outputs)
    assert n_stages(program) == stages
    mode = COMPILED if data[0] is IMAGES else PYTHON
    expected = theano.function(inputs, outputs, no_default_updates=True, mode=mode)(*data)
    run_on = compiled(program, mode)
    for sizes in (SIZES, (N,)):
        for ours, whole in zip(run_on(split(data, sizes)), expected):
            assert np.shape(ours) == np.shape(whole) and ours.dtype == whole.dtype
            np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('build, reason', [
    (lambda x: x[::2].sum(), 'picks samples by their place in the batch: .*test_program.py, line'),
    (lambda x: x[x.shape[0] // 2:, [0, 2]].sum(), 'picks samples by their place'),
    (lambda x: x[T.arange(x.shape[0] // 2), 0], 'picks samples by their place'),
    (lambda x: T.specify_shape(x, (T.cast(x[0, 0], 'int64'), 6)), 'picks samples by their place'),
    (lambda x: T.argmax(x, axis=0), 'the place of the maximum among all samples'),
    (lambda x: T.cumsum(x, axis=0), 'it goes along the samples'),
    (lambda x: x.reshape((x.shape[0] // 2, 2, 6)), 'which axis has the samples'),
    (lambda x: x.reshape((T.cast(T.ones_like(x[:, 0]).sum(), 'int64'), -1)), 'which axis has the samples'),
    (lambda x: CAReduce(theano.scalar.or_)(T.cast(x, 'int8')), 'it reduces over the samples'),
    (lambda x: theano.scan(lambda x_t: x_t.dimshuffle(1, 0).flatten(), x.dimshuffle('x', 0, 1))[0].sum(),
     'its samples are merged into another axis'),
    (lambda x: T.slinalg.cholesky(T.dot(x, x.T)), 'Cholesky takes its matrix as a whole'),
])
def test_what_cannot_be_cut_is_an_error_that_names_the_op(build, reason):
    with change_flags(**{'traceback.limit': 8}):  # Theano's default; make test has none
        x = T.dmatrix('x')
        y = build(x)
    with pytest.raises(CannotCut, match=r'^((?! \(/).)*' + reason):  # not in the source line that is quoted after it
        partition([x], [y])


@pytest.mark.parametrize('build', [
    lambda halves, n: T.set_subtensor(halves[T.arange(n)], 1.0),
    lambda halves, n: halves[T.arange(n), T.zeros((1,), 'int64')],
])
def test_places_of_some_rows_only_are_an_error(build):
    """Each sample has two rows, so that the first n rows are not one of each sample."""
    x = T.dmatrix('x')
    program = partition([x], [build(x.reshape((2 * x.shape[0], 3)), x.shape[0])])
    with pytest.raises(AssertionError, match='picks samples by their place'):
        run(program, split([ROWS], SIZES), PYTHON)


@pytest.mark.parametrize('build, reason', [
    (lambda x: T.repeat(x, 2, axis=0)[T.arange(x.shape[0]), 0], 'picks samples by their place'),
    (lambda x: T.set_subtensor(T.zeros((x.shape[0] + 1, 6))[T.arange(x.shape[0]), 0], x[:, 0]),
     'picks samples by their place'),
    (lambda x: T.specify_shape(x, (N + 1, 6)), 'the batch has another length'),
    (lambda x: T.specify_shape(x, (N, 7)), ''),
    (lambda x: T.opt.Assert('too large')(x * 2, T.all(x < 0)), 'too large'),
    (lambda x: T.opt.Assert('too small')(x * 2, T.any(x > 99)), 'too small'),
    (lambda x: x.T.reshape((x.shape[0], -1)).sum(1).sum(), 'way that is not known'),
    (lambda x: (T.dot(x, weight(6, 2)).T.flatten() * T.dot(x, weight(6, 2)).T.reshape((-1,))).sum()
     + T.dot(x.T.flatten(), T.repeat(x[:, :3].T.flatten(), 2)), 'samples lie in different orders'),
])
def test_what_lengths_show_only_in_a_batch_is_an_error_then(build, reason):
    x = T.dmatrix('x')
    program = partition([x], [build(x)])
    with pytest.raises(AssertionError, match=reason):
        run(program, split([ROWS], SIZES), PYTHON)


def test_nobody_needs_the_place_of_the_maximum():
    x = T.dmatrix('x')
    highest, _ = T.max_and_argmax(x, axis=0)
    assert [exchange.reduction for exchange in partition([x], [highest]).exchanges] == [MAX]


def test_what_is_needed_whole_is_exchanged_once():
    """The variable is a gradient, which Adam reads, and whose square it reads."""
    x, w = T.dmatrix('x'), weight(6, 5)
    gradient = T.grad(T.tanh(T.dot(x, w)).mean(), w)
    program = partition([x], [0.9 * w + 0.1 * gradient, gradient ** 2, gradient * 0.5])
    assert [len(stage.exchanges) for stage in program.stages] == [0] and len(program.exchanges) == 1


def test_what_is_needed_whole_is_not_exchanged_again_in_another_shape():
    """A running mean is a vector; the mean that samples are normalised by is a row."""
    x, running = T.dmatrix('x'), weight(6)
    mean = x.mean(axis=0, keepdims=True)
    program = partition([x], [0.9 * running + 0.1 * mean.dimshuffle(1), T.sqr(x - mean).sum()])
    assert [len(stage.exchanges) for stage in program.stages] == [0, 1]


def test_gradients_are_exchanged_last():
    """The first stages exchange only values that the other samples of the batch need."""
    x, w, v = T.dmatrix('x'), weight(6, 5), weight(5, 3)
    h = T.dot(x, w)
    y = T.dot(T.tanh(h - h.mean(axis=0)), v)
    loss = T.sqr(y - y.mean(axis=0)).mean()
    rate = theano.shared(0.1)
    program = partition([x], [loss, h.max() - rate] + [p - rate * g ** 2 for p, g in zip([w, v], T.grad(loss, [w, v]))])
    assert [len(stage.exchanges) for stage in program.stages] == [0, 1, 1, 1, 1] and len(program.exchanges) == 4


def test_a_state_of_samples_that_no_replica_can_have_all_of():
    """If each process has its own samples, a state with samples along axis 1 is complete on no replica."""
    x, state = T.dmatrix('x'), theano.shared(np.zeros((4, 5)), name='state')
    new = x.T + T.extra_ops.cumsum(state, axis=0)

    def divided(sharded):
        inputs = BatchInputs([x], Options(), sharded)
        inputs.find_slices([], {state: new})
        inputs.divide([new], [state])
        return inputs.rows
    assert divided(sharded=False) == {}
    with pytest.raises(GraphError, match='CumOp'):
        divided(sharded=True)
