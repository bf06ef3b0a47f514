"""Functions whose first calls show no batch, or another one than later calls: no first choice lasts for ever."""
import theano_mgpu as mgpu
from theano_mgpu.auto import found
from theano_mgpu.auto.choice import Way

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.dispatch_clock import Clock
from support.modes import PYTHON
from theano.typed_list import make_list

pytestmark = pytest.mark.verified


def rows(*shape):
    return np.random.RandomState(sum(shape)).rand(*shape)


def sum_of_rows():
    x = T.dmatrix('x')
    return [x], x.sum(axis=1), ()


def time_first():
    """Return the graph of a function with batches along axis 1 of one argument, and along axis 0 of the other one."""
    y, m = T.dmatrix('y'), T.dtensor3('m')
    return [y, m], (y.T.sum(axis=1) + m.sum(axis=(1, 2))).mean(), ()


def features():
    """Return the graph of a function of samples, and of a vector that is as long as the samples are wide."""
    x, b = T.dmatrix('x'), T.dvector('b')
    return [x, b], T.argmax(x + b, axis=1), ()


def scaled():
    x, scale = T.dmatrix('x'), T.dmatrix('scale')
    return [x, scale], T.nnet.softmax(x * scale), ()


def sliced():
    start, stop = T.lscalar('start'), T.lscalar('stop')
    data = theano.shared(rows(20, 3), 'data')
    return [start, stop], data[start:stop].sum(axis=0), ()


def row_of_a_table():
    x, k = T.dmatrix('x'), T.lscalar('k')
    table = theano.shared(rows(5, 3), 'table')
    return [x, k], T.dot(x, table[k:k + 1].sum(axis=0)), ()


def literal():
    """Return the graph of a function of six features: a first batch of six samples has this length by chance."""
    x = T.dmatrix('x')
    return [x], T.dot(x, T.zeros((6, 2)) + 2), ()


def chain():
    """Return a graph with a state beside the batch; by chance the first batch has as many rows as the state."""
    x, state = T.dmatrix('x'), theano.shared(np.ones(4), 'state')
    return [x], x.sum(axis=1) * state.sum(), [(state, state * 2)]


def along_the_batch():
    x, y = T.dmatrix('x'), T.dvector('y')
    return [x, y], T.sort(x, axis=0).sum(axis=1) + y, ()


CASES = {  # the function, the arguments of its calls, and how many of these are divided
    'one sample first': (sum_of_rows, [(rows(1, 3),), (rows(7, 3),), (rows(1, 3),), (rows(5, 3),)], 3),
    'an empty batch first': (sum_of_rows, [(rows(0, 3),), (rows(7, 3),), (rows(0, 3),), (rows(5, 3),)], 2),
    'lists': (sum_of_rows, [([[1., 2, 3]],), ([[1., 2, 3], [3, 2, 1]],)], 1),
    'fewer samples than contexts': (sum_of_rows, [(rows(2, 3),), (rows(7, 3),)], 2),
    'one sample of two arguments': (time_first, [(rows(5, 1), rows(1, 2, 3)), (rows(5, 6), rows(6, 2, 3)),
                                                 (rows(4, 7), rows(7, 2, 3))], 2),
    'as many steps as samples': (time_first, [(rows(6, 6), rows(6, 2, 3)), (rows(5, 6), rows(6, 2, 3)),
                                              (rows(5, 6), rows(6, 2, 3)), (rows(6, 6), rows(6, 2, 3)),
                                              (rows(4, 7), rows(7, 2, 3))], 5),
    'as many samples as features': (features, [(rows(3, 3), rows(3)), (rows(7, 3), rows(3)), (rows(7, 3), rows(3)),
                                               (rows(5, 3), rows(3))], 3),
    'more samples than features': (features, [(rows(1, 3), rows(3)), (rows(7, 3), rows(3)), (rows(5, 3), rows(3))], 2),
    'a row that is the same for all samples': (scaled, [(rows(1, 3), rows(1, 3)), (rows(4, 3), rows(4, 3))], 2),
    'a slice of one row': (sliced, [(0, 1), (3, 20), (4, 5), (0, 4)], 3),
    'an empty slice': (sliced, [(0, 0), (3, 20)], 1),
    'a row of a table': (row_of_a_table, [(rows(6, 3), 2), (rows(4, 3), 1)], 2),
    'a number by chance': (literal, [(rows(6, 6),), (rows(4, 6),), (rows(3, 6),), (rows(6, 6),)], 3),
    'a state by chance': (chain, [(rows(4, 3),), (rows(6, 3),), (rows(6, 3),), (rows(4, 3),)], 3),
}


