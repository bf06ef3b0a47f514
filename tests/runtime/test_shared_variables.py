"""Bugs that were found and fixed, each under its symptom: shared variables and their copies on the contexts."""
import copy
import functools
import pickle
import threading

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from models import plain_step
from support.faulty_executor import faulty
from support.parameters import SLOW_ON_GPU
from support.small_models import data, dense_model, momentum
from theano.sandbox.rng_mrg import MRG_RandomStreams

pytestmark = pytest.mark.verified


def with_rate(update_on, seed=0):
    """Return a training function over two contexts, its model, and its learning rate in a shared variable."""
    model, rate = dense_model(seed), theano.shared(np.float32(0.1), 'rate')

    def sgd(gradients, params):
        return {param: param - rate * gradient for param, gradient in zip(params, gradients)}
    return mgpu.training_function(model.inputs, model.loss, model.params, sgd, update_on=update_on), model, rate


def schedule(model, rate, seen):
    """Yield batches; the learning rate is set and the weights are read before each."""
    for number in range(4):
        rate.set_value(np.float32(0.1 + 0.2 * number))
        seen.append(model.params[0].get_value())
        yield data(9, 7, seed=number)


@pytest.mark.slow
@pytest.mark.parametrize('update_on', ['device', 'host'])
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_learning_rate_that_is_set_by_the_generator_of_batches_counts_from_its_batch_on(contexts, kind, update_on):
    """The rate never reached the devices' copies, or counted one batch early, or for one replica only."""
    contexts(kind, 2)
    found = []
    for loop in (lambda step, batches: [float(step(*batch)) for batch in batches],
                 lambda step, batches: [float(loss) for loss in step.over(batches)]):
        (step, model, rate), seen = with_rate(update_on), []
        losses = loop(step, schedule(model, rate, seen))
        found.append((losses, seen, [param.get_value() for param in model.params]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1] + found[0][2], found[1][1] + found[1][2]):
        np.testing.assert_array_equal(one, other)


def test_a_generator_that_is_asked_ahead_may_not_touch_variables(contexts, gpu2):
    step, model, rate = with_rate('device')
    losses = step.over(schedule(model, rate, []), ahead=True)
    assert np.isfinite(next(losses))
    with pytest.raises(mgpu.MgpuError, match='rate was read or set by what prepares the next batch'):
        next(losses)
    assert np.isfinite(step(*data(9, 7)))


@pytest.mark.slow
@pytest.mark.unverified
@pytest.mark.parametrize('update_on', ['device', 'host'])
def test_a_value_that_another_thread_sets_within_a_step_counts_from_the_next_one_on(contexts, kind, update_on):
    contexts(kind, 2)
    (step, model, rate), (expected, reference, reference_rate) = with_rate(update_on), with_rate(update_on)
    setter = threading.Thread(target=rate.set_value, args=(np.float32(0.7),))

    def set_in_the_thread():
        setter.start()
        setter.join(0.3)
    undisturbed, executor = faulty(expected), faulty(step)
    expected(*data(9, 7))
    executor.inject(set_in_the_thread, run=undisturbed.runs - 1, replica=0)  # the update
    step(*data(9, 7))
    setter.join()
    reference_rate.set_value(np.float32(0.7))
    assert step(*data(8, 7)) == expected(*data(8, 7))
    assert step(*data(7, 7)) == expected(*data(7, 7))
    for param, other in zip(model.params, reference.params):
        np.testing.assert_array_equal(param.get_value(), other.get_value())


@pytest.mark.slow
@pytest.mark.parametrize('first', ['a function', 'a step'])
def test_a_function_that_updates_a_variable_waits_for_the_end_of_a_step(cpu2, first):
    """A function also waits if it was in use before the step was made: it knows of no lock then."""
    model = dense_model()
    double = theano.function([], [], updates=[(param, 2 * param) for param in model.params])

    def made():
        return mgpu.training_function(model.inputs, model.loss, model.params,
                                      lambda gradients, params: list(zip(params, gradients)))
    if first == 'a function':
        other = made()  # the variables are watched from now on
        other(*data(6, 7))
        double()
    step = made()
    thread = threading.Thread(target=double)
    with step.lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join()


