"""Arguments go to devices, and gradients come back, in few copies; a caller's arrays never change."""
import theano_mgpu as mgpu
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.comm.host_sum import describe
from theano_mgpu.devices.context_map import Context
from theano_mgpu.devices.launcher import Launcher, Shard
from theano_mgpu.exchange.host import HostChannel
from theano_mgpu.exchange.layout import SMALL, Layout, blocks_of
from theano_mgpu.exchange.memory import Memories
from theano_mgpu.exchange.orders import AnyOrder
from theano_mgpu.runtime import compiler
from theano_mgpu.runtime.batch import Split
from theano_mgpu.utils.executors import make_executor
from theano_mgpu.utils.timeline import Timings

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.sending import Sender
from support.small_models import batches, data, dense_model, largest_relative_difference, momentum, update_of


def compiled(context, inputs, outputs):
    return compiler.compile_for(context, inputs, outputs, {}, {})


def run(f, *arguments):
    return [np.asarray(output) for output in f(*Sender(f).send(list(arguments)))]


def test_nothing_is_copied_for_a_cpu_context(cpu2):
    x = T.fmatrix('x')
    f = compiled(cpu2[0], [x], [x * 2])
    arguments = [np.ones((2, 3), 'float32')]
    assert Sender(f).send(arguments)[0] is arguments[0]


@pytest.mark.slow
def test_floating_arrays_go_to_the_device_and_come_back(gpu2):
    x, labels, rate = T.fmatrix('x'), T.ivector('labels'), T.fscalar('rate')
    f = compiled(gpu2[0], [x, labels, rate], [x * rate, labels + 1])
    assert f.mgpu_takes == [True, False, False]
    values = np.arange(6, dtype='float32').reshape(2, 3)
    for given in (values, values.T, values[:, ::2]):  # in any memory order
        doubled, more = run(f, given, np.arange(3, dtype='int32'), np.array(2, 'float32'))
        np.testing.assert_array_equal(doubled, given * 2)
    np.testing.assert_array_equal(more, [1, 2, 3])


def test_what_the_host_needs_stays_on_the_host(gpu2):
    """An input that only ops without a GPU version use is not sent to the device, and read back."""
    x, y = T.fmatrix('x'), T.fmatrix('y')
    f = compiled(gpu2[0], [x, y], [T.sort(x, axis=1), T.sort(y, axis=1) + y])
    assert f.mgpu_takes == [False, False]
    values = np.array([[3, 1, 2]], 'float32')
    np.testing.assert_array_equal(run(f, values, values), [[[1, 2, 3]], [[4, 3, 5]]])
    np.testing.assert_array_equal(values, [[3, 1, 2]])


def test_work_in_place_on_the_host_spares_what_the_caller_gave(gpu2):
    """An op without a GPU version has a copy of its own to work in where plain Theano would fetch one."""
    x = T.fmatrix('x')
    f = compiled(gpu2[0], [x], [T.erfinv(x)])
    if f.mgpu_takes[0]:
        pytest.skip('erfinv runs on %s' % gpu2[0].device)
    values = np.full((2, 3), 0.5, 'float32')
    np.testing.assert_allclose(run(f, values)[0], 0.4769363, rtol=1e-5)
    np.testing.assert_array_equal(values, 0.5)


@pytest.mark.slow
def test_results_of_former_calls_do_not_change(gpu2):
    """No output shares memory with a buffer that the next calls are sent in."""
    x = T.fmatrix('x')
    f = compiled(gpu2[0], [x], [x, x * 2, x.reshape((3, 2)), T.inc_subtensor(x[0], 1)])
    sender = Sender(f)
    first = f(*sender.send([np.ones((2, 3), 'float32')]))
    before = [np.array(output) for output in first]
    for number in range(4):
        f(*sender.send([np.full((2, 3), number + 5, 'float32')]))
    for output, value in zip(first, before):
        np.testing.assert_array_equal(np.asarray(output), value)


