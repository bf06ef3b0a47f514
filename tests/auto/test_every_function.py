"""`mgpu.enable()`: functions of unchanged scripts run over contexts, with the results of plain Theano."""
from collections import OrderedDict

import theano_mgpu as mgpu
from theano_mgpu.auto.choice import COUNTED, WARM_UP, Way

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.dispatch_clock import Clock
from support.modes import PYTHON
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

pytestmark = pytest.mark.usefixtures('interpreted')
CALLS = WARM_UP + COUNTED
COMPILED = theano.Mode('cvm', 'fast_compile')
X = np.random.RandomState(0).randn(43, 6)
Y = np.random.RandomState(1).randint(0, 3, 43).astype('int32')


@pytest.fixture
def enabled():
    """Return a function that calls `mgpu.enable`; its list `messages` collects the notes."""
    def enable(**options):
        report = mgpu.enable(tell=enable.messages.append, **dict({'always': True}, **options))
        return report
    enable.messages = []
    yield enable
    mgpu.disable()


def shared(value, name=None):
    return theano.shared(np.asarray(value), name=name, borrow=True)


def function(*args, **kwargs):
    return theano.function(*args, mode=PYTHON, **kwargs)


def logistic(size=20):
    """Yield the figures of a script in the style of the Deep Learning Tutorials: data by index, cast labels."""
    data, labels = shared(X, 'data'), T.cast(shared(Y.astype('float64'), 'labels'), 'int32')
    index, x, y = T.lscalar('index'), T.dmatrix('x'), T.ivector('y')
    w, b = shared(np.zeros((6, 3)), 'w'), shared(np.zeros(3), 'b')
    p = T.nnet.softmax(T.dot(x, w) + b)
    cost = -T.mean(T.log(p)[T.arange(y.shape[0]), y])
    rows = slice(index * size, (index + 1) * size)
    givens = {x: data[rows], y: labels[rows]}
    train = function([index], cost, givens=givens, updates=[(v, v - 0.5 * T.grad(cost, v)) for v in (w, b)])
    errors = function(inputs=[index], outputs=T.mean(T.neq(T.argmax(p, axis=1), y)), givens=givens)
    for _ in range(3):
        for i in range(3):  # the last one is ragged
            yield train(i)
            yield errors(index=i)
    yield w.get_value()


def denoising():
    """Yield figures with random draws of the batch's shape, default arguments and keywords, and tied weights."""
    data, index, x = shared(X, 'data'), T.lscalar('index'), T.dmatrix('x')
    w, streams = shared(np.full((6, 4), 0.1), 'w'), RandomStreams(7)
    level, rate = T.dscalar('level'), T.dscalar('rate')
    corrupted = streams.binomial(size=x.shape, n=1, p=1 - level) * x
    cost = T.mean(T.sum((T.dot(T.tanh(T.dot(corrupted, w)), w.T) - x) ** 2, axis=1))
    step = function([index, theano.In(level, value=0.2), theano.In(rate, value=0.1)], cost,
                    givens={x: data[index * 10:(index + 1) * 10]}, updates=[(w, w - rate * T.grad(cost, w))])
    for i in range(5):
        yield step(i)
        yield step(index=i, rate=0.05)
        yield step(i, level=0.4)
    yield w.get_value()


def fixed_length():
    """Yield figures of a graph with the length of the batch as a number; another length is plain Theano's error."""
    x = T.dmatrix('x')
    total = function([x], x.reshape((20, 2, 3)).sum(axis=2))
    yield total(X[:20])
    yield total(X[20:40])
    with pytest.raises(ValueError):
        total(X[:11])


def persistent_chain(streams=RandomStreams):
    data, index, x = shared(X[:40], 'data'), T.lscalar('index'), T.dmatrix('x')
    chain, w = shared(np.full((10, 4), 0.5), 'chain'), shared(np.full((6, 4), 0.1), 'w')
    streams = streams(3)

    def gibbs(hidden):
        visible = streams.binomial(size=(10, 6), n=1, p=T.nnet.sigmoid(T.dot(hidden, w.T)), dtype='float64')
        return visible, streams.binomial(size=(10, 4), n=1, p=T.nnet.sigmoid(T.dot(visible, w)), dtype='float64')
    (visible, hidden), updates = theano.scan(lambda h: gibbs(h), outputs_info=[None, chain], n_steps=3)
    end = visible[-1]
    cost = T.mean(T.dot(x, w).sum(axis=1)) - T.mean(T.nnet.softplus(T.dot(end, w)).sum(axis=1))
    updates[w] = w - 0.1 * T.grad(cost, w, consider_constant=[end])
    updates[chain] = hidden[-1]
    step = function([index], cost, givens={x: data[index * 10:(index + 1) * 10]}, updates=updates)
    for i in range(4):
        yield step(i)
    if step.mgpu_divided and isinstance(streams, MRG_RandomStreams):
        assert list(map(str, step.mgpu_divided.source.step.inputs.rows)) == ['chain']  # each replica has its rows of it
    yield w.get_value()
    yield chain.get_value()