@pytest.mark.slow
@SLOW_ON_GPU
def test_a_function_that_fails_after_it_has_updated_in_place_leaves_replicas_alike(contexts, kind):
    """The copies kept the former value, the variable had the new one."""
    contexts(kind, 2)
    found = []
    for training in (lambda *args: mgpu.training_function(*args, update_on='device'), None):
        model = dense_model()
        step = training(model.inputs, model.loss, model.params, momentum) if training else plain_step(model, momentum)
        w, table = model.params[1], T.fvector('table')
        place = T.cast((w + 1)[0], 'int64') + 10
        grow = theano.function([table], table[place], updates=[(w, w + 1)])
        step(*data(9, 7))
        with pytest.raises(IndexError):
            grow(np.zeros(3, 'float32'))
        found.append([float(step(*data(9, 7, seed=1))) for _ in range(2)] + [w.get_value()])
    np.testing.assert_allclose(found[0][:2], found[1][:2], rtol=1e-5)
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-5)


@pytest.mark.slow_with('cpu-1')
@pytest.mark.parametrize('micro_batches', [1, 2])
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_an_output_with_a_count_had_the_count_after_the_step(contexts, kind, micro_batches):
    """New values that do not depend on a sum over the batch were stored before the outputs were computed."""
    contexts(kind, 2)
    x, found = T.fmatrix('x'), []
    for make in (theano.function, lambda *args, **kwargs: mgpu.function(*args, micro_batches=micro_batches, **kwargs)):
        count, steps = theano.shared(np.int64(0)), theano.shared(np.ones((2, 2), 'float32'))
        f = make([x], [x.sum() + count, count, x.sum(axis=1).max() + steps, steps.sum()],
                 updates=[(count, count + x.shape[0]), (steps, steps * 2)], mode=theano.Mode(optimizer='fast_compile'))
        found.append([value for n in (7, 4) for value in f(data(n, 7)[0])])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def doors(function, variable):
    """Return ways to read a shared variable, beside its `get_value`: name -> callable."""
    def loaded(value):
        return pickle.loads(pickle.dumps(value))
    return {'f[v]': lambda: function[variable], 'f.value': lambda: function.value[variable],
            'f.container': lambda: function.container[variable].value,
            'f.input_storage': lambda: function.input_storage[-1].data,
            'container.value': lambda: variable.container.value, 'container.data': lambda: variable.container.data,
            'pickle': lambda: loaded(variable).get_value(), 'pickled function': lambda: loaded(function)[1],
            'copy': lambda: copy.copy(variable).get_value(), 'deepcopy': lambda: copy.deepcopy(variable).get_value(),
            'deepcopy of a function': lambda: copy.deepcopy(function)[1]}


@pytest.mark.slow_with('gpu')
def test_every_door_to_a_variable_has_its_value_and_sets_it(contexts, kind):
    """The containers of a function had the value of before the step; so had the results of pickle and deepcopy."""
    contexts(kind, 2)
    x, weights = T.fmatrix('x'), theano.shared(np.ones(7, 'float32'), 'w')
    step = mgpu.function([x], T.dot(x, weights), updates=[(weights, weights + x.sum(axis=0))])
    function = theano.function([x], T.dot(x, weights), mode='FAST_COMPILE')
    value, batch = np.ones(7, 'float32'), data(6, 7)[0]
    for name, read in doors(function, weights).items():  # each is the first one to read after a step
        np.testing.assert_allclose(step(batch), batch.dot(value), rtol=1e-4, atol=1e-4)
        value = value + batch.sum(axis=0)
        np.testing.assert_allclose(np.asarray(read()), value, rtol=1e-5, err_msg=name)
    value = np.arange(7).astype('float32')
    for place, name in ((function, weights), (function.value, weights), (function.container[weights], 'value'),
                        (weights.container, 'value'), (weights.container, 'data')):
        setattr(place, name, value) if isinstance(name, str) else place.__setitem__(name, value)
        np.testing.assert_allclose(step(batch), batch.dot(value), rtol=1e-4, atol=1e-4, err_msg=str((place, name)))


def by_product():
    x, w = T.dmatrix('x'), theano.shared(np.ones(3), 'w')
    loss = T.sqr(T.dot(x, w) - 1).mean()
    new = w - .1 * T.grad(loss, w)
    return theano.function([x], [loss, new], updates=[(w, new)], mode=IN_PLACE), w


