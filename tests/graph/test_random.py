"""Random numbers over shards: those that one device draws."""
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.stages import run, split
from theano.configparser import change_flags
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

MRG, PLAIN = MRG_RandomStreams, RandomStreams
N, SIZES = 14, (7, 5, 2)
SERIES = np.random.RandomState(0).rand(N, 3, 4)


@pytest.fixture(autouse=True)
def float64():
    with change_flags(floatX='float64'):
        yield


def case(streams, build, name):
    return pytest.param(streams, build, id=name)


def chances(x):
    return x[:, 0] / x[:, 0].sum(1, keepdims=True)


CASES = [
    case(MRG, lambda r, x: r.uniform(x.shape), 'shape'),
    case(MRG, lambda r, x: x * r.binomial(x.shape, p=0.3, dtype='float64'), 'dropout'),
    case(MRG, lambda r, x: r.uniform((x.shape[0], 10), low=1, high=2), 'number in a tuple'),
    case(MRG, lambda r, x: r.uniform(T.stack([x.shape[0], T.constant(3)])), 'number in a tensor'),
    case(MRG, lambda r, x: r.uniform(T.cast(x.shape[:2], 'int32'), ndim=2), 'small numbers'),
    case(MRG, lambda r, x: r.uniform(T.concatenate([x.shape[:1], [2]]), ndim=2), 'joined'),
    case(MRG, lambda r, x: x * T.addbroadcast(r.binomial((x.shape[0], 1, 4), dtype='float64'), 1), 'spatial'),
    case(MRG, lambda r, x: (x.dimshuffle(1, 0, 2) * r.uniform((x.shape[1], x.shape[0], 4))).sum(0),
         'along another axis'),
    case(MRG, lambda r, x: r.uniform((x.shape[0] * x.shape[1], 4)) + x.reshape((x.shape[0] * x.shape[1], 4)),
         'several rows a sample'),
    case(MRG, lambda r, x: r.uniform((x.shape[0],)) + x[:, 0, 0], 'one a sample'),
    case(MRG, lambda r, x: r.multinomial(pvals=chances(x)), 'multinomial'),
    case(MRG, lambda r, x: r.choice(p=chances(x), replace=False), 'choice'),
    case(PLAIN, lambda r, x: r.normal(x.shape), 'normal'),
    case(PLAIN, lambda r, x: r.normal(x[:, 0].shape, avg=x[:, 0], std=x.shape[2]), 'normal about rows'),
    case(PLAIN, lambda r, x: r.normal(avg=x[:, 0], std=0.5), 'as many as rows'),
    case(PLAIN, lambda r, x: r.binomial(x.shape, n=3, p=x), 'binomial'),
    case(PLAIN, lambda r, x: r.random_integers((3, x.shape[0]), low=0, high=x[:, 0, 0] * 9).T, 'integers'),
    case(PLAIN, lambda r, x: r.poisson(x[:, 0].shape, lam=2.), 'poisson'),
    case(PLAIN, lambda r, x: r.permutation((x.shape[0],), n=5), 'a permutation a sample'),
    case(PLAIN, lambda r, x: r.multinomial((x.shape[0],), n=2, pvals=chances(x)), 'multinomial')]


def as_one_device(x, outputs, data):
    return theano.function([x], outputs, mode=PYTHON, no_default_updates=True)(data)


def assert_equal(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def same_state(one, other):
    if isinstance(one, np.random.RandomState):
        return all(np.array_equal(a, b) for a, b in zip(one.get_state(), other.get_state()))
    return np.array_equal(one, other)


def in_a_loop(r, x):
    return theano.scan(lambda x_t: x_t + r.uniform(x_t.shape), x.dimshuffle(1, 0, 2))[0][-1]


def of_time_major_rows(r, x):
    flat = x.dimshuffle(1, 0, 2).reshape((x.shape[1] * x.shape[0], 4))
    return (flat * r.uniform(flat.shape)).sum(1).reshape((x.shape[1], x.shape[0]))


def sorted_numbers(r, x):
    return T.sort(r.uniform((x.shape[0],)), axis=0)


OTHERS = [
    case(MRG, lambda r, x: r.normal(x.shape), 'normal draws an even number of pairs'),
    case(MRG, lambda r, x: r.uniform((N, 3, 4)) * x, 'the length is a number'),
    case(MRG, lambda r, x: r.uniform((x.shape[0], x.shape[0])), 'two axes of samples'),
    case(MRG, lambda r, x: r.uniform((T.maximum(x.shape[0], 5), 2)), 'another function of the length'),
    case(MRG, lambda r, x: r.uniform((2, 3)) + x[:, :2, :3], 'the same for all'),
    case(MRG, lambda r, x: r.multinomial(n=3, pvals=chances(x)), 'several times each'),
    case(MRG, lambda r, x: r.choice(2, p=chances(x), replace=False), 'two choices'),
    case(MRG, of_time_major_rows, 'in another order'), case(MRG, sorted_numbers, 'sorted'),
    case(MRG, in_a_loop, 'in a loop'),
    case(PLAIN, lambda r, x: r.choice((x.shape[0],), a=N, replace=False), 'without replacement'),
    case(PLAIN, lambda r, x: r.normal((x.shape[0], 3, N), avg=x.dimshuffle(2, 1, 0)[:1]), 'rows along another axis'),
    case(PLAIN, lambda r, x: r.permutation((1,), n=4) + x[:, 0], 'one permutation for all')]


@pytest.mark.slow_with('in a loop')
@pytest.mark.parametrize('streams, build', CASES + OTHERS)
def test_draws_are_those_of_one_device(streams, build):
    x, streams = T.dtensor3('x'), streams(3)
    found = [build(streams, x)]
    found += [build(streams, x)] + [update[1] for update in streams.state_updates] if build is not in_a_loop else []
    for ours, theirs in zip(run(partition([x], found), split([SERIES], SIZES), PYTHON),
                            as_one_device(x, found, SERIES)):
        if isinstance(theirs, np.random.RandomState):
            assert same_state(ours, theirs)
        else:
            assert_equal(ours, theirs)


def read_twice(state, new, x, u):
    return [u, new, state]


def read_by_another_op(state, new, x, u):
    return [u + T.cast(state.sum(), 'float64') * 1e-9, new]


def new_state_that_is_read(state, new, x, u):
    return [u + T.cast(new.sum(), 'float64') * 1e-9, new]


def new_state_that_nobody_keeps(state, new, x, u):
    return [u]


@pytest.mark.parametrize('outputs', [read_twice, read_by_another_op, new_state_that_is_read,
                                     new_state_that_nobody_keeps])
def test_a_state_that_anything_else_reads(outputs):
    x, streams = T.dtensor3('x'), MRG_RandomStreams(3)
    u = streams.uniform(x.shape)
    (state, new), = [update[:2] for update in streams.state_updates]
    outputs = outputs(state, new, x, u)
    for ours, theirs in zip(run(partition([x], outputs), split([SERIES], SIZES), PYTHON),
                            as_one_device(x, outputs, SERIES)):
        assert_equal(ours, theirs)
