"""The time of each layer, or named part of a graph: which op is part of which, and what the times add up to."""
import theano_mgpu as mgpu
from theano_mgpu.graph import layers, theano_functions
from theano_mgpu.graph.patches import record_places
from theano_mgpu.keras import multi_gpu_model

import numpy as np
import pytest
import theano
import theano.tensor as T
from keras.layers import Activation, Conv2D, Dense, Flatten
from keras.models import Sequential
from theano.configparser import change_flags
from theano.ifelse import ifelse
from theano.tensor.blas import Dot22, Gemm

X = np.random.RandomState(0).uniform(-1, 1, (13, 6)).astype('float32')


@pytest.fixture
def timed(monkeypatch):
    """Time the layers of functions that the test makes; give the list of their Times."""
    record_places()
    theano_functions.hook_functions_once()
    monkeypatch.setattr(layers, 'is_on', True)
    monkeypatch.setattr(layers, 'every', [])
    with change_flags(**{'traceback.limit': 1}):
        yield layers.every


def weights(*names):
    """Return square matrices of weights."""
    random = np.random.RandomState(1)
    return [theano.shared(random.uniform(-.5, .5, (6, 6)).astype('float32'), name) for name in names]


def small_net(x, params, names=('first', 'second', 'third')):
    """Return the loss of a network whose second part is linear."""
    first = T.tanh(T.dot(x, params[0]))
    second = T.dot(first, params[1])
    third = T.nnet.sigmoid(T.dot(second, params[2]))
    for part, name in zip((first, second, third), names):
        part.name = name
    return T.sqr(third).mean()


def descent(gradients, params):
    return [(w, w - np.float32(.1) * gradient) for w, gradient in zip(params, gradients)]


def products(function):
    """Return the part of each matrix product of a compiled function, in the order of the graph."""
    nodes = function.maker.fgraph.toposort()
    return [part for node, part in zip(nodes, layers.parts_of(nodes)) if isinstance(node.op, (Dot22, Gemm))]


@pytest.mark.slow_with('names0-parts0')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('names, parts', [
    (('first', 'second', 'third'), ('first', 'second', 'third')),
    ((None,) * 3, ('A.T (6, 6)', 'W (6, 6)', 'W (6, 6)'))])
def test_gradients_have_the_layer_of_their_forward_op(timed, names, parts):
    """BLAS adds the product of a gradient to the weights, which is the update; the product takes the time."""
    x, params = T.fmatrix('x'), weights('A.T', 'W', 'W')
    loss = small_net(x, params, names)
    found = products(theano.function([x], loss, updates=descent(theano.grad(loss, params), params)))
    backward = [part for part in found if part.endswith(', backward')]
    assert sorted(backward) == sorted(part + ', backward' for part in (*parts, *parts[1:]))
    assert set(found).difference(backward) == set(parts)


def test_other_ops(timed):
    """Ops without a layer, ops of an update, and a branch that is not taken."""
    x, (w,) = T.fmatrix('x'), weights('w')
    taken = ifelse(T.gt(x.sum(), 100), T.exp(x), T.dot(x, w))
    f = theano.function([x], taken, updates=[(w, w * np.float32(2))], name='f')
    for _ in range(3 * layers.EVERY):
        np.testing.assert_allclose(f(X), np.dot(X, w.get_value() / 2), rtol=1e-5)
    seconds = timed[-1].a_call()
    assert {'w (6, 6)', 'update', 'other'} >= seconds.keys() >= {'w (6, 6)', 'update'} and timed[-1].name == 'f'


@pytest.mark.parametrize('mode', [None, 'FAST_COMPILE', 'DebugMode', theano.Mode('py'),
                                  theano.Mode('cvm', theano.gof.opt.SeqOptimizer([]))])
def test_errors_and_modes(timed, mode):
    """An op that fails has the error of plain Theano."""
    x, (w,) = T.fmatrix('x'), weights('w')
    f, errors = theano.function([x], T.dot(x, w), mode=mode), []
    for call in (f, theano_functions.plain_function([x], T.dot(x, w), mode=mode)):
        np.testing.assert_allclose(call(X), np.dot(X, w.get_value()), rtol=1e-5)
        with pytest.raises(Exception, match='(?i)shape|align') as error:
            [call(X[:, 1:]) for _ in range(layers.EVERY)]
        errors.append((error.type, str(error.value).split('Backtrace')[0]))
    assert errors[0] == errors[1]