@pytest.mark.slow
def test_arrays_are_fetched_whatever_their_size_and_order(gpu2):
    x, y = T.fmatrix('x'), T.fvector('y')
    f = compiled(gpu2[0], [x, y], [x.T, y, x + 1, y.sum(), y * 2, x * 2])
    sender, memories = Sender(f), Memories()
    for n in (3, 3, SMALL, 5):
        values = np.arange(2 * n, dtype='float32').reshape(2, n), np.arange(4, dtype='float32')
        expected = [values[0].T, values[1], values[0] + 1, np.float32(6), values[1] * 2, values[0] * 2]
        for limit in (1 << 30, 5000):  # bytes of a block
            outputs = f(*sender.send(list(values)))
            outputs[1] = values[1]  # an op without a GPU version may have left it on the host
            layout = Layout(describe(outputs))
            blocks, here = blocks_of(layout, limit), layout.allocated(np.zeros)
            fetcher = memories.fetcher(gpu2[0], layout, blocks, here)
            fetcher.start(outputs)
            for number in range(len(blocks)):
                fetcher.arrive(number)
            for i, value in enumerate(expected):
                np.testing.assert_array_equal(here.views[i], value)


@pytest.mark.cuda
def test_sums_are_sent_in_one_copy_and_stay_those_of_their_step(gpu2):
    """The sums are arguments of a function on the device, again and again."""
    x, y = T.fmatrix('x'), T.fvector('y')
    f = compiled(gpu2[0], [x, y], [x * 2, y + 1])
    memories, launcher = Memories(), Launcher(make_executor('serial', 2), Timings())
    order = AnyOrder(memories, launcher)
    channel = HostChannel(order, (), {gpu2[0]: [0, 1]}, memories, launcher, Timings(), Communicator())
    for number in (1, 2):
        rounds = [[Shard(0, (0, 1)), Shard(1, (1, 2))], [Shard(0, (2, 3))]]
        host = [Context('host', 'cpu', 'cpu')]  # has the parts
        split = Split(sum(rounds, []), rounds, 3, [3], False, None, None, None, (), ())
        order.add(split, 0, host * 2, [[np.full((2, 3), number, 'f4'), np.full(2, number, 'f4')]] * 2)
        channel.prepare(order.add(split, 1, host, [[np.ones((2, 3), 'f4'), np.ones(2, 'f4')]]))
        doubled, more = f(*[value.on(gpu2[0]) for value in channel.taken()])
        total = 2 * number + 1
        assert np.asarray(doubled).tolist() == [[2 * total] * 3] * 2 and np.asarray(more).tolist() == [total + 1] * 2


def plain(model):
    updates = momentum(theano.grad(model.loss, model.params), model.params)
    return theano.function(model.inputs, model.loss, updates=list(updates.items()))


def states(step):
    return [np.array(variable.variable.get_value()) for variable in step.updated]


@pytest.mark.slow_but_with('cpu-1')
@pytest.mark.parametrize('kind, n', [(kind, n) for kind in ('cpu', 'gpu') for n in (1, 2, 3)])
def test_an_update_on_the_host_is_that_of_one_device(contexts, kind, n):
    model, reference = dense_model(), dense_model()
    names = [context.name for context in contexts(kind, n)]
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, update_on='host', contexts=names)
    on_device = dense_model()
    other = mgpu.training_function(on_device.inputs, on_device.loss, on_device.params, momentum, update_on='device',
                                   contexts=names)
    expected = plain(reference)
    for number in range(8):
        batch = data(11 - number, 7, seed=number)
        np.testing.assert_allclose(step(*batch), expected(*batch), rtol=1e-5)
        other(*batch)
        if number == 3:  # a value that the user sets reaches the contexts
            for each in (model, reference, on_device):
                each.params[0].set_value(each.params[0].get_value() * 0.5)
    assert largest_relative_difference(model, reference) < 1e-5
    for one, two in zip(states(step), states(other)):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_the_state_of_an_update_on_the_host_is_there_alone(gpu2):
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, update_on='host')
    step(*data(5, 7))
    moments = [variable for variable in step.updated if variable.variable not in model.params]
    assert len(moments) == 4
    for variable in moments:
        assert list(variable.copies.values()) == [variable.variable]


def scaled_by_the_largest(gradients, params):
    """Return updates with an op that falls to the host on OpenCL: it needs the gradients there."""
    return {param: param - np.float32(0.1) * gradient / (abs(gradient).max(axis=0, keepdims=True) + 1)
            for param, gradient in zip(params, gradients)}


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=[pytest.mark.opencl, pytest.mark.slow])])
@pytest.mark.parametrize('n', [1, 2])
def test_an_update_that_needs_gradients_on_the_host(contexts, kind, n):
    model, reference = dense_model(), dense_model()
    contexts(kind, n)
    step = mgpu.training_function(model.inputs, model.loss, model.params, scaled_by_the_largest)
    updates = scaled_by_the_largest(theano.grad(reference.loss, reference.params), reference.params)
    expected = theano.function(reference.inputs, reference.loss, updates=list(updates.items()))
    for number in range(3):
        batch = data(7, 7, seed=number)
        np.testing.assert_allclose(step(*batch), expected(*batch), rtol=1e-5)
    assert largest_relative_difference(model, reference) < 1e-5


