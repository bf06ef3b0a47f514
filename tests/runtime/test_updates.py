"""Updates that depend on more than the gradients, in `mgpu.training_function` and in plain Theano."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.small_models import data, dense_model
from support.updates_zoo import UPDATES, sgd, squares

BATCHES = [data(n, 7, seed=n, dtype='float64') for n in (9, 4, 1, 6)]


def states_of(updates, params):
    return params + [variable for variable in updates if variable not in params]


def trained(name, parallel=False, **options):
    """Train on some batches; return losses, and everything that is updated."""
    model, kept = dense_model(dtype='float64'), []
    labels = model.inputs[1]
    likely = model.probabilities[T.arange(labels.shape[0]), labels]  # Theano's op for it has no second derivative
    model.loss = .01 * squares(model.params) - T.log(likely).mean()

    def updates(gradients, params):
        kept.append(dict(UPDATES[name](gradients, params, model)))
        return kept[0]
    if parallel:
        step = mgpu.training_function(model.inputs, model.loss, model.params, updates, mode=PYTHON, **options)
        assert step.refused is None
    else:
        new = updates(T.grad(model.loss, model.params), model.params)
        step = theano.function(model.inputs, model.loss, updates=list(new.items()), mode=PYTHON)
    losses = [step(*batch) for batch in BATCHES]
    return losses + [variable.get_value() for variable in states_of(kept[0], model.params)]


def check(name, **options):
    for found, expected in zip(trained(name, True, **options), trained(name)):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow_but_with('rate_of_the_loss', 'slices')
@pytest.mark.parametrize('name', UPDATES)
def test_updates(name, cpu2):
    """Values derived from the gradients were zero, or an error: the gradients were no functions of the parameters."""
    check(name)


@pytest.mark.slow_but_with("rate_of_the_loss-{'update_on': 's*")
@pytest.mark.parametrize('options', [{'update_on': 'device', 'micro_batches': 2}, {'update_on': 'sharded'},
                                     {'check_finite': True}], ids=str)
@pytest.mark.parametrize('name', UPDATES)
def test_options(name, options, cpu2):
    check(name, **options)


@pytest.mark.slow
def test_gradients_of_single_samples(cpu2):
    """Such gradients are no rows of any divided value: the step runs whole, says so, and is exact."""
    found = []
    for parallel in (True, False):
        model = dense_model(dtype='float64')
        losses = T.nnet.categorical_crossentropy(model.probabilities, model.inputs[1])

        def updates(gradients, params, losses=losses):
            clipped = [T.jacobian(losses, p) for p in params]
            return sgd([T.clip(each, -.1, .1).mean(axis=0) for each in clipped], params)
        if parallel:
            with pytest.warns(mgpu.MgpuWarning, match='runs whole'):
                step = mgpu.training_function(model.inputs, model.loss, model.params, updates, mode=PYTHON)
        else:
            step = theano.function(model.inputs, model.loss, mode=PYTHON,
                                   updates=list(updates(T.grad(model.loss, model.params), model.params).items()))
        found.append([step(*batch) for batch in BATCHES] + [p.get_value() for p in model.params])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_data_set_that_updates_depend_on_is_no_state(cpu2, tmp_path):
    """A checkpoint would contain the data set."""
    inputs, labels = [theano.shared(array, name=name) for array, name in zip(data(20, 7, dtype='float64'), 'xt')]
    model, index = dense_model(dtype='float64'), T.lscalar()
    step = mgpu.training_function(
        [index], model.loss, model.params, lambda gradients, params: sgd(gradients, params, model.loss * .1),
        givens={model.inputs[0]: inputs[index * 9:index * 9 + 9], model.inputs[1]: labels[index * 9:index * 9 + 9]},
        mode=PYTHON)
    step(0)
    assert {each.variable for each in step.variables()} == set(model.params)
