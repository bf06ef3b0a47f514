"""A graph whose parts are placed on several devices gives the answers of one device."""
import json
from collections import Counter

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.launch import INTERPRETED, arrays, launch
from support.placed_models import MODELS, PYTHON, Training, assert_close, check, made, plain

SIZES = 7, 4, 1, 9  # two or more replicas or micro-batches have unequal parts of them
SLOW = {'convolutional': [pytest.mark.slow, pytest.mark.needs_compiler], 'two_loops': [pytest.mark.slow]}
NAMES = [pytest.param(name, marks=SLOW.get(name, [])) for name in MODELS]
WITH_STATES = 'chain_of_three', 'towers', 'dropout', 'batch_normalised'
ON_GPU = [pytest.param('gpu', name, marks=() if name == 'towers' else pytest.mark.slow)
          for name in MODELS]


@pytest.fixture(autouse=True)
def dtype(request):
    """Set floatX to float64 for tests on the host, so that a wrong gradient is not mistaken for rounding."""
    on_gpu = request.node.get_closest_marker('opencl')
    with theano.configparser.change_flags(floatX='float32' if on_gpu else 'float64'):
        yield


@pytest.fixture
def cpu3(contexts):
    return contexts('cpu', 3)


@pytest.fixture
def cpu4(contexts):
    return contexts('cpu', 4)


def training_step(name, places, **options):
    return Training(made(name, places), 'training_function', **options)


@pytest.mark.slow_but_with('tied')
@pytest.mark.parametrize('name', NAMES)
def test_a_training_step(cpu3, name):
    check(training_step(name, cpu3), name, SIZES)


@pytest.mark.slow_but_with('chain_of_three')
@pytest.mark.parametrize('name', [pytest.param(name, marks=SLOW.get(name, [] if name in WITH_STATES else [
    pytest.mark.slow])) for name in MODELS])
def test_a_function_with_micro_batches(cpu3, name):
    training = Training(made(name, cpu3), 'function', micro_batches=3, recompute=True)
    check(training, name, SIZES)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['chain_of_three', 'towers'])
def test_in_float32(cpu3, name):
    with theano.configparser.change_flags(floatX='float32'):
        check(training_step(name, cpu3, micro_batches=2), name, SIZES)


@pytest.mark.cuda(opencl='slow')
@pytest.mark.parametrize('kind,name', ON_GPU)
def test_on_devices(contexts, kind, name):
    places = contexts(kind, 3 if name == 'chain_of_three' else 2)
    training = training_step(name, places, mode=None, micro_batches=2, recompute=True)
    check(training, name, SIZES)
    assert not mgpu.audit(training.step).wrong


@pytest.mark.slow_but_with("towers-{'update_on': 'host'}")
@pytest.mark.parametrize('options', [
    {'micro_batches': 1, 'recompute': True}, {'micro_batches': 2, 'executor': 'threads'},
    {'micro_batches': 4, 'executor': 'serial'}, {'update_on': 'host'}, {'update_on': 'device', 'micro_batches': 2},
    {'check_finite': True}], ids=str)
@pytest.mark.parametrize('name', ['towers', 'batch_normalised'])
def test_options(cpu3, name, options):
    check(training_step(name, cpu3, **options), name, SIZES)


REPLICATED = ['chain', 'towers', 'tied', 'several_losses', 'dropout', 'batch_normalised']


@pytest.mark.slow_but_with('tied')
@pytest.mark.parametrize('name', REPLICATED)
def test_replicas(cpu4, name):
    """Replicas are given as lists of contexts, or made of the contexts that are left."""
    a, b, c, d = [context.name for context in cpu4]
    training = training_step(name, [a, c], contexts=[[a, c], [b, d]])
    check(training, name, SIZES)
    assert [[context.name for context in replica][:2] for replica in training.step.mesh.replicas] == [[a, c], [b, d]]
    training = training_step(name, [a, b], micro_batches=2, update_on='sharded')
    check(training, name, SIZES)
    assert [[context.name for context in replica][:2] for replica in training.step.mesh.replicas] == [[a, b], [c, d]]


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize('kind,name', [('gpu', name) for name in REPLICATED])
def test_replicas_on_devices(contexts, kind, name):
    places = contexts(kind, 4)
    check(training_step(name, places[:2], mode=None), name, SIZES)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('update_on', ['auto', 'sharded'])