def test_where_the_update_is_by_default(contexts, kind):
    model = dense_model()
    contexts(kind, 2)
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, mode='FAST_COMPILE')
    assert len(update_of(step).functions) == (2 if kind == 'gpu' else 1)


def test_an_error_in_an_update_on_the_host_changes_nothing(cpu2):
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, update_on='host', check_finite=True)
    step(*data(5, 7))
    before = [param.get_value() for param in model.params]
    with pytest.raises(mgpu.NonFiniteError):
        step(np.full((3, 7), np.nan, 'float32'), data(3, 7)[1])
    for param, value in zip(model.params, before):
        np.testing.assert_array_equal(param.get_value(), value)


def test_update_on_is_one_of_four_values(cpu2):
    model = dense_model()
    with pytest.raises(mgpu.GraphError, match="update_on is 'auto', 'device', 'sharded' or 'host', not 'disk'"):
        mgpu.training_function(model.inputs, model.loss, model.params, momentum, update_on='disk')


@pytest.mark.cuda
def test_blocks_are_added_while_others_are_fetched(gpu2, monkeypatch):
    """Many small blocks give the same sums as one."""
    monkeypatch.setattr(Memories, 'block', 64)
    monkeypatch.setattr(theano.config.mgpu, 'collectives', 'host')
    model, reference = dense_model(), dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    expected = plain(reference)
    for number in range(4):
        batch = data(9, 7, seed=number)
        step(*batch)
        expected(*batch)
    assert largest_relative_difference(model, reference) < 1e-5
    (_, channel), = step.executable.exchanges.values()
    assert len(channel._blocks) > 2


def trained(step, model, x, labels, loop):
    losses = [float(loss) for loss in loop(step, [(x[part], labels[part]) for part in batches(len(x), 6)])]
    return losses, [param.get_value() for param in model.params]


@pytest.mark.cuda
@pytest.mark.parametrize('micro_batches', [1, 3])
def test_batches_that_are_sent_ahead_give_the_same(contexts, kind, micro_batches):
    contexts(kind, 2)
    x, labels = data(40, 7)
    found = []
    for loop in (lambda step, all_: [step(*batch) for batch in all_], lambda step, all_: list(step.over(all_))):
        model = dense_model()
        step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, micro_batches=micro_batches)
        found.append(trained(step, model, x, labels, loop))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1]):
        np.testing.assert_array_equal(one, other)


def test_the_next_batch_is_taken_while_one_is_computed(gpu2):
    model, taken = dense_model(), []

    def batch_stream():
        for number in range(3):
            taken.append(number)
            yield data(6, 7, seed=number)

    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    assert [len(taken) for _ in step.over(batch_stream(), ahead=True)] == [2, 3, 3]
    taken.clear()
    assert [len(taken) for _ in step.over(batch_stream())] == [1, 2, 3]


@pytest.mark.slow_with('gpu')
def test_a_bad_next_batch_leaves_this_step_alone(contexts, kind):
    contexts(kind, 2)
    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    x, labels = data(6, 7)
    losses = step.over([(x, labels), (x, labels[:3])])
    assert np.isfinite(next(losses))
    trained_once = model.params[0].get_value()
    with pytest.raises(mgpu.BatchError, match='different lengths'):
        next(losses)
    np.testing.assert_array_equal(model.params[0].get_value(), trained_once)


def test_an_error_of_the_source_comes_with_its_own_turn(gpu2):
    def broken():
        yield data(6, 7)
        raise OSError('the disk is gone')

    model = dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    losses = step.over(broken(), ahead=True)
    assert np.isfinite(next(losses))
    with pytest.raises(OSError, match='the disk is gone'):
        next(losses)


def test_other_arguments_than_those_sent_ahead_are_taken(gpu2):
    model, reference = dense_model(), dense_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum)
    expected = plain(reference)
    with step.look_ahead.asking(lambda: data(6, 7, seed=99)):
        for number in range(3):
            batch = data(6, 7, seed=number)
            np.testing.assert_allclose(step(*batch), expected(*batch), rtol=1e-5)
