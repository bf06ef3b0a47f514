"""`mgpu.training_function`: outputs, updates, errors, saved state."""
import functools
import os
import re

import theano_mgpu as mgpu
from theano_mgpu.errors import GraphError, NonFiniteError, ReplicaError

import numpy as np
import pytest
import theano
import theano.tensor as T
from models import adam, plain_step
from support.comparison import note_of
from support.faulty_executor import faulty
from support.parameters import SLOW_ON_GPU
from support.small_models import (
    data,
    dense_model,
    host_indexing,
    largest_relative_difference,
    momentum,
    update_of,
)
from theano.sandbox.rng_mrg import MRG_RandomStreams

pytestmark = pytest.mark.verified
X, LABELS = data(11, 7)


def sgd(loss_or_gradients, params, learning_rate):
    """Return the updates of gradient descent, with the signature of lasagne.updates.sgd."""
    return {p: p - np.asarray(learning_rate, p.dtype) * g for p, g in zip(params, loss_or_gradients)}


def values(model):
    return [p.get_value() for p in model.params]


def make_step(model, updates=momentum, **kwargs):
    return mgpu.training_function(model.inputs, model.loss, model.params, updates, **kwargs)


@pytest.mark.cuda(opencl='slow')
def test_outputs_are_gathered_or_reduced_as_told(contexts, kind):
    contexts(kind, 2)
    model = dense_model()
    expected = theano.function(model.inputs, [model.loss, model.probabilities, model.accuracy])(X, LABELS)
    step = make_step(model, outputs=[model.probabilities, (model.accuracy, 'mean')], micro_batches=2)
    for ours, theirs in zip(step(X, LABELS), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    with pytest.raises(GraphError, match='has no rows of single samples, and cannot be reduced by .gather.'):
        make_step(model, outputs=[(model.accuracy, 'gather')])


@pytest.mark.slow_but_with('<lambda>1')
@pytest.mark.parametrize('updates', [
    lambda gradients: sgd(gradients, PARAMS, 0.1),
    lambda gradients, params: list(sgd(gradients, params, 0.1).items()),
    functools.partial(sgd, learning_rate=0.1),
])
def test_kinds_of_updates(cpu2, updates):
    model, reference = dense_model(), dense_model()
    PARAMS[:] = model.params
    plain_step(reference, functools.partial(sgd, learning_rate=0.1))(X, LABELS)
    make_step(model, updates)(X, LABELS)
    assert largest_relative_difference(model, reference) < 1e-6


PARAMS = []


@pytest.mark.slow
def test_updates_may_depend_on_the_batch(cpu2):
    """The rate is the inverse of the largest input; the results are the same as in plain Theano."""
    model, reference = dense_model(), dense_model()

    def updates(of):
        return lambda gradients, params: {p: p - g / abs(of.inputs[0]).max() for p, g in zip(params, gradients)}
    plain_step(reference, updates(reference))(X, LABELS)
    make_step(model, updates(model))(X, LABELS)
    assert largest_relative_difference(model, reference) < 1e-6


@pytest.mark.slow
def test_a_sum_loss(cpu2):
    """No option is needed: sums over samples are added, and terms without samples count once."""
    model, reference = dense_model(), dense_model()
    for m in (model, reference):
        m.loss = T.nnet.categorical_crossentropy(m.probabilities, m.inputs[1]).sum() + (m.params[0] ** 2).sum()
    losses = [plain_step(reference, momentum)(X, LABELS), make_step(model)(X, LABELS)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert largest_relative_difference(model, reference) < 1e-5


@pytest.mark.parametrize('make,message', [
    (lambda m: (m.probabilities, m.params, momentum), 'the loss must be a scalar.*loss.mean()'),
    (lambda m: (m.loss, [], momentum), 'params is empty'),
    (lambda m: (m.loss, m.params + [theano.shared(np.zeros(2, 'float32'), name='other')], momentum),
     'does not depend on the parameter other; its shared variables are: .*w1'),
    (lambda m: (m.loss, m.params, sgd), r"functools.partial\(sgd, learning_rate=...\)"),
    (lambda m: (m.loss, m.params, lambda g: {m.params[0]: m.params[0] + T.fscalar('z')}), 'the graph needs .*z'),
    (lambda m: (m.loss, m.params, lambda g: {T.fmatrix('z'): g[0]}), 'no shared variable'),
    (lambda m: (m.loss, m.params, lambda g: {m.params[0]: T.cast(m.params[0], 'float64') * 1.1}), 'new value of w1'),
    (lambda m: (m.loss, m.params, lambda g: [(m.params[0], g[0]), (m.params[0], g[0])]), 'two new values'),
])
def test_steps_that_cannot_be_made(cpu2, make, message):
    model = dense_model()
    with pytest.raises(GraphError, match=message):
        mgpu.training_function(model.inputs, *make(model))


def test_batch_updates_of_another_type(cpu2):
    model, count, zero = dense_model(), theano.shared(np.int64(0), name='count'), theano.shared(np.ones(3), 'zero')
    with pytest.raises(GraphError, match='the new value of count has type .*float64.* not .*int64.*: cast it'):
        make_step(model, batch_updates={count: count + 0.5})
    make_step(model, batch_updates={zero: np.zeros(3)}, mode='FAST_COMPILE')(X, LABELS)
    np.testing.assert_array_equal(zero.get_value(), 0)


def test_wrong_options(cpu2):
    model = dense_model()
    for wrong in (0, 1.5, -1):
        with pytest.raises(GraphError, match='micro_batches is a number of slices'):
            make_step(model, micro_batches=wrong)


@pytest.mark.slow_with('True-cpu')
@SLOW_ON_GPU
@pytest.mark.parametrize('check', [True, False])
def test_a_loss_that_is_not_finite(contexts, kind, check):
    contexts(kind, 2)
    model = dense_model()
    step = make_step(model, check_finite=check)
    step(X, LABELS)
    before, bad = values(model), X.copy()
    bad[9] = np.nan
    if check:
        with pytest.raises(NonFiniteError, match='the loss is not finite .*no parameter was changed'):
            step(bad, LABELS)
        for value, old in zip(values(model), before):
            np.testing.assert_array_equal(value, old)
        assert np.isfinite(step(X, LABELS))
    else:
        assert np.isnan(step(bad, LABELS))


@pytest.mark.slow
@pytest.mark.parametrize('kind,executor', [('cpu', 'serial'), ('cpu', 'threads'), ('gpu', 'threads')])
def test_after_an_error_in_a_replica_the_step_can_be_repeated(contexts, kind, executor):
    """The error names replica, context and samples; the random streams of dropout, too, are as before."""
    active = contexts(kind, 2)

    def make():
        model = dense_model()
        mask = MRG_RandomStreams(3).binomial(model.inputs[0].shape, p=0.5, dtype='float32')
        table = theano.shared(np.ones((4, 1), 'float32'), broadcastable=(False, True), name='table')
        loss = theano.clone(model.loss, {model.inputs[0]: model.inputs[0] * mask * table[model.inputs[1]]})
        return model, mgpu.training_function(model.inputs, loss, model.params, adam, executor=executor,
                                             mode=host_indexing(), micro_batches=2)

    (model, step), (reference, undisturbed) = make(), make()
    bad = LABELS.copy()
    bad[10] = 77
    for _ in range(2):
        step(X, LABELS), undisturbed(X, LABELS)
        before = values(model)
        with pytest.raises(IndexError, match='index 77 is out of bounds|out of bounds') as caught:
            step(X, bad)
        assert re.match(r'replica 1 \(context %s->%s, samples \d to 10\) failed, nothing was changed' % (
            active[1].name, active[1].device), note_of(caught.value))
        for value, old in zip(values(model), before):
            np.testing.assert_array_equal(value, old)
    np.testing.assert_array_equal(step(X, LABELS), undisturbed(X, LABELS))
    for ours, theirs in zip(values(model), values(reference)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize('executor', ['serial', 'threads'])
@pytest.mark.parametrize('run', [0, -1], ids=['stage', 'update'])
def test_ctrl_c_in_a_replica_changes_nothing(run, executor, cpu2):
    (model, step), (reference, undisturbed) = [
        (made, make_step(made, adam, update_on='device', executor=executor)) for made in (dense_model(), dense_model())]
    step(X, LABELS), undisturbed(X, LABELS)  # the first step is computed on one device, too
    faults = faulty(step)
    step(X, LABELS), undisturbed(X, LABELS)
    before = values(model)
    faults.inject(KeyboardInterrupt(), run=run, replica=1)
    with pytest.raises(KeyboardInterrupt):
        step(X, LABELS)
    assert faults.struck == 1
    for value, old in zip(values(model), before):
        np.testing.assert_array_equal(value, old)
    np.testing.assert_array_equal(step(X, LABELS), undisturbed(X, LABELS))
    for ours, theirs in zip(values(model), values(reference)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.cuda
def test_after_an_error_in_the_update_of_one_context_all_are_as_before(contexts, kind):
    """A device that runs out of memory in the update cannot be provoked here: the executor raises."""
    contexts(kind, 2)
    model = dense_model()
    step = make_step(model, adam, update_on='device', micro_batches=1)
    step(X, LABELS)
    executor = faulty(step)
    step(X, LABELS)
    before = values(model)
    executor.inject(MemoryError('out of memory'), run=-1, replica=1)
    with pytest.raises(MemoryError if kind == 'cpu' else ReplicaError) as caught:
        step(X, LABELS)
    assert re.match('replica 1 .*update. failed, nothing was changed', note_of(caught.value))
    for value, old in zip(values(model), before):
        np.testing.assert_array_equal(value, old)
    for replicated in update_of(step).variables:
        held = [np.asarray(r.container.storage[0]) for r in replicated.copies.values()]
        np.testing.assert_array_equal(*held)


@pytest.mark.unverified
def test_bad_batches_change_nothing(cpu2):
    model = dense_model()
    step = make_step(model)
    before = values(model)
    for arguments in ((X, LABELS[:-1]), (X[:0], LABELS[:0]), (X[:, :3], LABELS)):
        with pytest.raises(ValueError):
            step(*arguments)
    for value, old in zip(values(model), before):
        np.testing.assert_array_equal(value, old)


def dropout_step(seed):
    model = dense_model(seed)
    mask = MRG_RandomStreams(3).binomial(model.inputs[0].shape, p=0.5, dtype='float32')
    loss = theano.clone(model.loss, {model.inputs[0]: model.inputs[0] * mask})
    return model, mgpu.training_function(model.inputs, loss, model.params, adam)


@pytest.mark.cuda(opencl='slow')
def test_a_loaded_state_goes_on_where_it_stopped(contexts, kind, tmp_path):
    """The state consists of parameters, Adam's state, and the random stream."""
    contexts(kind, 2)
    path = str(tmp_path / 'state.npz')
    model, step = dropout_step(0)
    for n in (11, 1, 7):  # a batch of one sample leaves the second context without one
        step(X[:n], LABELS[:n])
    step.save(path)
    expected = [float(step(X, LABELS)) for _ in range(3)]
    other, resumed = dropout_step(1)
    resumed(X[:1], LABELS[:1])
    resumed.load(path)
    assert [float(resumed(X, LABELS)) for _ in range(3)] == expected
    for ours, theirs in zip(values(other), values(model)):
        np.testing.assert_array_equal(ours, theirs)
    assert os.listdir(str(tmp_path)) == ['state.npz'], 'a temporary file was left'


@pytest.mark.slow
@pytest.mark.parametrize('n, other_n', [(2, 3), (2, 1), (1, 2)])
def test_a_state_moves_to_another_number_of_contexts(contexts, tmp_path, n, other_n):
    path = str(tmp_path / 'state.npz')
    contexts('cpu', n)
    model, step = dropout_step(0)
    step(X, LABELS)
    step.save(path)
    expected = float(step(X, LABELS))
    contexts('cpu', other_n)
    other, resumed = dropout_step(1)
    resumed.load(path)
    np.testing.assert_allclose(resumed(X, LABELS), expected, rtol=1e-5)
    assert largest_relative_difference(other, model) < 1e-5


def test_a_state_of_another_model_cannot_be_loaded(cpu2, tmp_path):
    """Other files are in tests/runtime/test_damaged_checkpoints.py."""
    path, other = str(tmp_path / 'state.npz'), dense_model(hidden=5)
    make_step(dense_model()).save(path)
    before = values(other)
    with pytest.raises(ValueError, match='holds the variables .*v.w1.*but this function has .*adam'):
        make_step(dense_model(), adam).load(path)
    with pytest.raises(ValueError, match=r'holds w1 with shape \(7, 9\) .*but this function has shape \(7, 5\)'):
        make_step(other).load(path)
    for value, old in zip(values(other), before):
        np.testing.assert_array_equal(value, old)