def test_ranks(update_on, tmp_path):
    """Two processes have a replica over two contexts each."""
    with theano.configparser.change_flags(floatX='float64'):
        outputs, values = plain('several_losses', SIZES, 'float64')
        launch(2, 'placed', tmp_path / 'ranks.npz', 'a->cpu;b->cpu;c->cpu;d->cpu', 'several_losses', *SIZES,
               flags=INTERPRETED.replace('float32', 'float64') + ',mgpu.update_on=' + update_on)
        assert_close(arrays(tmp_path / 'ranks.npz'), sum(outputs, []) + values + [np.array(2)])


def regression(places, x, t):
    """Return a chain that is given its batch as expressions, and updates of its weights."""
    m = made('chain', places)
    loss = theano.clone(m.loss, dict(zip(m.inputs, [x, t])))
    return m, loss, [(w, w - 0.1 * gradient) for w, gradient in zip(m.params, T.grad(loss, m.params))]


@pytest.mark.slow_but_with('None-1')
@pytest.mark.parametrize('contexts_of_it,micro_batches', [(['host0', 'host1'], 3), (None, 1)])
def test_batches_that_are_sliced_from_data_sets(cpu4, contexts_of_it, micro_batches):
    data = made('chain').batch(40, 3)
    found = []
    for places in (cpu4, None):
        index, size = T.lscalar('index'), T.lscalar('size')
        x, t = [theano.shared(values)[index * size:(index + 1) * size] for values in data]
        m, loss, updates = regression(places, x, t)
        function = theano.function if places is None else mgpu.function
        options = {} if places is None else {'contexts': contexts_of_it, 'micro_batches': micro_batches}
        step = function([index, size], loss, updates=updates, mode=PYTHON, **options)
        found.append([np.asarray(step(*at)) for at in ((0, 7), (2, 4), (1, 13))] + [w.get_value() for w in m.params])
    assert_close(*found)


def test_givens(cpu3):
    data = made('chain').batch(40, 3)
    found = []
    for places in (cpu3, None):
        rows, x, t, scale = T.lvector('rows'), T.matrix('x'), T.matrix('t'), T.scalar('scale')
        m, loss, updates = regression(places, x * scale, t)
        givens = {x: theano.shared(data[0])[rows], t: theano.shared(data[1])[rows]}
        step = (theano.function if places is None else mgpu.function)(
            [rows, scale], [loss, loss * scale], updates=updates, givens=givens,
            mode=PYTHON)
        outputs = [step(np.array(at), 1.5) for at in ([3, 1, 7], [0], [39, 3, 3, 8])]
        found.append(sum(outputs, []) + [w.get_value() for w in m.params])
    assert_close(*found)


def test_updates_that_exchange_values_between_devices(cpu3):
    """New values are made of the old values, wherever these are; the same variable is read on both devices."""
    def states(places):
        m = made('chain', places)
        with m.on(0):
            a, seen = m.shared(np.ones(3), 'a'), m.shared(0, 'seen')
        with m.on(1):
            b, mean = m.shared(np.arange(3), 'b'), m.shared(np.zeros(3), 'mean')
        y, x = m.outputs[0], m.inputs[0]
        updates = [(a, b * 2 + y.sum(axis=0)), (b, a - mean), (mean, 0.9 * mean + 0.1 * y.mean(axis=0)),
                   (seen, seen + T.cast(x.shape[0], 'float64'))]
        outputs = [(a * y + b).sum(), x, y, a, T.constant(3.0), y.shape[0]]
        step = (theano.function if places is None else mgpu.function)(m.inputs, outputs, updates=updates, mode=PYTHON,
                                                                       on_unused_input='ignore')
        returned = [[np.asarray(value) for value in step(*m.batch(n, n))] for n in SIZES]
        return sum(returned, []) + [v.get_value() for v in (a, b, seen, mean)]
    assert_close(states(cpu3), states(None))
    assert_close(states([cpu3[1], cpu3[0]]), states(None))


