"""Placed graphs without a call of `mgpu.function`: by `mgpu.Predictor`, and by `mgpu.enable`."""
import warnings

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T

FAST = theano.Mode(linker='cvm', optimizer='fast_compile')


def two_layers(first='dev0', second='dev1', seed=0):
    """Return input, weights and output of a network on two devices."""
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


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_a_predictor_runs_a_placed_graph(kind, contexts):
    names = [context.name for context in contexts(kind, 2)]
    x, weights, y = two_layers(*names)
    data = rows(7)
    with mgpu.Predictor([x], [y, x * 2], mode=FAST) as predictor:
        assert [[context.name for context in replica] for replica in predictor.replicas] == [names]
        found = predictor.predict(data, batch_size=3)
        np.testing.assert_allclose(found[0], expected_of(weights, data), rtol=1e-5)
        np.testing.assert_allclose(found[1], 2 * data)
        weights[0].set_value(weights[0].get_value() * 2)  # read on both devices
        predictor.refresh()
        np.testing.assert_allclose(predictor.predict(data)[0], expected_of(weights, data), rtol=1e-5)


def test_a_predictor_runs_several_replicas_of_a_placed_graph():
    mgpu.init('dev0->cpu;dev1->cpu;dev2->cpu;dev3->cpu')
    x, weights, y = two_layers()
    with mgpu.Predictor([x], y, contexts=[['dev1', 'dev0'], ['dev3', 'dev2']], mode=FAST) as predictor:
        found = [[context.name for context in replica] for replica in predictor.replicas]
        assert found == [['dev1', 'dev0'], ['dev3', 'dev2']]
        np.testing.assert_allclose(predictor.predict(rows(9), batch_size=2), expected_of(weights, rows(9)), rtol=1e-5)


@pytest.mark.slow
def test_a_stream_on_one_of_the_devices():
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    x, _, y = two_layers()
    with mgpu.device('dev1'):
        drawn = y + MRG_RandomStreams(3).normal(y.shape)
    with mgpu.Predictor([x], drawn, mode=FAST) as predictor, \
            mgpu.Predictor([x], drawn, mode=FAST) as other:
        found = predictor.predict(rows(6), batch_size=2)
        np.testing.assert_allclose(found, other.predict(rows(6), batch_size=2))
        assert not np.allclose(found, predictor.predict(rows(6), batch_size=2))


# --- enable -------------------------------------------------------------------------------------


@pytest.fixture
def enabled():
    """Return a function that calls `mgpu.enable`; its list `messages` collects the notes."""
    def enable(**options):
        return mgpu.enable(tell=enable.messages.append, **options)
    enable.messages = []
    return enable


def places_of(function):
    return [[context.name for context in row] for row in function.mgpu_divided.source.step.mesh.replicas]


def test_a_placed_function_runs_on_its_devices_from_the_first_call(enabled):
    report = enabled()
    x, weights, y = two_layers()
    w, v = weights
    step = theano.function([x], y, updates=[(v, v - T.grad(y.mean(), v))], mode=FAST)
    before = v.get_value()
    for n in (7, 3):
        expected = expected_of(weights, rows(n))
        np.testing.assert_allclose(step(rows(n)), expected, rtol=1e-5)
    hidden = [np.tanh(rows(n).dot(w.get_value())) for n in (7, 3)]
    np.testing.assert_allclose(v.get_value(), before - sum(h.mean(axis=0) for h in hidden)[:, None] / 2, rtol=1e-4)
    assert places_of(step) == [['dev0', 'dev1']] and report.usages[0].calls == 2
    assert report.usages[0].why == 'placed' and 'dev0 dev1' in str(report) and not enabled.messages