@pytest.mark.needs_compiler
def test_the_rows_add_up_to_the_time_of_theanos_profiler(timed, monkeypatch):
    monkeypatch.setattr(layers, 'EVERY', 1)
    x, params = T.fmatrix('x'), [theano.shared(np.ones((400, 400), 'float32')) for _ in range(3)]
    loss = small_net(x, params)
    with change_flags(**{'profiling.destination': '/dev/null'}):
        f = theano.function([x], loss, updates=descent(theano.grad(loss, params), params), name='f',
                            profile=theano.compile.ProfileStats(False, gpu_checks=False))
    for _ in range(5):
        f(np.ones((400, 400), 'float32'))
    rows = [line.split('  ') for line in layers.tables([])[0].splitlines() if line.startswith(('all', 'first'))]
    whole = sum(map(float, [cell for cell in rows[-1] if cell.strip()][1:3]))
    profiled = 1e3 * sum(f.profile.apply_time.values()) / f.profile.fct_callcount
    assert profiled == pytest.approx(whole, rel=.1, abs=.2) and rows[0][0] == 'first'


@pytest.mark.cuda
def test_results_are_the_same(contexts, kind, timed, monkeypatch):
    """Results on one device and divided, with layers timed in each call, in every third one, and not at all."""
    contexts(kind, 2)
    results = []
    for is_on, every in (True, 1), (True, 3), (False, 1):
        monkeypatch.setattr(layers, 'is_on', is_on)
        monkeypatch.setattr(layers, 'EVERY', every)
        x, params = T.fmatrix('x'), weights('a', 'b', 'c')
        loss = small_net(x, params)
        plain = theano.function([x], loss, updates=descent(theano.grad(loss, params), params))
        step = mgpu.training_function([x], loss, params, descent, name='step')
        results.append([f(X).tobytes() for f in (plain, step) for _ in range(4)] +
                       [w.get_value().tobytes() for w in params])
    assert results[0] == results[1] == results[2]
    of_step = [times for times in timed if times.name == 'step' and times.context]
    assert {part for times in of_step for part in times.a_call()} >= {
        part + end for part in ('first', 'second', 'third') for end in ('', ', backward')}
    assert len({times.context for times in of_step}) >= 2
    table = next(table for table in layers.tables([('step', 1.)]) if table.startswith('step'))
    assert 'exchange' in table and 'DIVIDED: FORWARD' in table


@pytest.mark.slow_with('cpu')
@pytest.mark.cuda(opencl='slow')
def test_layers_of_keras(contexts, kind, timed):
    """Each layer has a row, forward and backward, and so have the loss and the update."""
    losses = []
    for is_on in True, False:
        layers.is_on = is_on
        with change_flags(**{'traceback.limit': int(is_on)}):
            model = Sequential([
                Conv2D(2, 3, input_shape=(6, 6, 1), name='image'), Flatten(name='flat'), Dense(4, name='inner'),
                Activation('relu', name='cut'), Dense(2, activation='softmax', name='classes')])
            model.set_weights([np.full(w.shape, .1 * (i + 1)) for i, w in enumerate(model.get_weights())])
            parallel = multi_gpu_model(model, contexts(kind, 2))
            parallel.compile('adam', 'categorical_crossentropy', metrics=['accuracy'])
            images = np.arange(9 * 36).reshape(9, 6, 6, 1) % 7 / 7
            losses.append([parallel.train_on_batch(images, np.eye(2)[np.arange(9) % 2])[0] for _ in range(4)])
    assert losses[0] == losses[1]
    parts = {part for times in timed if times.context for part in times.a_call()}
    assert parts >= {'image', 'image, backward', 'inner', 'inner, backward', 'classes', 'classes, backward', 'update'}
    assert not {part.replace(', backward', '') for part in parts}.difference(
        ['image', 'flat', 'inner', 'cut', 'classes', 'loss', 'update'])
