"""The flag `mgpu.check`: copies that drift apart, and values that are not finite, with the op and the samples."""
import json

import theano_mgpu as mgpu
from theano_mgpu.checks import ledger, ledger_file
from theano_mgpu.checks.sentinel import op_by_op

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.rank_check_jobs import X, error_of, flip_bit, logarithmic
from theano.configparser import change_flags

FUSED = theano.Mode('py', 'fast_run').excluding('constant_folding', 'topo_constant_folding')
LOG = 'Log(0.0) = -inf in sample 5 of the batch'


@pytest.fixture
def check():
    """Return a function that sets the flag."""
    with change_flags(**{'mgpu.check': 0}):
        def use(every):
            theano.config.mgpu.check = every
        yield use


@pytest.fixture
def zero(monkeypatch):
    """Give sample 5 of the seventh batch zeros only."""
    batches = X.copy()
    batches[6, 5] = 0
    monkeypatch.setattr('support.rank_check_jobs.X', batches)


@pytest.mark.parametrize('every', [1, 5])
def test_the_op_and_the_sample_of_a_loss(every, check, zero, cpu2):
    """A loss is checked in each step; nothing is changed, and the training goes on without that batch."""
    check(every)
    step, w, _ = logarithmic(mode=PYTHON)
    at, name, text = error_of(step)
    assert (at, name) == (7, 'NonFiniteError')
    assert text.startswith('the loss is -inf in step 7 of train: %s, on host0->cpu, near x and layer/w' % LOG)
    assert 'replica 0 (context host0->cpu, samples 0 to 5)' in text and 'No value was changed' in text
    before = w.get_value()
    assert np.isfinite(before).all()
    step(X[7])
    assert (w.get_value() != before).any()


@pytest.mark.slow
@pytest.mark.opencl
def test_devices(check, zero, gpu2, tmp_path):
    """A copy on a device with another bit is named; so is the op of a device. A ledger has the values of devices."""
    check(4)
    with change_flags(**{'mgpu.ledger': str(tmp_path / 'ledger'), 'mgpu.ledger_every': 3}):
        step, w, v = logarithmic()

    def flip():
        copy = step.updated[0].copies[gpu2[1]].container.storage[0]
        value = np.asarray(copy)
        flip_bit(value)
        copy[:] = value
    at, name, text = error_of(step, 2, flip)
    assert (at, name) == (4, 'DriftError')
    assert text.startswith('layer/w has another value on %s->%s than on %s->%s, between steps 0 and 4 of train: 1 of 6 '
                           'numbers, the first at [1, 0]: ' % (*gpu2[1][:2], *gpu2[0][:2])), text
    lines = ledger_file.read(str(tmp_path / 'ledger')).steps
    assert lines['train', 3]['values'] == {each.name: ledger.digest(each.get_value()) for each in (w, v)}
    w.set_value(w.get_value())
    at, name, text = error_of(step)
    assert (at, name) == (7, 'NonFiniteError') and LOG + ', on %s->%s' % gpu2[0][:2] in text


@pytest.mark.mpi
@pytest.mark.parametrize('ranks, update_on, at', [
    (2, 'auto', 7), pytest.param(3, 'sharded', 8, marks=pytest.mark.slow)])
def test_ranks(ranks, update_on, at, tmp_path):
    """Every rank raises the same errors, which name the rank. The owner of an update replaces wrong copies."""
    launch(ranks, 'checked', tmp_path / 'errors', update_on, at, flags=INTERPRETED + ',mgpu.shares=equal')
    for rank in range(ranks):
        with open('%s.%d' % (tmp_path / 'errors', rank)) as file:
            drift, zero = json.load(file)
        assert drift[:2] == [8, 'DriftError'] and zero[:2] == [5, 'NonFiniteError']
        others = ' and '.join('rank %d, a->cpu' % i for i in range(ranks - 1))
        assert drift[2].startswith('layer/w has another value on rank %d, a->cpu than on %s, between steps 6 and 8 of '
                                   'train: 1 of 6 numbers, the first at [1, 0]: ' % (ranks - 1, others))
        assert ('is probably wrong' in drift[2]) == (ranks > 2)
        where = 'sample 8' if ranks == 2 else 'samples 8 to 10'  # of which the values have the shape of the weight
        assert 'Log(0.0) = -inf in %s of the batch, on rank %d, a->cpu' % (where, ranks - 1) in zero[2]


def stepped(loss, updates, batch, w=1., **options):
    """Return the text of the NonFiniteError of a step of a training function over x and w."""
    x, w = T.fmatrix('x'), theano.shared(np.full(2, w, 'float32'), name='w')
    before = w.get_value()
    step = mgpu.training_function([x], loss(x, w), [w], lambda gradients: {w: T.cast(updates(w, *gradients), w.dtype)},
                                  mode=PYTHON, name='train', **options)
    with pytest.raises(mgpu.NonFiniteError) as error:
        step(batch)
    np.testing.assert_array_equal(w.get_value(), before)
    return ' '.join([str(error.value), *getattr(error.value, '__notes__', ())])