def test_a_placed_function_without_a_batch(enabled):
    report = enabled()
    _, (w, v), _ = two_layers()
    rate = T.scalar('rate')
    with mgpu.device('dev1'):
        total = (w ** 2).sum() + (v ** 2).sum()
    f = theano.function([], total, mode=FAST)
    decay = theano.function([rate], total, updates=[(w, w * rate), (v, v * rate)], mode=FAST)
    expected = (w.get_value() ** 2).sum() + (v.get_value() ** 2).sum()
    found = [f(), decay(0.5), f()]
    np.testing.assert_allclose(found, [expected, expected, expected / 4], rtol=1e-5)
    assert [usage.calls for usage in report.usages] == [2, 1] and not enabled.messages
    assert places_of(decay) == [['dev0', 'dev1']]


def test_replicas_of_a_placed_function(enabled):
    mgpu.init('dev0->cpu;dev1->cpu;dev2->cpu;dev3->cpu')
    report = enabled()
    x, weights, y = two_layers()
    z = T.matrix('z')
    f = theano.function([x, z], y + z.sum(), mode=FAST)
    ones = np.ones((6, 1), x.dtype)
    np.testing.assert_allclose(f(rows(6), ones), expected_of(weights, rows(6)) + 6, rtol=1e-5)
    assert places_of(f) == [['dev0', 'dev1'], ['dev2', 'dev3']]
    # An argument that looked like a batch in the first call is none in this one.
    np.testing.assert_allclose(f(rows(5), ones), expected_of(weights, rows(5)) + 6, rtol=1e-5)
    assert places_of(f) == [['dev0', 'dev1'], ['dev2', 'dev3']]  # for the next call
    assert report.usages[0].calls == 2 and not enabled.messages


def test_what_cannot_run_on_its_devices_says_so(enabled):
    report = enabled(contexts=['dev0'])
    x, weights, y = two_layers()
    f = theano.function([x], y, mode=FAST, name='f')
    for _ in range(2):
        np.testing.assert_allclose(f(rows(6)), expected_of(weights, rows(6)), rtol=1e-5)
    assert enabled.messages == ['f is placed on devices, but plain Theano runs it on one: ' + report.usages[0].why]
    why = 'the graph is placed on 2 contexts (dev0, dev1), but is to run on 1: dev0->cpu'
    assert report.usages[0].why.startswith(why)
    enabled(contexts=['dev0'], strict=True)
    f = theano.function([x], y, mode=FAST, name='f')
    with pytest.raises(mgpu.GraphError, match='f is placed on devices, but .* is to run on 1'):
        f(rows(6))
    enabled()
    theano.function([x], y, mode=FAST, name='g', profile=True)
    f.copy(name='h', profile=True)
    assert enabled.messages[1:] == ['%s is placed on devices, but plain Theano runs it on one: it is profiled' % name
                                    for name in 'gh']


def test_a_wrong_argument_is_an_error_of_theano(enabled):
    enabled()
    x, weights, y = two_layers()
    f = theano.function([x], y, mode=FAST)
    with pytest.raises(ValueError):
        f(rows(4)[:, :3])
    np.testing.assert_allclose(f(rows(4)), expected_of(weights, rows(4)), rtol=1e-5)
    assert places_of(f) == [['dev0', 'dev1']] and not enabled.messages


def test_plain_theano_warns_that_it_ignores_places():
    x, (w, _), y = two_layers()
    with pytest.warns(mgpu.MgpuWarning, match='f is placed on devices, but plain Theano computes it on one. Make it'):
        theano.function([x], y, mode=FAST, name='f')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        theano.function([], w.sum(), mode=FAST)  # it only reads a placed variable
        mgpu.function([x], y, mode=FAST)


def test_an_audit_shows_where_everything_is():
    x, weights, y = two_layers()
    with mgpu.device('cpu'):
        total = y.sum()
    text = str(mgpu.audit(mgpu.function([x], total, mode=FAST)))
    where = {op: {line.split()[0] for line in text.splitlines() if op in line} for op in ('Dot22', 'tanh', 'Sum')}
    assert where['tanh'] == {'dev0'} and where['Dot22'] == {'dev0', 'dev1'} and where['Sum'] >= {'dev1', 'the'}, text
