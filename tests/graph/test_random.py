"""Random numbers over shards: as drawn by one device, or by each replica for its own samples."""
from theano_mgpu.graph.analysis import SAME
from theano_mgpu.graph.partition import partition
from theano_mgpu.graph.random_streams import replica_state

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


def drawn(streams, build):
    """Return an input, two draws, and a dict of the new states."""
    x = T.dtensor3('x')
    found = [build(streams, x), build(streams, x)]
    return x, found, dict(update[:2] for update in streams.state_updates)


def as_one_device(x, outputs, data):
    return theano.function([x], outputs, mode=PYTHON, no_default_updates=True)(data)


def assert_equal(ours, theirs):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize('streams, build', CASES)
def test_exact_draws_are_those_of_one_device(streams, build):
    x, found, _ = drawn(streams(3), build)
    program = partition([x], found)
    assert program.streams == []
    for ours, theirs in zip(run(program, split([SERIES], SIZES), PYTHON), as_one_device(x, found, SERIES)):
        assert_equal(ours, theirs)


@pytest.mark.parametrize('streams, build', CASES)
def test_each_replica_draws_for_its_own_samples_only(streams, build):
    x, found, new = drawn(streams(3), build)
    program = partition([x], found + list(new.values()), random='independent')
    assert len(program.stages) == 1 and set(program.streams) == set(new) and len(program.streams) == len(new) == 2
    assert [output.reduction for output in program.outputs[2:]] == [SAME, SAME]
    states = [{v: replica_state(v.get_value(), i) for v in new} for i in range(len(SIZES))]
    ours = run(program, split([SERIES], SIZES), PYTHON, states)
    for i, (start, stop) in enumerate([(0, 7), (7, 12), (12, 14)]):
        for variable, value in states[i].items():
            variable.set_value(value)
        alone = as_one_device(x, found + list(new.values()), SERIES[start:stop])
        for whole, own, output in zip(ours, alone[:2], program.outputs):
            axis = output.reduction.axis
            rows = whole.shape[axis] // N
            part = np.moveaxis(np.moveaxis(whole, axis, 0)[start * rows:stop * rows], 0, axis)
            assert_equal(part, own)
        for whole, own in zip(ours[2:], alone[2:]):
            assert same_state(whole[i], own)
    assert not np.array_equal(ours[0], ours[1])


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


EXACT = [
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


@pytest.mark.parametrize('streams, build', EXACT)
def test_other_draws_stay_exact(streams, build):
    x, streams = T.dtensor3('x'), streams(3)
    found = build(streams, x)
    new = [update[1] for update in streams.state_updates] if build is not in_a_loop else []
    program = partition([x], [found] + new, random='independent')
    assert program.streams == []
    for ours, theirs in zip(run(program, split([SERIES], SIZES), PYTHON), as_one_device(x, [found] + new, SERIES)):
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
def test_a_state_that_anything_else_reads_stays_exact(outputs):
    x, streams = T.dtensor3('x'), MRG_RandomStreams(3)
    u = streams.uniform(x.shape)
    (state, new), = [update[:2] for update in streams.state_updates]
    outputs = outputs(state, new, x, u)
    program = partition([x], outputs, random='independent')
    assert program.streams == []
    for ours, theirs in zip(run(program, split([SERIES], SIZES), PYTHON), as_one_device(x, outputs, SERIES)):
        assert_equal(ours, theirs)


def test_a_variable_that_is_not_known_as_a_random_state_stays_exact():
    """Replicas have copies of any variable that is not known as a random state."""
    x, streams = T.dtensor3('x'), MRG_RandomStreams(3)
    outputs = [streams.uniform(x.shape)]
    (state, new), = [update[:2] for update in streams.state_updates]
    del state.tag.is_rng
    assert partition([x], outputs + [new], random='independent').streams == []


def test_one_stream_is_independent_beside_an_exact_one():
    x, streams = T.dtensor3('x'), MRG_RandomStreams(3)
    outputs = [x * streams.binomial(x.shape, dtype='float64') + streams.normal(x.shape)]
    (state, new), (_, other) = [update[:2] for update in streams.state_updates]
    program = partition([x], outputs + [new, other], random='independent')
    assert program.streams == [state]


def test_parameters_of_each_sample_are_cut():
    x, streams = T.dtensor3('x'), RandomStreams(3)
    places = np.arange(N)[:, np.newaxis] * np.ones((1, 4))
    outputs = [streams.normal((x.shape[0], 4), avg=places, std=1e-12)]
    program = partition([x], outputs + [update[1] for update in streams.state_updates], random='independent')
    assert len(program.streams) == 1
    np.testing.assert_allclose(run(program, split([SERIES], SIZES), PYTHON)[0], places, atol=1e-9)