def chain_of_mrg():
    return persistent_chain(MRG_RandomStreams)


def time_major():
    """Yield figures with samples along axis 1 and a mask; one function stores gradients, another one updates."""
    x, mask, y = T.tensor3('x', 'float64'), T.dmatrix('mask'), T.ivector('y')
    w, u = shared(np.full((6, 3), 0.1), 'w'), shared(np.eye(3), 'u')
    rate, gradients = T.dscalar('rate'), [shared(np.zeros((6, 3)), 'g.w'), shared(np.zeros((3, 3)), 'g.u')]

    def one(m, row, before):
        return m[:, None] * T.tanh(T.dot(row, w) + T.dot(before, u)) + (1 - m)[:, None] * before
    states, _ = theano.scan(one, sequences=[mask, x], outputs_info=[T.zeros((x.shape[1], 3), 'float64')])
    pooled = (states * mask[:, :, None]).sum(axis=0) / mask.sum(axis=0)[:, None]
    cost = -T.log(T.nnet.softmax(pooled)[T.arange(x.shape[1]), y]).mean()
    store = function([x, mask, y], cost, updates=list(zip(gradients, T.grad(cost, [w, u]))))
    apply = function([rate], [], updates=[(v, v - rate * g) for v, g in zip((w, u), gradients)])
    for steps, n in ((4, 8), (5, 5), (3, 7)):
        values = np.random.RandomState(n).randn(steps, n, 6)
        yield store(values, (np.arange(steps)[:, None] <= np.arange(n) % steps) * 1.0, Y[:n])
        apply(0.3)
    yield w.get_value()
    yield u.get_value()


def of_factors():
    """Return a step with samples along the last axis of (factors, time, samples) and of (time, samples); its weight."""
    x, mask, y = T.tensor3('x', 'float64'), T.dmatrix('mask'), T.dmatrix('y')
    u = shared(np.eye(3) / 2, 'u')
    states, _ = theano.scan(lambda m, row, before, u: m[:, None] * T.tanh(row[:, None] + T.dot(before, u)),
                            [mask, x[0]], T.zeros((mask.shape[1], 3), 'float64'), [u])
    cost = ((states[-1].sum(axis=1) - y.sum(axis=0)) ** 2).mean()
    return function([x, mask, y], cost, updates=[(u, u - 0.01 * T.grad(cost, u))]), u


def numbers(steps, of_targets, n):
    """Return arguments of `of_factors`."""
    rng = np.random.RandomState(n)
    return rng.randn(1, steps, n), np.ones((steps, n)), rng.randn(of_targets, n)


def factors_first():
    """Yield costs of batches with as many steps as their targets, and with more."""
    step, u = of_factors()
    for lengths in ((4, 4, 8), (5, 3, 7), (4, 4, 6)):
        yield step(*numbers(*lengths))
    yield u.get_value()


def monitors():
    """Yield sums that grow over batches: an index vector, dicts, a function without outputs, and a rate that is set."""
    data, chosen, x = shared(X, 'data'), T.lvector('chosen'), T.dmatrix('x')
    total, count, rate = shared(np.zeros(6), 'total'), shared(0, 'count'), shared(0.5, 'rate')
    watch = function([x], updates=OrderedDict([(total, total + rate * x.sum(axis=0)), (count, count + x.shape[0])]))
    both = function([chosen], {'mean': x.mean(), 'rows': 2 * x}, givens={x: data[chosen]})
    for n in (7, 11, 1, 3):
        yield np.array(watch(X[:n]))
        rate.set_value(rate.get_value() / 2)
        found = both(np.arange(n)[::-1])
        yield found['mean']
        yield found['rows']
    yield total.get_value()
    yield count.get_value()


