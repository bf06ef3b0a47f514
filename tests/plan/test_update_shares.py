"""`update_on='sharded'`: each context computes the update of a share of the parameters, with their state."""
import theano_mgpu as mgpu
from theano_mgpu.plan.planner import update_shares

import numpy as np
import pytest
import theano
import theano.tensor as T
from hypothesis import given
from hypothesis import strategies as st
from models import adam
from support.small_models import data, dense_model, momentum
from support.strategies import examples

pytestmark = [pytest.mark.opencl, pytest.mark.cuda(opencl='slow')]


def clipped_adam(gradients, params):
    """Return Adam's updates for gradients scaled to a norm of at most 0.1: each update needs all gradients."""
    norm = T.sqrt(sum(T.sqr(gradient).sum() for gradient in gradients))
    return adam([gradient * (np.float32(0.1) / T.maximum(norm, np.float32(0.1))) for gradient in gradients], params)


UPDATES = {'momentum': momentum, 'adam': adam, 'clipped_adam': clipped_adam}


def training(updates, update_on, **options):
    """Return a step over a new model, the shared variables that it updates, and the model; always the same one."""
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, UPDATES[updates], update_on=update_on,
                                  **options)
    return step, [each.variable for each in step.updated], model


def values(variables):
    return [np.array(variable.get_value()) for variable in variables]


@pytest.mark.parametrize('n,updates,options', [
    (2, 'adam', {}), (2, 'clipped_adam', {'micro_batches': 2}), (3, 'momentum', {'check_finite': True}),
    pytest.param(3, 'adam', {'executor': 'threads'}, marks=pytest.mark.slow)])
def test_it_is_the_update_on_each_context_bit_by_bit(contexts, kind, n, updates, options):
    names = [context.name for context in contexts(kind, n)]
    (one, variables, model), (other, others, _) = (
        training(updates, where, contexts=names, **options) for where in ('sharded', 'device'))
    for number, size in enumerate((11, 10, 1, 7, 2)):  # a batch of one sample stays on the first context
        batch = data(size, 7, seed=number)
        np.testing.assert_array_equal(one(*batch), other(*batch))
        if number == 2:  # a value that the user sets reaches its context
            for each in (variables, others):
                each[0].set_value(each[0].get_value() * np.float32(0.5))
    for name, mine, its in zip(map(str, variables), values(variables), values(others)):
        np.testing.assert_array_equal(mine, its, err_msg=name)
    assert not any(np.array_equal(a, b.get_value()) for a, b in zip(values(dense_model().params), model.params))


def test_each_state_is_on_one_context_alone(contexts, kind):
    two = contexts(kind, 2)
    step, _, model = training('adam', 'sharded')
    step(*data(8, 7))
    where = [list(each.copies) for each in step.updated if each.variable not in model.params and each.variable.ndim]
    assert len(where) == 8 and all(len(each) == 1 for each in where)
    assert {each[0] for each in where} == set(two)
    assert all(set(each.copies) == set(two) for each in step.updated if each.variable in model.params)


def test_each_context_is_sent_the_gradients_of_its_share(gpu2):
    with theano.configparser.change_flags(**{'mgpu.collectives': 'host'}):
        step, _, model = training('adam', 'sharded')
    step(*data(8, 7))
    (_, channel), = step.executable.exchanges.values()
    sent = [sum(channel._layout.counts[i] for i in channel._read_on[context]) for context in gpu2]
    n_parameters = sum(param.get_value().size for param in model.params)
    assert n_parameters <= sum(sent) < 1.1 * n_parameters and max(sent) < 0.7 * n_parameters


@pytest.mark.parametrize('saved,loaded', [('sharded', 'device'), ('device', 'sharded')])
def test_a_state_that_was_saved_by_one_is_continued_by_the_other(contexts, kind, tmp_path, saved, loaded):
    contexts(kind, 2)
    path = str(tmp_path / 'state.npz')
    batches = [data(9, 7, seed=number) for number in range(4)]
    whole, expected, _ = training('adam', 'device')
    for batch in batches:
        whole(*batch)
    first, _, _ = training('adam', saved)
    for batch in batches[:2]:
        first(*batch)
    first.save(path)
    second, variables, _ = training('adam', loaded)
    second.load(path)
    for batch in batches[2:]:
        second(*batch)
    for mine, its in zip(values(variables), values(expected)):
        np.testing.assert_array_equal(mine, its)


def test_an_error_changes_nothing(contexts, kind):
    contexts(kind, 2)
    step, variables, _ = training('adam', 'sharded', check_finite=True)
    step(*data(5, 7))
    before = values(variables)
    with pytest.raises(mgpu.NonFiniteError):
        step(np.full((3, 7), np.nan, 'float32'), data(3, 7)[1])
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.get_value(), value)


def test_shares():
    """Shares are in order, with about as many bytes each; parameters whose updates read each other stay together."""
    large, small, state, third, count = (
        theano.shared(np.zeros(shape, 'float32'), name) for name, shape in
        [('large', 100), ('small', 10), ('state', 100), ('third', 90), ('count', ())])
    new = {large: large - state, small: small + count, state: state * 2, third: third + 1, count: count + 1}
    common, shares = update_shares(list(new), new, 2)
    assert common == [count] and shares == [[large, state], [small, third]]
    assert update_shares(list(new), new, 1)[1] == [[large, state, small, third]]
    assert [len(share) for share in update_shares(list(new), new, 5)[1]] == [0, 2, 0, 1, 1]


@examples(100)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 4))
def test_each_variable_is_in_one_share(variables, n):
    """Each new value reads its variable, and maybe another one: then both are in one share."""
    params = [theano.shared(np.zeros(size, 'float32'), 'w%d' % i) for i, (size, _) in enumerate(variables)]
    read = [params[other] if other < len(params) else param for param, (_, other) in zip(params, variables)]
    common, shares = update_shares(params, {param: param + other.sum() for param, other in zip(params, read)}, n)
    assert not common and len(shares) == n
    assert sorted(map(str, sum(shares, []))) == sorted(map(str, params))
    number = {param: i for i, share in enumerate(shares) for param in share}
    assert [number[param] for param in params] == [number[other] for other in read]
    firsts = [min(map(params.index, share)) for share in shares if share]
    assert firsts == sorted(firsts)
