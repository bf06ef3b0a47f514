"""Placed graphs where no function of this package was called for: `mgpu.Predictor`, and `mgpu.enable`."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T

FAST = theano.Mode(linker='cvm', optimizer='fast_compile')


def two_layers(first='dev0', second='dev1', seed=0):
    """Input, weights and output of a network on two devices."""
    rng = np.random.RandomState(seed)
    x = T.matrix('x')
    with mgpu.device(first):
        w = theano.shared(rng.randn(4, 5).astype(x.dtype), 'w')
        hidden = T.tanh(T.dot(x, w))
    with mgpu.device(second):
        v = theano.shared(rng.randn(5, 2).astype(x.dtype), 'v')
        return x, [w, v], T.dot(hidden, v) + w.sum()


def rows(n, seed=1):
    return np.random.RandomState(seed).randn(n, 4).astype(theano.config.floatX)


def expected_of(weights, x):
    w, v = (weight.get_value() for weight in weights)
    return np.tanh(x.dot(w)).dot(v) + w.sum()


@pytest.fixture(autouse=True)
def two():
    yield mgpu.init('dev0->cpu;dev1->cpu')
    mgpu.disable()
    mgpu.init('host0->cpu')


# --- Predictor ----------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_predictor_runs_a_placed_graph(kind, contexts):
    names = [context.name for context in contexts(kind, 2)]
    x, weights, y = two_layers(*names)
    data = rows(7)
    with mgpu.Predictor([x], [y, x * 2], mode=FAST) as predictor:
        assert [context.name for context in predictor.contexts] == [name + '.1' for name in names]
        assert len(predictor.replicas) == 1 and len(predictor.replicas[0].functions) == 3
        found = predictor.predict(data, batch_size=3)
        np.testing.assert_allclose(found[0], expected_of(weights, data), rtol=1e-5)
        np.testing.assert_allclose(found[1], 2 * data)
        weights[0].set_value(weights[0].get_value() * 2)  # read on both devices
        predictor.refresh()
        np.testing.assert_allclose(predictor.predict(data)[0], expected_of(weights, data), rtol=1e-5)


def test_replicas_of_a_placed_graph_have_contexts_of_their_own():
    mgpu.init('dev0->cpu;dev1->cpu;dev2->cpu;dev3->cpu')
    x, weights, y = two_layers()
    with mgpu.Predictor([x], y, contexts=[['dev1', 'dev0'], ['dev3', 'dev2']], replicas_per_context=2,
                        mode=FAST) as predictor:
        found = [[context.name for context in replica.contexts] for replica in predictor.replicas]
        assert found == [['dev1.1', 'dev0.1'], ['dev3.1', 'dev2.1'], ['dev1.2', 'dev0.2'], ['dev3.2', 'dev2.2']]
        np.testing.assert_allclose(predictor.predict(rows(9), batch_size=2), expected_of(weights, rows(9)), rtol=1e-5)


def test_a_stream_on_one_of_the_devices():
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    x, _, y = two_layers()
    with mgpu.device('dev1'):
        drawn = y + MRG_RandomStreams(3).normal(y.shape)
    with mgpu.Predictor([x], drawn, mode=FAST) as predictor, \
            mgpu.Predictor([x], drawn, replicas_per_context=2, mode=FAST) as other:
        found = predictor.predict(rows(6), batch_size=2)
        np.testing.assert_allclose(found, other.predict(rows(6), batch_size=2))
        assert not np.allclose(found, predictor.predict(rows(6), batch_size=2))
