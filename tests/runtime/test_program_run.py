"""Programs of stages over contexts and ranks train like one device, with ragged batches, whatever the samples share."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faulty_executor import faulty
from support.launch import arrays, launch
from support.modes import PYTHON
from support.stages import CoupledModel


@pytest.fixture(scope='module')
def expected():
    """Return the results of plain Theano, by dtype."""
    models = {dtype: CoupledModel(dtype) for dtype in ('float32', 'float64')}
    return {dtype: model.train(model.plain(PYTHON)) for dtype, model in models.items()}


def assert_close(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow_but_with('2-options7')
@pytest.mark.parametrize('n, options', [
    (1, {}), (2, {}), (3, {}), (3, {'executor': 'threads'}), (2, {'micro_batches': 3}), (1, {'micro_batches': 2}),
    (2, {'update_on': 'device'}), (2, {'check_finite': True}), (2, {'least_samples': 5})])
def test_training_is_that_of_plain_theano(n, options, expected, contexts):
    contexts('cpu', n)
    model = CoupledModel('float64')
    assert_close(model.train(model.over_contexts(PYTHON, **options)), expected['float64'], 1e-12)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, {'update_on': 'host', 'micro_batches': 2}])
def test_training_on_devices_is_that_of_plain_theano(options, expected, gpu2):
    model = CoupledModel('float32')
    trained = model.train(model.over_contexts(theano.Mode('cvm', 'fast_compile'), **options))
    assert_close(trained, expected['float32'], 1e-5)


@pytest.mark.mpi
def test_training_over_ranks_is_that_of_plain_theano(expected, tmp_path):
    """Each rank has two contexts; with a batch of one sample, one rank has none."""
    launch(2, 'stages', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', flags='floatX=float32,cxx=')
    assert_close(arrays(tmp_path / 'ranks.npz'), expected['float64'], 1e-12)


def test_a_step_that_fails_in_a_late_stage_changes_nothing(expected, cpu2):
    model = CoupledModel('float64')
    step = model.over_contexts(PYTHON)
    before = [variable.get_value() for variable in model.variables]
    faulty(step).inject(ZeroDivisionError(), run=len(step.plan.stages) - 2)
    with pytest.raises(ZeroDivisionError):
        model.train(step)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable.get_value())
    assert_close(model.train(step), expected['float64'], 1e-12)


def saturated(x, t, y, w):
    """Return losses that Theano computes without overflow, if it recognises them."""
    logits = T.dot(x, w)
    p, q = T.nnet.softmax(logits), T.nnet.sigmoid(logits)
    places = T.arange(y.shape[0])
    deep = T.nnet.softmax(T.dot(T.dot(x.dimshuffle(0, 'x', 1).flatten(2), w), T.eye(4)) * 2)
    return [-T.log(p)[places, y].mean(), -T.log(p[places, y]).mean(), -T.log(deep)[places, y].mean(),
            T.nnet.categorical_crossentropy(p, y).mean(), T.nnet.categorical_crossentropy(p, t).mean(),
            T.nnet.binary_crossentropy(q, t).mean(), -T.log(q).mean(), T.log(T.exp(logits).sum(axis=1)).mean(),
            -T.nnet.logsoftmax(logits)[places, y].sum()]


@pytest.mark.slow
def test_saturated_losses_are_as_finite_as_on_one_device(cpu2):
    """Theano finds log(softmax) and its gradient by their ops, which therefore have to stay in the graph."""
    x, t, y = T.dmatrix('x'), T.dmatrix('t'), T.lvector('y')
    rng = np.random.RandomState(0)
    w = theano.shared(rng.randn(6, 4) * 300, name='w')
    labels = rng.randint(0, 4, 11)
    losses = saturated(x, t, y, w)
    outputs = losses + [T.grad(loss, w) for loss in losses]
    mode = theano.Mode('py', 'fast_run').excluding('fusion', 'inplace')  # quicker: nothing is compiled
    expected = theano.function([x, t, y], outputs, mode=mode)(rng.randn(11, 6), np.eye(4)[labels], labels)
    rng = np.random.RandomState(0)
    rng.randn(6, 4), rng.randint(0, 4, 11)
    found = mgpu.function([x, t, y], outputs, mode=mode)(rng.randn(11, 6), np.eye(4)[labels], labels)
    for i, (ours, theirs) in enumerate(zip(found, expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=str(i))