def vectors_by_hand():
    """Yield figures of a table of vectors; a batch changes the rows of its words, some of them several times."""
    words, others = T.ivector('words'), T.imatrix('others')
    e, c, counts = shared(X[:9] / 3, 'e'), shared(X[10:19] / 3, 'c'), shared(np.zeros(9, 'int64'), 'counts')
    near, far = e[words], c[others]
    cost = T.nnet.softplus(T.sum(near.dimshuffle(0, 'x', 1) * far, axis=2)).sum()
    gradients = T.grad(cost, [near, far])
    step = function([words, others], cost, updates=[
        (e, T.inc_subtensor(near, -0.1 * gradients[0])), (counts, T.inc_subtensor(counts[others], 1)),
        (c, T.set_subtensor(c[words], 0.9 * c[words] - 0.1 * gradients[0]))])
    for n in (7, 12, 5, 2):
        draw = np.random.RandomState(n)
        yield step(draw.randint(0, 9, n).astype('int32'), draw.randint(0, 4, (n, 3)).astype('int32'))
    for variable in (e, c, counts):
        yield variable.get_value()


def fixed_length_in_indices():
    """Yield figures with the batch's length as a number in indices; another length is computed as in plain Theano."""
    x, y, w = T.dmatrix('x'), T.ivector('y'), shared(X[:6, :3] / 3, 'w')
    p = T.nnet.softmax(T.dot(x, w))
    cost = -T.log(p)[T.arange(10), y].mean() - T.log(p.flatten()[np.arange(10) * 3 + y]).sum()
    step = function([x, y], cost, updates=[(w, w - 0.1 * T.grad(cost, w))])
    both = T.tanh(T.dot(T.concatenate([x, x[:, ::-1]]), w))
    cost = T.sqr(both[:10]).mean() - both[10:].mean() + both[10:20, 1].sum()
    joined = function([x], cost, updates=[(w, w - 0.1 * T.grad(cost, w))])
    for i in (0, 10, 20):
        yield step(X[i:i + 10], Y[i:i + 10])
        yield joined(X[i:i + 10])
    yield joined(X[:12])
    with pytest.raises((ValueError, IndexError)):
        step(X[:9], Y[:9])
    yield w.get_value()


def gradient_of_its_own():
    """Yield figures of an op that is made of a graph and has its own gradient, applied to the batch and to its mean."""
    a, w = T.dmatrix('a'), shared(X[:6, :3], 'w')
    clipped = theano.OpFromGraph([a], [T.clip(a, -0.5, 0.5) - a.mean(axis=0)],
                                 grad_overrides=lambda inputs, gradients: [gradients[0] * (abs(inputs[0]) < 0.8)])
    x = T.dmatrix('x')
    cost = T.sqr(clipped(T.dot(x, w))).mean()
    step = function([x], cost, updates=[(w, w - T.grad(cost, w))])
    for n in (9, 4):
        yield step(X[:n])
    yield w.get_value()


def hardest_triplets():
    """Yield a loss of the distances of all pairs, their diagonal, a trace, and a factor that all samples share."""
    x, y, w = T.dmatrix('x'), T.ivector('y'), shared(X[:6, :3], 'w')
    z = T.tanh(T.dot(x, w))
    squares = T.diag(T.dot(z, z.T))
    distances = squares.dimshuffle(0, 'x') - 2 * T.dot(z, z.T) + squares.dimshuffle('x', 0)
    same = T.eq(y.dimshuffle(0, 'x'), y.dimshuffle('x', 0))
    hardest = T.max(same * distances, axis=1) - T.min(distances + 9. * same, axis=1)
    pairs = T.exp(T.dot(z, (2 * z).T))
    contrast = -T.log(T.diag(pairs) / T.fill_diagonal(pairs, 0).sum(axis=1)).mean()
    covariance = T.dot(z.T, z) / x.shape[0] + T.eye(3)
    whitened = T.nlinalg.trace(covariance) + T.log(T.diag(T.slinalg.cholesky(covariance))).sum()
    cost = T.nnet.softplus(hardest).mean() + contrast + whitened
    step = function([x, y], cost, updates=[(w, w - 0.1 * T.grad(cost, w))])
    for n in (9, 14, 5):
        yield step(X[:n], Y[:n])
    yield w.get_value()


SCRIPTS = [logistic, denoising, fixed_length, persistent_chain, chain_of_mrg, time_major, factors_first, monitors,
           vectors_by_hand, fixed_length_in_indices, gradient_of_its_own, hardest_triplets]