@pytest.fixture
def enabled(cpu2):
    """Return a function that calls `mgpu.enable`; its list `messages` collects the notes."""
    def enable(**options):
        return mgpu.enable(tell=enable.messages.append, **dict({'always': True}, **options))
    enable.messages = []
    yield enable
    mgpu.disable()


def made(build, **options):
    inputs, output, updates = build()
    return theano.function(inputs, output, updates=updates, mode=PYTHON, **options), dict(updates)


@pytest.mark.slow_with('a number by chance')
@pytest.mark.parametrize('name', CASES)
def test_later_calls_show_another_batch(name, enabled):
    build, calls, divided = CASES[name]
    plain, states = made(build)
    report = enabled()
    ours, others = made(build, name='ours')
    for call in calls:
        np.testing.assert_allclose(ours(*call), plain(*call), rtol=1e-12)
        for one, other in zip(others, states):
            np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-12)
    usage, = report.usages
    assert (usage.calls, usage.why, bool(usage.contexts)) == (divided, 'divided', True)


def test_what_the_summary_says_of_one_sample(enabled):
    """The summary said that no batch enters the function."""
    report = enabled()
    inputs, output, _ = sum_of_rows()
    f = theano.function(inputs, output, mode=PYTHON)
    f(rows(1, 3))
    usage, = report.usages
    assert usage.why == found.NO_BATCH_YET and not usage.contexts and not enabled.messages
    f(rows(2, 3))
    assert usage.why == 'divided' and usage.contexts


def test_one_sample_is_no_error_of_strict(enabled):
    enabled(strict=True)
    inputs, output, _ = sum_of_rows()
    f = theano.function(inputs, output, mode=PYTHON)
    np.testing.assert_allclose(f(rows(1, 3)), rows(1, 3).sum(axis=1))
    g = theano.function(*along_the_batch()[:2], mode=PYTHON)
    for _ in range(2):
        with pytest.raises(mgpu.GraphError, match='cannot be computed in parts'):
            g(rows(4, 2), rows(4))


def test_a_refusal_is_not_looked_for_again(enabled, monkeypatch):
    """A graph is analysed once for each way to take the batch, whatever the length."""
    analysed = []
    original = found.FoundBatch._compiled
    monkeypatch.setattr(found.FoundBatch, '_compiled', lambda self, *args, **options: (
        analysed.append(options['samples']), original(self, *args, **options))[1])
    report = enabled()
    inputs, output, _ = along_the_batch()
    f = theano.function(inputs, output, mode=PYTHON, name='ordered')
    for n in (1, 7, 5, 7, 4, 1, 9):
        np.testing.assert_allclose(f(rows(n, 2), rows(n)), np.sort(rows(n, 2), axis=0).sum(axis=1) + rows(n))
    assert analysed == [dict.fromkeys(inputs, 0), {inputs[0]: 1}]
    message, = enabled.messages
    assert 'SortOp' in message and message.endswith(report.usages[0].why)