def test_weights_that_are_set_between_steps(cpu3):
    """Functions that are not placed also read and set the weights."""
    trainings = [training_step('towers', cpu3), Training(made('towers'))]
    norms = [theano.function([], sum(T.sqr(w).sum() for w in each.model.params), mode=PYTHON) for each in trainings]
    for first in range(3):
        found = []
        for training, norm in zip(trainings, norms):
            outputs, = training.run([5], first)
            found.append(outputs + [norm()] + training.values())
            for variable in training.variables[1:9:3]:
                variable.set_value(variable.get_value() * 0.5)
        assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['towers', 'dropout'])
def test_a_state_that_is_saved(cpu4, tmp_path, name):
    """A state that a placed function saved is loaded by one that is not placed, and the other way round."""
    def state_of(places):
        return training_step(name, places, contexts=[context.name for context in cpu4[:2 if places else 1]])
    _, after = plain(name, SIZES + (5, 5), 'float64')
    for places, others in ((cpu4, None), (None, cpu4), (cpu4, cpu4[1::-1])):
        training, resumed = state_of(places), state_of(others)
        training.run(SIZES)
        training.step.save(str(tmp_path / 'state.npz'))
        resumed.run([2])
        resumed.step.load(str(tmp_path / 'state.npz'))
        resumed.run([5, 5], len(SIZES))
        assert_close(resumed.values(), after)


@pytest.mark.slow
def test_checkpoints(cpu3, tmp_path):
    _, after = plain('dropout', SIZES, 'float64')
    path = str(tmp_path / 'run.npz')
    training = training_step('dropout', cpu3, micro_batches=2)
    assert training.step.checkpoint(path, every=3) == 0
    training.run(SIZES)
    resumed = training_step('dropout', cpu3, recompute=True)
    assert resumed.step.checkpoint(path, every=3) == 3
    resumed.run(SIZES[3:], 3)
    assert_close(resumed.values(), after)


def test_verify(cpu3):
    training = training_step('several_losses', cpu3, micro_batches=2)
    report = training.step.verify(*training.model.batch(7, 0))
    assert report.passed and 'host0' in str(report) and 'host1' in str(report), str(report)
    assert_close(training.values(), Training(made('several_losses')).values())


def test_audit_shows_where_each_op_runs(cpu3):
    """The forward and the backward products of each layer are where the layer is; the merge is on the host."""
    step = training_step('towers', cpu3, update_on='device').step
    products = Counter(entry.context for entry in mgpu.audit(step) if str(entry.op) in ('dot', 'Dot22'))
    # One forward; gradients by the weight, and by the input unless that is the batch.
    assert products == {'host0': 2, 'host1': 2 + 3, 'the host': 3}
    adam = Counter(entry.context for entry in mgpu.audit(step) if 'sqrt' in str(entry.op))
    assert set(adam) == {'host0', 'host1', 'the host'}


def test_the_timeline_shows_each_context(cpu3, tmp_path):
    training = training_step('chain_of_three', cpu3, micro_batches=2)
    training.run([6])
    with mgpu.timeline(str(tmp_path / 'trace.json')):
        training.run([6, 4])
    events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
    tracks = {event['tid']: event['args']['name'] for event in events if event['name'] == 'thread_name'}
    runs = Counter(tracks[event['tid']] for event in events if event['ph'] == 'X' and event['name'] == 'run')
    # Forward and backward for each micro-batch; on the last device both at once.
    assert [runs[context.name] for context in cpu3] == [2 * 2 * 2, 2 * 2 * 2, 2 * 2], runs