@pytest.mark.slow_but_with('gradient_of_its_own-2', 'monitors-2', 'fixed_length-2', 'vectors_by_hand-2')
@pytest.mark.parametrize('n', [2, 3])
@pytest.mark.parametrize('script', SCRIPTS)
def test_scripts_give_the_figures_of_plain_theano(script, n, contexts, enabled):
    made = contexts('cpu', n)
    expected = list(script())
    report = enabled()
    for one, other in zip(script(), expected):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    # All functions but for ones that no batch enters.
    assert [usage.name for usage in report.usages if usage.contexts != made and 'no batch' not in usage.why] == []
    assert any(usage.samples for usage in report.usages) and enabled.messages == []
    assert all(usage.numbers()[2] for usage in report.usages if usage.calls > 1 and usage.samples)  # samples per second


@pytest.mark.slow_with('4')
@pytest.mark.parametrize('of_targets', [3, 4])
def test_samples_along_the_third_axis_are_divided(of_targets, cpu2, enabled):
    """Each context computed the loop over all of them; with as many steps as the targets nothing was divided."""
    enabled()
    step, _ = of_factors()
    step(*numbers(4, of_targets, 8))
    assert len(step.mgpu_divided.source.step.inputs.arguments.with_samples) == 3


def test_what_stays_plain_theano_and_why(cpu2, enabled):
    report = enabled(always=False)
    x, s = T.dmatrix('x'), T.dscalar('s')
    w = shared(np.zeros(3), 'w')
    alone = theano.function([s], s * 2, mode=PYTHON, name='alone')
    empty = theano.function([], w * 2, mode=PYTHON, name='empty')
    short = theano.function([x], x * 2, mode=PYTHON, name='short')
    once = theano.function([x], x * 3, mode=PYTHON, name='once')
    checked = theano.function([x], x * 3, mode='DebugMode', name='checked')
    np.testing.assert_array_equal(once(X), 3 * X)
    for _ in range(CALLS):
        assert alone(2.0) == 4 and (empty() == 0).all()
        np.testing.assert_array_equal(short(X), 2 * X)
    why = {usage.name: usage.why for usage in report.usages}
    assert not any(usage.contexts for usage in report.usages)
    assert why['empty'] == why['alone'] == 'no batch enters it' and 'too short' in why['short']
    assert 'too briefly to be tried' in why['once'] and 'checks each op' in why['checked']
    assert all(f.mgpu_divided is None for f in (alone, empty, checked))
    text = str(report)
    assert '0 of 5 functions ran on several contexts' in text and '  host  ' in text


def test_samples_that_cannot_be_divided_stay_on_one_device(cpu2, enabled):
    report = enabled()
    x = T.dmatrix('x')
    f = theano.function([x], T.sort(x, axis=None), mode=PYTHON, name='ordered')
    np.testing.assert_array_equal(f(X), np.sort(X, axis=None))
    usage, = report.usages
    message, = enabled.messages
    assert not usage.contexts and 'Sort' in usage.why and message.startswith('ordered stays on one device: ')
    enabled(strict=True)
    f = theano.function([x], T.sort(x, axis=None), mode=PYTHON, name='ordered')
    with pytest.raises(mgpu.GraphError, match='cannot be computed in parts'):
        f(X)


def test_calls_that_have_grown_are_divided_later(cpu2, enabled, monkeypatch):
    """Once a function rested, its calls stayed on the host for ever, however long they took."""
    enabled(always=False)
    x, n = T.dmatrix('x'), T.lscalar('n')
    f = theano.function([x, n], (x * n).sum(), mode=PYTHON)
    clock = Clock(divided=1, whole=1e-4)
    clock.install(monkeypatch.setattr)
    for _ in range(20 * CALLS):
        f(X, 1)
    clock.seconds[Way.HOST], clock.calls = 2, []
    for _ in range(80 * CALLS):
        np.testing.assert_allclose(f(X, 2), (X * 2).sum())
    assert 'divided' in clock.calls