def plain(w, gradient):
    return w - gradient


BATCH = np.random.RandomState(1).rand(10, 2).astype('float32')


def changed(row, value):
    batch = BATCH.copy()
    batch[row] = value
    return batch


@pytest.mark.parametrize('arguments, texts', [
    ([lambda x, w: T.log(x * w).mean(), plain, changed([2, 7, 8], 0)], ['in sample 2 of the batch, on host0']),
    ([lambda x, w: T.log(x * w).mean(), plain, changed([7, 8], 0)], ['in samples 7, 8 of the batch, on host1']),
    ([lambda x, w: (T.dot(x, w) / x.var(axis=0).sum()).mean(), plain, changed(slice(None), 1)], ['(', ', 0.0) = inf']),
    ([lambda x, w: T.dot(x, w).mean(), lambda w, gradient: w / (gradient - gradient), BATCH],
     ['the new value of w is not finite in step 1 of train: TrueDiv(1.0, 0.0) = inf', 'update) failed']),
    ([lambda x, w: T.dot(x, w).mean(), plain, changed(4, np.nan)],
     ['the loss is nan', 'x had NaN already in sample 4 of', 'Look for such numbers in the data']),
    ([lambda x, w: T.dot(x, w).mean(), plain, BATCH, np.inf],
     ['the loss is inf', 'w had infinity already (2 of 2 numbers, the first at [0]), on', 'changed. Set it to']),
    ([lambda x, w: T.sqr(x * w * np.float32(1e19)).sum(), plain, changed(4, 9)], ['Sqr(9e+19) = inf in sample 4']),
    ([lambda x, w: (x * w * np.float32(1e38)).sum(), plain, changed(slice(4, 6), 2)],
     ['made it of finite values in samples 0 to 4 of the batch, on host0->cpu, near'])])
def test_causes(arguments, texts, check, cpu2):
    """A sample, a stage that has values of the whole batch, the update, the data, the weights, an overflow."""
    check(1)
    text = stepped(*arguments)
    for part in texts:
        assert part in text, text


def test_a_slice_of_a_sub_batch(check, cpu2):
    check(1)
    text = stepped(lambda x, w: T.log(x * w).mean(), plain, changed(3, 0), micro_batches=2)
    assert 'in sample 3 of the batch, on host0' in text


def test_enabled_functions(check, contexts):
    """Plain Theano, which checks nothing, computes no call in place of the contexts, whether there are two or one."""
    check(1)
    for number in (1, 2):
        contexts('cpu', number)
        mgpu.enable(tell=str)
        try:
            x, w = T.fmatrix('x'), theano.shared(np.float32(1), name='w')
            step = theano.function([x], T.log(x).sum(), updates=[(w, T.cast(w - x.sum(), 'float32'))], mode=PYTHON,
                                   name='step')
            step(BATCH)
            with pytest.raises(mgpu.NonFiniteError, match=r'step 2 of step: Log\(0.0\) = -inf in sample 6 of'):
                step(changed(6, 0))
        finally:
            mgpu.disable()


def found(outputs, inputs, values, mode=None):
    """Return the Found of a plain function, and its results as the function returns them."""
    function = theano.function(inputs, outputs, mode=mode)
    function.trust_input = True
    results, origin = op_by_op(function, values)
    for ours, theirs in zip(results, function(*values)):
        np.testing.assert_array_equal(ours, theirs)
    return origin


@pytest.mark.parametrize('mode', [PYTHON, FUSED])
def test_the_first_op(mode):
    """Only ops count from which a result is not finite; an op within a fused one is named."""
    x, y = T.fvectors('x', 'y')
    values = [np.array([1, 0, 2, 3], 'float32'), np.array([1, 2, 0, 4], 'float32')]
    masked = T.switch(x > 0, T.log(x), 0)  # its minus infinity is not used
    origin = found([T.exp(masked), T.sqr(masked + T.exp(1 / y))], [x, y], values, mode)
    assert origin.mask.tolist() == [False, False, True, False] and origin.node is not None
    assert origin.how == ('TrueDiv(1, 0.0) = inf' if mode is PYTHON else 'Inv(0.0) = inf')
    assert (mode is PYTHON) == ('Composite' not in str(origin.node.op))
    matrix = np.ones((4, 4), 'float32')
    origin = found([T.log(T.dot(theano.shared(matrix), x))], [x], [0 * values[0]], mode)  # maybe in place
    assert origin.how == 'Log(0.0) = -inf' and origin.mask.all()
    origin = found([x.sum()], [x], [np.full(4, 3e38, 'float32')], mode)
    assert origin.how == 'Sum{acc_dtype=float64} made it of finite values' and origin.mask.all()
    assert found([T.exp(masked)], [x], values[:1], mode) is None
    origin = found([x.sum() + y], [x, y], [values[0], values[1] / values[0]], mode)
    assert origin.node is None and origin.variable.name == 'y' and origin.mask.tolist() == [False, True, False, False]
