"""Random streams: the streams of one device."""
import functools

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams


def plain_and_ours(make, n_samples=(7, 5, 1, 6), **options):
    """Return the results of plain Theano and mgpu.function, and their states afterwards, for outputs of ``make(x)``."""
    found = []
    for function in (theano.function, functools.partial(mgpu.function, **options)):
        x = T.matrix('x')
        outputs, streams = make(x)
        f = function([x], outputs)
        found.append([np.array(f(np.zeros((n, 3), x.dtype))) for n in n_samples])
        found[-1] += [state.get_value() for state, *_ in streams.state_updates]
    return found


@pytest.mark.slow_but_with('cpu-2-RandomStreams', 'gpu-2-RandomStreams', 'cpu-3-RandomStreams')
@pytest.mark.parametrize('streams', [MRG_RandomStreams, RandomStreams])
@pytest.mark.parametrize('n', [1, 2, 3])
def test_draws_are_those_of_one_device(contexts, kind, streams, n):
    """Draws, and the states of the streams, are the same for any number of contexts, with ragged batches."""
    def make(x):
        made = streams(5)
        return x * 2 + made.uniform(x.shape, dtype=x.dtype) * made.normal((x.shape[0], 1), dtype=x.dtype), made
    contexts(kind, n)
    plain, ours = plain_and_ours(make)
    for one, other in zip(plain, ours):
        if isinstance(one, np.random.RandomState):
            one, other = one.get_state()[1], other.get_state()[1]
        np.testing.assert_allclose(one, other, rtol=1e-5)


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


@pytest.mark.slow_but_with('options0-host')
@pytest.mark.parametrize('update_on', ['device', 'host'])
@pytest.mark.parametrize('options', [{}, {'micro_batches': 2}])
def test_one_stream_for_loss_and_updates(cpu2, update_on, options):
    """The loss has met the noise of the gradient, too; the results are exact, and the replicas do not drift apart."""
    def learn(x, w):
        streams = MRG_RandomStreams(1)
        noise = streams.normal(w.shape, dtype=w.dtype)
        more = streams.normal(w.shape, dtype=w.dtype)
        loss = (T.dot(x * streams.binomial(x.shape, p=0.5, dtype=w.dtype), w + noise) ** 2).mean()
        return loss, lambda gradients: {w: w - gradients[0] + noise + more}, streams
    found = []
    for name in ('plain', 'ours'):
        x, w = T.matrix('x'), theano.shared(np.zeros(3, theano.config.floatX), name='w')
        loss, updates, streams = learn(x, w)
        step = mgpu.training_function([x], loss, [w], updates, update_on=update_on, **options) if name == 'ours' else \
            theano.function([x], loss, updates=updates(T.grad(loss, [w])))
        found.append([np.array(step(np.ones((n, 3), x.dtype))) for n in (5, 4, 1)] + [w.get_value()] +
                     [state.get_value() for state, *_ in streams.state_updates])
    for plain, ours in zip(*found):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)