def by_index():
    x, w = T.dmatrix('x'), theano.shared(np.ones(3), 'w')
    new = T.inc_subtensor(w[:2], T.dot(x, w)[:2])
    return theano.function([x], [T.exp(w).sum(), new], updates=[(w, new)], mode=IN_PLACE), w


def by_draws():
    x, streams = T.dmatrix('x'), MRG_RandomStreams(3)
    drawn = streams.uniform((2,))
    state, = (variable for variable in theano.gof.graph.ancestors([drawn]) if hasattr(variable, 'container'))
    return theano.function([x], [x.sum() + drawn], mode=IN_PLACE), state


def by_random_states():
    x, streams = T.dmatrix('x'), T.shared_randomstreams.RandomStreams(3)
    drawn = streams.uniform((2,))
    return theano.function([x], [x.sum() + drawn], mode=IN_PLACE), drawn.rng


IN_PLACE = theano.Mode(linker='vm', optimizer='fast_run')
COPIES = {'copy': lambda f, w: f.copy(), 'one memory': lambda f, w: f.copy(share_memory=True),
          "Python's copy": lambda f, w: copy.copy(f), 'copy of a copy': lambda f, w: f.copy().copy(),
          'swapped and back': lambda f, w: f.copy(swap={w: like(w)}).copy(swap={like(w): w})}


@functools.lru_cache(None)
def like(variable):
    return theano.shared(variable.get_value(), 'other')


def calls(f, variable):
    """Return the outputs of two calls, and the value of a shared variable after each."""
    return [np.append(np.concatenate([np.ravel(each) for each in f(BATCH)]), numbers(variable)) for _ in range(2)]


def numbers(variable):
    value = variable.get_value()
    return np.ravel(value.get_state()[1] if isinstance(value, np.random.RandomState) else value)


BATCH = np.arange(12.).reshape(4, 3) / 10
MODELS = [by_product, by_index, by_draws, by_random_states]


@pytest.mark.slow_with("Python's copy-by_product", 'copy-by_draws', 'copy of a copy-by_product', 'copy-by_index',
                       'copy-by_product')
@pytest.mark.parametrize('make', MODELS)
@pytest.mark.parametrize('way', COPIES)
def test_copies_of_functions_that_work_in_place(make, way):
    """The copy ran its ops in an order in which some read what others had overwritten."""
    expected = calls(*make())
    f, variable = make()
    np.testing.assert_array_equal(calls(COPIES[way](f, variable), variable), expected)


@pytest.mark.parametrize('make', MODELS)
@pytest.mark.parametrize('way', ['copy', 'one memory', 'copy of a copy'])
def test_a_copy_without_updates_of_a_function_that_works_in_place(make, way):
    """It wrote the new values into the memory of the variables all the same."""
    f, variable = make()
    before = numbers(variable).copy()
    g = COPIES[way](f, variable).copy(share_memory=way == 'one memory', delete_updates=True)
    first, second = calls(g, variable)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(numbers(variable), before)
    np.testing.assert_array_equal(first[:-before.size], calls(f, variable)[0][:-before.size])


def test_a_copy_of_a_function_with_a_state_that_works_in_place():
    """The default of an input with an update grew in each call of a copy without updates."""
    s = T.dvector('s')
    f = theano.function([theano.In(s, value=np.ones(3), update=s * 2)], [s * 2], mode=IN_PLACE)
    g = f.copy(delete_updates=True)
    for _ in range(2):
        np.testing.assert_array_equal(g(np.ones(3))[0], [2, 2, 2])


@pytest.mark.cuda
def test_devices_read_the_last_value_of_a_state_with_samples_along_its_second_axis(gpu2):
    """Each replica reads such a state whole. The step stored it on the host, and devices kept the value before."""
    x, h = T.fmatrix('x'), theano.shared(np.zeros((3, 5), 'float32'), 'h')
    step = mgpu.function([x], x + h.T, updates=[(h, (x + h.T).T)], mode=theano.Mode('cvm', 'fast_compile'))
    rows = np.arange(15, dtype='float32').reshape(5, 3)
    for n in (1, 2, 3):
        np.testing.assert_array_equal(step(rows), n * rows)
    np.testing.assert_array_equal(h.get_value(), 3 * rows.T)
