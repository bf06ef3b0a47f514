"""Random streams: independent on each replica, reproducible, and plain Theano's on the first."""
import theano_mgpu as mgpu
from theano_mgpu.rng import replica_state

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.sandbox import rng_mrg
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams


def test_the_jump_is_two_to_the_100():
    """2**34 jumps of it are Theano's own jump of 2**134; here 34 squarings stand for them."""
    from theano_mgpu import rng
    for jump, known, modulus in zip(rng._replica_jumps(), (rng_mrg.A1p134, rng_mrg.A2p134), (rng_mrg.M1, rng_mrg.M2)):
        power = jump.astype(object)
        for _ in range(34):
            power = power.dot(power) % modulus
        np.testing.assert_array_equal(power.astype('int64'), known)


def test_replica_states_differ_and_add_up():
    state = MRG_RandomStreams(7).get_substream_rstates(5, 'float32')
    np.testing.assert_array_equal(replica_state(state, 0), state)
    one, two = replica_state(state, 1), replica_state(state, 2)
    assert len({row.tobytes() for s in (state, one, two) for row in s}) == 15
    np.testing.assert_array_equal(replica_state(one, 1), two)
    assert one.dtype == state.dtype and (one >= 0).all()


def test_numpys_generator_jumps_too():
    state = np.random.RandomState(3)
    draws = [replica_state(state, i).rand(4) for i in (0, 0, 1, 2)]
    np.testing.assert_array_equal(draws[0], np.random.RandomState(3).rand(4))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert len({d.tobytes() for d in draws}) == 3


@pytest.mark.parametrize('streams', [MRG_RandomStreams, RandomStreams])
def test_each_replica_draws_its_own_numbers(contexts, kind, streams):
    def draw(n):
        contexts(kind, n)
        x = T.fmatrix('x')
        f = mgpu.function([x], x * 0 + streams(5).uniform(x.shape, dtype='float32'))
        zeros = np.zeros((6, 3), 'float32')
        return [f(zeros) for _ in range(3)]

    x = T.fmatrix('x')
    plain = theano.function([x], x * 0 + streams(5).uniform(x.shape, dtype='float32'))
    expected = [plain(np.zeros((6, 3), 'float32')) for _ in range(3)]
    for ours, theirs in zip(draw(1), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    first, again = draw(2), draw(2)
    np.testing.assert_array_equal(first, again)
    rows = {row.tobytes() for batch in first for row in batch}
    assert len(rows) == 18, 'a row was drawn twice'


def test_seeding_starts_every_replica_again(cpu2):
    x = T.fmatrix('x')
    streams = MRG_RandomStreams(5)
    f = mgpu.function([x], x + streams.uniform(x.shape, dtype='float32'))
    zeros = np.zeros((4, 3), 'float32')
    first, second = f(zeros), f(zeros)
    assert (first != second).all()
    streams.seed(5)
    np.testing.assert_array_equal(f(zeros), first)
    streams.seed(6)
    assert (f(zeros) != first).all()


def test_the_variable_holds_the_masters_stream(contexts, kind):
    contexts(kind, 2)
    x = T.fmatrix('x')
    streams, plain_streams = MRG_RandomStreams(5), MRG_RandomStreams(5)
    f = mgpu.function([x], streams.uniform(x.shape, dtype='float32'))
    plain = theano.function([x], plain_streams.uniform(x.shape, dtype='float32'))
    f(np.zeros((4, 3), 'float32')), plain(np.zeros((2, 3), 'float32'))
    ours, theirs = [s.state_updates[0][0].get_value() for s in (streams, plain_streams)]
    np.testing.assert_array_equal(ours[:6], theirs[:6])


def test_a_draw_in_the_updates_is_the_same_on_each_context(cpu2):
    """Gradient noise: the replicas must not drift apart."""
    x, w = T.fmatrix('x'), theano.shared(np.zeros(3, 'float32'), name='w')
    noise = MRG_RandomStreams(1)

    def updates(gradients):
        return {w: w - gradients[0] + noise.normal(w.shape, dtype='float32')}

    step = mgpu.training_function([x], (T.dot(x, w) ** 2).mean(), [w], updates)
    values = []
    for _ in range(3):
        step(np.ones((4, 3), 'float32'))
        values.append(w.get_value())
        replicas = [r for r in step.update.variables if r.variable is w][0].copies.values()
        np.testing.assert_array_equal(*[replica.container.storage[0] for replica in replicas])
    assert len({v.tobytes() for v in values}) == 3


def test_one_stream_for_loss_and_updates_is_an_error(cpu2):
    x, w = T.fmatrix('x'), theano.shared(np.zeros(3, 'float32'), name='w')
    draw = MRG_RandomStreams(1).normal(w.shape, dtype='float32')
    with pytest.raises(mgpu.GraphError, match='drawn from in the updates and elsewhere'):
        mgpu.training_function([x], (T.dot(x, w + draw) ** 2).mean(), [w], lambda g: {w: w - g[0] + draw})
