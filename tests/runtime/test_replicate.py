"""The user's own shared variables stay the truth."""
import copy
import pickle
import threading

import theano_mgpu as mgpu
from theano_mgpu.devices import shared_variables
from theano_mgpu.runtime.replicas.replicated import replicated

import numpy as np
import pytest
import theano
import theano.tensor as T
from models import plain_step
from support.devices import context_map
from support.small_models import data, dense_model, momentum, shared


@pytest.fixture(params=['cpu', 'gpu'], scope='module')
def trained(request):
    """Return a step over two contexts, and a plain one from the same start; both have trained a little."""
    mgpu.init(context_map(request.param, 2))
    x, labels = data(11, 7)
    reference, model = dense_model(), dense_model()
    plain = plain_step(reference, momentum)
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    for _ in range(3):
        plain(x, labels)
        step(x, labels)
    return model, step, reference, plain, x, labels


def same(model, reference):
    for p, q in zip(model.params, reference.params):
        np.testing.assert_allclose(p.get_value(), q.get_value(), rtol=2e-5, atol=1e-6, err_msg=str(p))


def both(trained):
    """Run one more step of both, and check that they agree."""
    model, step, reference, plain, x, labels = trained
    np.testing.assert_allclose(step(x, labels), plain(x, labels), rtol=1e-5)
    same(model, reference)


@pytest.mark.slow_with('cpu')
def test_set_value_reaches_every_replica(trained):
    model, _, reference, *_ = trained
    for params in (model.params, reference.params):
        params[0].set_value(params[0].get_value() * 0 + 0.3)
        params[2].set_value(params[2].get_value() * 0.5, borrow=True)
    both(trained)


def test_zero_reaches_every_replica(trained):
    model, _, reference, *_ = trained
    for params in (model.params, reference.params):
        params[1].zero()
    both(trained)


def test_other_functions_see_current_values_and_their_updates_reach_the_replicas(trained):
    model, step, reference, plain, x, labels = trained
    step(x, labels), plain(x, labels)
    for m in (model, reference):
        m.predicted = theano.function(m.inputs[:1], m.probabilities)(x)
        theano.function([], [], updates=[(m.params[0], m.params[0] * np.float32(0.9))])()
    np.testing.assert_allclose(model.predicted, reference.predicted, rtol=1e-5)
    both(trained)


def test_a_function_compiled_before_sees_current_values():
    mgpu.init('host0->cpu;host1->cpu')
    model = dense_model()
    x, labels = data(6, 7)
    w = theano.function([], model.params[0] * 1)
    before = w()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    step(x, labels)
    assert abs(w() - before).max() > 0
    np.testing.assert_array_equal(w(), model.params[0].get_value())


def test_without_the_hooks_values_are_stale(trained, monkeypatch):
    """The patches of SharedVariable and Function prevent this."""
    model, step, _, plain, x, labels = trained
    if step.contexts[0].kind == 'cpu':
        pytest.skip("the variable is the master's own replica: nothing can be stale")
    function = theano.function([], model.params[0] * 1)
    stale = model.params[0].get_value()
    step(x, labels), plain(x, labels)
    with monkeypatch.context() as patch:
        patch.setattr(shared_variables, '_watchers', {})  # nothing public takes the hooks away
        np.testing.assert_array_equal(model.params[0].get_value(), stale)
        np.testing.assert_array_equal(function(), stale)
    assert abs(function() - stale).max() > 0


def test_two_functions_share_the_replicas(trained):
    model, step, reference, plain, x, labels = trained
    predict = mgpu.function(model.inputs[:1], model.probabilities)
    expected = theano.function(reference.inputs[:1], reference.probabilities)
    for _ in range(2):
        both(trained)
        np.testing.assert_allclose(predict(x), expected(x), rtol=1e-5)
    evaluator = [r for r in predict.built.alike if r.variable is model.params[0]][0]
    assert evaluator in step.built.alike


@pytest.mark.slow
@pytest.mark.opencl
def test_functions_over_different_contexts_see_each_others_steps(contexts):
    contexts('gpu', 2)
    model, reference = dense_model(), dense_model()
    x, labels = data(10, 7)
    plain = plain_step(reference, momentum_without_state)
    steps = [mgpu.training_function(model.inputs, model.loss, model.params, momentum_without_state, contexts=names)
             for names in (['dev0', 'dev1'], ['dev1'], ['dev0'])]
    for step in steps * 2:
        np.testing.assert_allclose(step(x, labels), plain(x, labels), rtol=1e-5)
    same(model, reference)


def momentum_without_state(gradients, params):
    return {p: p - np.float32(0.1) * g for p, g in zip(params, gradients)}


def test_variables_can_be_copied_and_pickled(trained):
    both(trained)
    w = trained[0].params[0]
    for other in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
        np.testing.assert_array_equal(other.get_value(), w.get_value())
        other.set_value(w.get_value() * 2)
    both(trained)


@pytest.mark.slow
@pytest.mark.opencl
def test_a_variable_of_the_users_on_a_gpu(contexts):
    """The variable lies on the second context; the graph is replicated all the same."""
    gpus = contexts('gpu', 2)
    values = np.random.RandomState(0).randn(7, 4).astype('float32')
    x, samples = T.fmatrix('x'), data(9, 7)[0]
    w, reference = theano.shared(values, name='w', target=gpus[1].name), shared(values, 'w')
    trained = []
    for variable in (w, reference):
        loss = (T.tanh(T.dot(x, variable)) ** 2).mean()
        if variable is w:
            step = mgpu.training_function([x], loss, [w], lambda g: {w: w - np.float32(0.5) * g[0]})
        else:
            step = theano.function([x], loss, updates=[(reference, reference - np.float32(0.5) *
                                                        theano.grad(loss, reference))])
        trained.append([float(step(samples)) for _ in range(4)])
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5)
    np.testing.assert_allclose(w.get_value(), reference.get_value(), rtol=1e-5, atol=1e-6)
    w.set_value(values)
    assert abs(float(step(samples))) > 0


def test_copies_that_another_thread_computes_with_are_not_freed(gpu2):
    """A step over the variable, of another function, is under way there."""
    w, x = theano.shared(np.ones((3, 2), 'float32')), T.matrix()
    first, second = [mgpu.function([x], T.dot(x, w).sum() + number) for number in range(2)]
    batch, replica = np.ones((4, 3), 'float32'), replicated(w)
    assert first(batch) == 24 and second(batch) == 25
    taken, may_end = threading.Event(), threading.Event()

    def step():
        with second.lock:
            taken.set()
            may_end.wait()
    thread = threading.Thread(target=step)
    thread.start()
    taken.wait()

    def sizes():
        return [copy.container.storage[0].size for copy in replica.copies.values()]
    replica.evict()
    assert sizes() == [6, 6]
    may_end.set()
    thread.join()
    replica.evict()
    assert sizes() == [0, 0] and first(batch) == 24 and sizes() == [6, 6]