@pytest.mark.parametrize('faster', ['divided', 'one device'])
def test_what_is_faster_is_what_goes_on(faster, cpu2, enabled, monkeypatch):
    report = enabled(always=False)
    clock = Clock(divided=1e-3 if faster == 'divided' else 2e-3, whole=2e-3 if faster == 'divided' else 1e-3)
    clock.install(monkeypatch.setattr)
    x, w = T.dmatrix('x'), shared(np.ones(6), 'w')
    f = theano.function([x], T.dot(x, w).sum(), updates=[(w, w + x.sum(axis=0))], mode=PYTHON)
    expected = np.ones(6)
    for n in (33 + i % 10 for i in range(2 * CALLS + 5)):
        with theano.configparser.change_flags(**{'mgpu.shares': 'equal'}):  # a call that changes shares does not count
            np.testing.assert_allclose(f(X[:n]), X[:n].dot(expected).sum())
        expected += X[:n].sum(axis=0)
    np.testing.assert_allclose(w.get_value(), expected)
    usage, = report.usages
    # Divided calls that are slower are given up after the warm-up.
    assert clock.calls[:CALLS + WARM_UP] == ['whole'] * CALLS + ['divided'] * WARM_UP
    assert set(clock.calls[CALLS + WARM_UP:]) == ({'divided'} if faster == 'divided' else set())  # calls are not timed
    assert usage.why == ('divided, 1 ms (host 2 ms)' if faster == 'divided' else 'host, 1 ms (divided 2 ms)')
    assert bool(usage.contexts) == (faster == 'divided') == (f.mgpu_divided.source.step is not None)
    assert usage.calls == (CALLS + 5 if faster == 'divided' else WARM_UP)


def test_arguments_at_fault_are_errors_of_plain_theano(cpu2, enabled):
    report = enabled()
    x, y = T.dmatrix('x'), T.dvector('y')
    f = theano.function([x, y], x.sum() + y.sum(), mode=PYTHON)
    for arguments in ((X,), (X, Y, Y), ('a', X[0])):
        with pytest.raises((TypeError, ValueError)):
            f(*arguments)
    assert f(X, X[:, 0]) == X.sum() + X[:, 0].sum()
    g = theano.function([x, y], T.dot(x, T.ones((5,))) + y, mode=PYTHON)
    with pytest.raises(ValueError):  # 6 columns
        g(X, X[:, 0])
    assert report.usages[0].contexts


def test_another_way_to_take_the_batch_is_plain_theano(cpu2, enabled):
    report = enabled()
    x, y = T.dmatrix('x'), T.dvector('y')
    f = theano.function([x, y], T.dot(x, y), mode=PYTHON)
    for n in (5, 6, 7):
        np.testing.assert_allclose(f(X[:n], np.arange(6.)), X[:n].dot(np.arange(6)))
    assert report.usages[0].calls in (2, 3)


def test_verify_prints_a_report(cpu2, enabled, capsys):
    enabled(verify=True)
    w = list(logistic())[-1]
    assert np.isfinite(w).all()
    err = capsys.readouterr().err
    assert err.count('same answer') == 2 and 'new value  w ' in err and 'NOT' not in err


@pytest.mark.slow
def test_on_devices(gpu2, enabled):
    """Each device has a copy of the data set; a step sends nothing of the data set."""
    data, index, x = theano.shared(X.astype('float32'), 'data'), T.lscalar('index'), T.fmatrix('x')
    w = theano.shared(np.zeros(6, 'float32'), 'w')
    cost = ((T.dot(x, w) - 1) ** 2).mean()
    found = []
    for start in (mgpu.disable, enabled):
        report = start()
        w.set_value(np.zeros(6, 'float32'))
        f = theano.function([index], [cost, x], givens={x: data[index * 20:(index + 1) * 20]},
                            updates=[(w, w - np.float32(0.1) * T.grad(cost, w))], mode=COMPILED)
        found.append([value for i in (0, 1, 2, 0) for value in f(i)] + [w.get_value()])
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    usage, = report.usages
    assert usage.contexts == gpu2 and usage.samples == 63


def test_functions_made_before_and_after_stay_plain(cpu2, enabled):
    x = T.dmatrix('x')
    before = theano.function([x], x * 2, mode=PYTHON)
    report = enabled()
    mgpu.disable()
    after = theano.function([x], x * 2, mode=PYTHON)
    assert before.mgpu_divided is after.mgpu_divided is None and not report
    assert str(report) == 'no Theano function was made, and no Keras model ran'


def test_functions_run_over_the_contexts_of_their_time(contexts, enabled):
    """The contexts of the first one were kept: later ones stayed on one device, "context 'host0' is not mapped"."""
    made, report, x = contexts('cpu', 2), enabled(), T.dmatrix('x')
    for _ in range(2):
        function([x], x.sum(axis=1))(X)
        assert report.usages[-1].contexts == made and not enabled.messages
        made = mgpu.init('a->cpu;b->cpu;c->cpu')