def test_batches_that_fail_by_their_data_do_not_end_the_division(enabled):
    """A batch that only one device can compute ended the division; one with wrong arguments must not end it either."""
    report = enabled()
    x = T.dmatrix('x')
    f = theano.function([x], x.reshape((-1, 4)).sum(axis=1), mode=PYTHON, name='fours')
    for shape in ((3, 6), (4, 6), (4, 8), (3, 8)):  # in the second batch, fours are made of two samples
        if shape == (3, 6):
            with pytest.raises(ValueError, match='reshape'):
                f(rows(*shape))
        else:
            np.testing.assert_allclose(f(rows(*shape)), rows(*shape).reshape((-1, 4)).sum(axis=1))
    message, = enabled.messages
    usage, = report.usages
    assert 'merges or splits the axis of the samples' in message
    assert (usage.calls, usage.why, bool(usage.contexts)) == (2, 'divided', True)
    for _ in range(4):
        np.testing.assert_allclose(f(rows(4, 6)), rows(4, 6).reshape((-1, 4)).sum(axis=1))
    assert 'it failed over the contexts' in usage.why and f.mgpu_divided is None and len(enabled.messages) == 1


def test_a_comparison_of_variables_is_the_only_output(cpu2, enabled):
    """"Variables do not support boolean operations", of `theano.function([], x > y)`, or TypeError."""
    x, y = theano.shared(np.arange(3.), 'x'), theano.shared(np.ones(3), 'y')
    report = enabled()
    np.testing.assert_array_equal(theano.function([], x > y, mode=PYTHON)(), [False, False, True])
    both = theano.function([], make_list([x, y]), mode=PYTHON)()
    np.testing.assert_array_equal(both, [np.arange(3.), np.ones(3)])
    assert len(report.usages) == 2


def test_calls_that_grow_are_timed_anew(enabled, monkeypatch):
    """A function stayed on one device for ever, since its first calls were short."""
    report = enabled(always=False)
    clock = Clock(divided=5e-5, whole=1e-4)
    clock.install(monkeypatch.setattr)
    inputs, output, _ = sum_of_rows()
    f = theano.function(inputs, output, mode=PYTHON)
    for _ in range(20):
        f(rows(1, 3))
    usage, = report.usages
    assert 'too short' in usage.why and not usage.contexts
    clock.seconds.update({Way.HOST: 1., Way.SEVERAL: .5})
    for _ in range(50):
        np.testing.assert_allclose(f(rows(9, 3)), rows(9, 3).sum(axis=1))
    assert usage.why == 'divided, 500 ms (host 1e+03 ms); fewer than 2 samples: host'
    assert usage.contexts and usage.samples >= 9


def test_the_summary_of_a_function_that_is_timed(enabled, monkeypatch):
    """A function on the host had the batches that were timed over the contexts, as if there were no others."""
    report = enabled(always=False)
    clock = Clock(divided=2., whole=1.)
    clock.install(monkeypatch.setattr)
    inputs, output, _ = sum_of_rows()
    f = theano.function(inputs, output, mode=PYTHON)
    row, whys = '', set()
    for _ in range(60):
        f(rows(9, 3))
        row = report.without_notes().splitlines()[2]
        whys.add(report.usages[0].why)
    assert 'divided, still being timed' in whys and report.usages[0].calls, whys
    assert row.split()[1:6] == ['host', '-', '-', '-', 'host,'] and '(divided 2e+03 ms' in row, row


def test_a_placed_function_that_is_first_called_with_one_sample(enabled):
    """The function ran on the devices of its first replica for ever."""
    report = enabled(always=False)
    x, w = T.dmatrix('x'), theano.shared(rows(3, 2))
    with mgpu.device(mgpu.contexts()[1].name):
        output = T.dot(x, w)
    f = theano.function([x], T.tanh(output).sum(axis=1), mode=PYTHON)
    for n, replicas in ((1, 1), (7, 2), (1, 2), (4, 2)):
        np.testing.assert_allclose(f(rows(n, 3)), np.tanh(rows(n, 3).dot(w.get_value())).sum(axis=1))
        assert len(f.mgpu_divided.source.step.mesh.replicas) == replicas
    assert report.usages[0].why == 'placed' and report.usages[0].calls == 4
