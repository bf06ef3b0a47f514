"""Keras models over several devices: layers in `mgpu.device` blocks, and `place`, against plain Keras on one device."""
import contextlib
import functools
import itertools
import os
import re

import theano_mgpu as mgpu
from theano_mgpu.errors import ContextError
from theano_mgpu.graph.placement.tags import place_of
from theano_mgpu.keras import Checkpoint, Predictor, balance, disable, enable, multi_gpu_model, place, verify
from theano_mgpu.keras.api.balancing import best_cut
from theano_mgpu.runtime.executable import variables_of

import keras
import numpy as np
import pytest
import theano.tensor as T
from hypothesis import given
from hypothesis import strategies as st
from keras import layers as L
from keras.models import Model, Sequential
from support import keras_zoo as zoo
from support.keras_equivalence import COMPILED, DTYPES, QUICK, assert_equal, built, everything, floatx, trained, values
from support.keras_zoo import head, noise, one_hot
from support.layer_places import layer_places
from support.modes import LAZY
from support.processes import python
from support.strategies import examples
from theano.configparser import change_flags
from theano.tensor.nnet.nnet import Softmax

TOLERANCE = {'float32': 1e-5, 'float64': 1e-9}


@pytest.fixture(autouse=True)
def two(contexts):
    yield contexts('cpu', 2)
    disable()


def nowhere(name):
    return contextlib.nullcontext()


def towers(device):
    """Return a model of two inputs and outputs, dropout, batch normalisation, regularisers, and a merge on the host."""
    with device('host0'):
        a = L.Input((6,))
        left = L.Dropout(0.3, seed=1)(L.Dense(5, activation='tanh', kernel_regularizer='l2')(a))
    with device('host1'):
        b = L.Input((4,))
        right = L.BatchNormalization()(L.Dense(5, activation='tanh', activity_regularizer='l2')(b))
    with device('cpu'):
        both = L.add([left, right])
    with device('host1'):
        kind = L.Dense(zoo.CLASSES, activation='softmax')(both)
    return Model([a, b], [kind, L.Dense(2)(left)])


def shared(device):
    with device('host1'):
        encode = L.Dense(4, activation='tanh')
        a = L.Input((6,))
        first = encode(a)
    b = L.Input((6,))
    with device('host0'):
        both = L.Dense(4)(L.multiply([first, encode(b)]))
    return Model([a, b], head()(both))


def recurrent(device):
    model = Sequential()
    for name, layer in [('host1', L.Embedding(7, 4, mask_zero=True, input_length=5)), ('host0', L.LSTM(3)),
                        ('host1', head())]:
        with device(name):
            model.add(layer)
    return model


def convolution(device):
    model = Sequential()
    with device('host0'):
        model.add(L.Conv2D(3, 3, activation='tanh', input_shape=(6, 6, 2)))
    with device('host1'):
        model.add(L.Flatten())
        model.add(head())
    return model


CROSS = 'categorical_crossentropy'
MODELS = {
    'towers': (towers, [[noise(24, 6), noise(24, 4)], [one_hot(24), noise(24, 2)]], [CROSS, 'mse'], 'adam', QUICK),
    'shared': (shared, zoo.MODELS['shared layer'][1], CROSS, 'clipnorm', QUICK),
    'recurrent': (recurrent, zoo.WORDS, CROSS, 'rmsprop', QUICK),
    'convolution': (convolution, zoo.IMAGES, CROSS, 'sgd', COMPILED)}


def compiled(model, name, **options):
    _, _, loss, optimizer, mode = MODELS[name]
    model.compile(zoo.OPTIMIZERS[optimizer](), loss, metrics=['accuracy'], **dict({'mode': mode}, **options))
    return model


def places_of(model):
    return {device.name for row in model.train_function.function.mesh.replicas for device in row}


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if name in ('convolution', 'recurrent') else ()) for name in MODELS])
def test_training_is_that_of_one_device(name, dtype):
    build, data = MODELS[name][:2]
    with floatx(dtype):
        plain = compiled(built(lambda: build(nowhere)), name)
        if name == 'recurrent':
            enable(always=True)
            placed = compiled(built(lambda: build(mgpu.device)), name)
        else:
            placed = compiled(multi_gpu_model(built(lambda: build(mgpu.device))), name)
        expected = everything(plain, trained(plain, data))
        assert_equal(everything(placed, trained(placed, data)), expected, TOLERANCE[dtype])
        assert len(placed.train_function.function.mesh.replicas) == 1
        assert places_of(placed) >= {'host0', 'host1'}


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize('kind, name', [('gpu', 'towers'), ('gpu', 'convolution')])
def test_training_on_devices(contexts, kind, name):
    there = dict(zip(['host0', 'host1', 'cpu'], contexts(kind, 2) + ['cpu']))
    build, data = MODELS[name][:2]
    plain = compiled(built(lambda: build(nowhere)), name)
    placed = multi_gpu_model(built(lambda: build(lambda place: mgpu.device(there[place]))))
    placed = compiled(placed, name, mode=None)
    assert_equal(everything(placed, trained(placed, data)), everything(plain, trained(plain, data)), 1e-5)
    assert places_of(placed) >= {there['host0'].name, there['host1'].name}


@pytest.mark.slow
def test_a_flag_makes_a_pipeline():
    data = MODELS['towers'][1]
    plain = compiled(built(lambda: towers(nowhere)), 'towers')
    expected = everything(plain, trained(plain, data))
    with change_flags(**{'mgpu.micro_batches': 3, 'mgpu.recompute': 'True'}):
        placed = compiled(multi_gpu_model(built(lambda: towers(mgpu.device))), 'towers')
        found = everything(placed, trained(placed, data))
    assert_equal(found, expected, TOLERANCE['float32'])
    function = placed.train_function.function
    assert function.options.micro_batches == 3 and function.options.recompute is True
    assert len(function.built.splitter.shares.rounds(24)) == 3


@pytest.mark.parametrize('given, expected', [(None, 2), (1, 1)])
def test_a_keyword_comes_before_the_flag(given, expected):
    x = T.matrix()
    with change_flags(**{'mgpu.micro_batches': 2}):
        f = mgpu.function([x], x.sum(), mode='FAST_COMPILE', micro_batches=given)
    assert f.options.micro_batches == expected and f(np.ones((5, 2), x.dtype)) == 10


@pytest.fixture(scope='module')
def fitted():
    """Return two models after `fit`, plain and placed, and their histories."""
    mgpu.init('host0->cpu;host1->cpu')
    x, y = MODELS['towers'][1]
    found = []
    for device in (nowhere, mgpu.device):
        model = built(functools.partial(towers, device))
        model = compiled(model if device is nowhere else multi_gpu_model(model), 'towers')
        np.random.seed(4)
        history = model.fit(x, y, batch_size=10, epochs=2, verbose=0, validation_split=0.3).history
        found.append((model, history))
    return found


@pytest.mark.slow
def test_loops(fitted):
    (plain, expected), (placed, found) = fitted
    x, y = MODELS['towers'][1]
    assert_equal(sorted(found.items()), sorted(expected.items()), 1e-5)
    assert_equal([('', placed.evaluate(x, y, batch_size=9, verbose=0))],
                 [('', plain.evaluate(x, y, batch_size=9, verbose=0))], 1e-5)
    for ours, theirs in zip(placed.predict(x, batch_size=9), plain.predict(x, batch_size=9)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    report = verify(placed, x, y)
    assert report.passed and len(report.contexts) == 2, str(report)


PLAIN_KERAS = '''
import sys, types
package = types.ModuleType('theano_mgpu')
package.__path__ = [%r]
sys.modules['theano_mgpu'] = package
from theano_mgpu import compat
compat.before_theano()
compat.import_theano()
import keras
import numpy as np
model = keras.models.load_model(%r)
assert 'theano_mgpu.graph.placement' not in sys.modules
assert not any(hasattr(weight.tag, 'mgpu_place') for weight in model.weights)
np.savez(%r, *(model.get_weights() + model.optimizer.get_weights()))
'''


@pytest.mark.slow
def test_a_file_does_not_say_where_layers_are(fitted, tmp_path):
    (plain, _), (placed, _) = fitted
    path, out = str(tmp_path / 'm.h5'), str(tmp_path / 'w.npz')
    placed.save(path)
    assert 'host1' not in placed.to_json() and b'host1' not in open(path, 'rb').read()
    python('-c', PLAIN_KERAS % (os.path.dirname(mgpu.__file__), path, out))
    with np.load(out) as found:
        expected = placed.get_weights() + placed.optimizer.get_weights()
        assert_equal([('', found['arr_%d' % i]) for i in range(len(found.files))], [('', w) for w in expected], 0)
    loaded = keras.models.load_model(path, compile=False)
    assert set(layer_places(loaded).values()) == {None}
    place(loaded, {'batch_normalization_*': 'host1', 'dense_*': 'host0'})
    again = compiled(multi_gpu_model(loaded), 'towers')
    x, y = MODELS['towers'][1]
    expected = plain.evaluate(x, y, verbose=0)
    assert_equal([('', again.evaluate(x, y, verbose=0))], [('', expected)], 1e-5)


@pytest.mark.slow
def test_a_checkpoint_continues_a_placed_model(tmp_path):
    x, y = zoo.MODELS['shared layer'][1]
    path = str(tmp_path / 'c.npz')

    def fit(epochs, *callbacks):
        model = compiled(multi_gpu_model(built(lambda: shared(mgpu.device))), 'shared')
        model.fit(x, y, batch_size=7, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
        return values(model.weights)
    expected = fit(2)
    fit(1, Checkpoint(path))
    assert_equal(fit(2, Checkpoint(path)), expected, 0)


def test_a_predictor_computes_over_the_devices_of_a_placed_model(fitted, contexts):
    (plain, _), (placed, _) = fitted
    x, _ = MODELS['towers'][1]
    expected = plain.predict(x)
    contexts('cpu', 5)
    with Predictor(placed) as predictor:
        assert [[context.name for context in replica] for replica in predictor.replicas] == [
            ['host0', 'host1', 'the host'], ['host2', 'host3', 'the host']]
        for ours, theirs in zip(predictor.predict(x, batch_size=7), expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        weight = placed.layers[2].weights[0]
        before = weight.get_value()
        weight.set_value(before * 0)
        predictor.refresh()
        assert not np.allclose(predictor.predict(x)[0], expected[0])
        weight.set_value(before)
    with pytest.raises(ContextError, match='the graph is placed on 2 contexts'):
        Predictor(placed, gpus=1)


@pytest.mark.slow
def test_enable_compares_a_placed_model_with_one_device(capsys):
    enable(verify=True)
    model = compiled(built(lambda: towers(mgpu.device)), 'towers')
    inputs, targets = MODELS['towers'][1]
    model.train_on_batch([x[:7] for x in inputs], [y[:7] for y in targets])
    assert 'same answer: ' in capsys.readouterr().err and places_of(model) >= {'host0', 'host1'}


def test_layers_are_called_where_their_weights_are():
    model = shared(mgpu.device)
    a = keras.Input((6,))
    again = Model(a, model([a, a]))
    f = mgpu.function([a], again.outputs[0], mode=QUICK)
    assert f.mesh.places == ['host0', 'host1']
    x = noise(5, 6).astype('float32')
    np.testing.assert_allclose(f(x), model.predict([x, x]), rtol=1e-5)


@pytest.mark.slow
def test_a_placed_model_is_replicated(contexts):
    contexts('cpu', 4)
    x, y = MODELS['towers'][1]
    plain = compiled(built(lambda: towers(nowhere)), 'towers')
    placed = compiled(multi_gpu_model(built(lambda: towers(mgpu.device))), 'towers')
    expected = everything(plain, trained(plain, [x, y], sizes=(7, 1)))
    assert_equal(everything(placed, trained(placed, [x, y], sizes=(7, 1))), expected, 1e-5)
    function = placed.train_function.function
    assert [[context.name for context in row] for row in function.mesh.replicas] == [
        ['host0', 'host1', 'the host'], ['host2', 'host3', 'the host']]


class WholeBatches(Softmax):
    """An op that fails for any batch but the whole one, which the analysis does not see."""

    def perform(self, node, inputs, outputs):
        if len(inputs[0]) != 8:
            raise ValueError('%d samples' % len(inputs[0]))
        super().perform(node, inputs, outputs)


def test_a_batch_that_cannot_be_divided_runs_on_the_devices_of_one_replica(contexts):
    contexts('cpu', 4)
    model = Sequential()
    with mgpu.device('host0'):
        model.add(L.Dense(3, input_shape=(6,)))
    with mgpu.device('host1'):
        model.add(L.Lambda(WholeBatches(), output_shape=(3,)))
    parallel = multi_gpu_model(model)
    parallel.compile('sgd', 'mse', mode=QUICK)
    with pytest.warns(mgpu.MgpuWarning, match=r'runs on one replica \(host0->cpu;host1->cpu\): its batch succeeds'):
        parallel.train_on_batch(noise(8, 6), noise(8, 3))
    assert places_of(parallel) == {'host0', 'host1'}


# --- place --------------------------------------------------------------------------------------


def two_layers():
    return Sequential([L.Dense(5, activation='tanh', input_shape=(6,), name='first', kernel_regularizer='l2'),
                       L.BatchNormalization(name='bn'), L.Activation('tanh', name='act'),
                       L.Dense(zoo.CLASSES, activation='softmax', name='second')])


@pytest.mark.slow
@pytest.mark.parametrize('given', ['parallel model', 'template'])
def test_place_trains_as_before_and_keeps_the_state_of_the_optimizer(given):
    x, y = noise(20, 6), one_hot(20)
    plain, model = built(two_layers), multi_gpu_model(built(two_layers))
    for each in (plain, model):
        each.compile(zoo.OPTIMIZERS['adam'](), CROSS, mode=QUICK)
        each.train_on_batch(x, y)
    before = model.train_function
    of = model if given == 'parallel model' else model.template
    assert place(of, {'first': 'host1', 'second': 'host0'}) is of
    found, expected = model.train_on_batch(x[:7], y[:7]), plain.train_on_batch(x[:7], y[:7])
    assert_equal(values(model.weights) + values(model.optimizer.weights) + [('loss', found)],
                 values(plain.weights) + values(plain.optimizer.weights) + [('loss', expected)], 1e-5)
    function = model.train_function.function
    assert before.function is not function and len(function.mesh.replicas) == 1
    first, bn, _, second = model.template.layers
    assert {str(v): p for v, p in function.mesh.placement.items() if v in model.weights} == dict(
        [(str(w), 'host1') for w in first.weights + bn.weights] + [(str(w), 'host0') for w in second.weights])
    assert layer_places(model) == {'first': 'host1', 'bn': None, 'act': None, 'second': 'host0'}


def test_the_last_name_that_matches_a_layer_counts():
    model = place(two_layers(), {'*': 'host0', '[sb]*': 'host1', 'bn': 'cpu'})
    assert layer_places(model) == {'first': 'host0', 'bn': 'cpu', 'act': 'host0', 'second': 'host1'}
    regulariser, = model.layers[0].losses
    assert place_of(regulariser) == 'host0'
    assert {place_of(new) for _, new in model.layers[1].updates} == {'cpu'}


def nested():
    inner = Sequential([L.Dense(4, activation='tanh', input_shape=(6,), name='a'), L.Dense(3, name='b')], name='inner')
    x = L.Input((6,))
    return Model(x, L.Dense(zoo.CLASSES, name='last')(L.add([inner(x), L.Dense(3, name='c')(x)])))


def test_nested_models():
    model = place(nested(), {'inner': 'host1', 'last': 'host0'})
    found = layer_places(model)
    assert (found['inner'], found['inner/a'], found['inner/b'], found['c']) == ('host1', 'host1', 'host1', None)
    place(model, {'inner/b': 'host0'})
    found = layer_places(model)
    assert (found['inner'], found['inner/a'], found['inner/b'], found['last']) == (None, 'host1', 'host0', 'host0')
    x = noise(5, 6).astype('float32')
    expected = model.predict(x)
    f = mgpu.function(model.inputs, model.outputs, mode=QUICK)
    np.testing.assert_allclose(f(x)[0], expected, rtol=1e-5)
    b = model.get_layer('inner').get_layer('b')
    assert f.mesh.placement[b.kernel] == 'host0'
    # Its call was placed on host1 with the others; now its ops are beside its weights.
    parts = f.plan.stages[0].parts
    assert [(part.contexts[0].name, part.level) for part in parts if b.kernel in variables_of(part)] == [('host0', 1)]


def test_a_name_that_matches_nothing():
    model = nested()
    with pytest.raises(ValueError, match=r"no layer of model_\d+ matches 'fc\*'; its layers are: input_\d+, inner, "
                                         r"inner/a, inner/b, c, add_\d+, last"):
        place(model, {'last': 'host0', 'fc*': 'host1'})
    with pytest.raises(ContextError, match="context 'dev7' is not mapped; known contexts: host0, host1"):
        place(model, {'last': 'host0', 'inner': 'dev7'})
    assert set(layer_places(model).values()) == {None}


# --- balance ------------------------------------------------------------------------------------


def cuts(n_layers, n):
    """Yield the lengths of the pieces for each way to cut a list into n pieces."""
    for stops in itertools.combinations(range(1, n_layers), n - 1):
        yield np.diff((0,) + stops + (n_layers,)).tolist()


@examples(100)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.data())
def test_the_cut_is_the_best_one(costs, data):
    n = data.draw(st.integers(1, len(costs)), 'pieces')

    def slowest(sizes):
        return max(piece.sum() for piece in np.split(np.array(costs), np.cumsum(sizes)[:-1]))
    sizes = best_cut(costs, n)
    assert len(sizes) == n and sum(sizes) == len(costs) and min(sizes) >= 1
    assert slowest(sizes) == pytest.approx(min(map(slowest, cuts(len(costs), n))))


def test_balance_counts_bytes():
    model = Sequential([L.Dense(60, input_shape=(6,), name='a'), L.Dense(900, name='b'), L.Dense(1, name='c')])
    model.compile('adam', 'mse')
    found = balance(model, 2, 50)
    # Weights, gradients and two moments; the outputs for 50 samples.
    assert {cost.layer: cost.bytes for cost in found.costs} == {
        'a': 4 * (4 * (6 * 60 + 60) + 50 * 60), 'b': 4 * (4 * (60 * 900 + 900) + 50 * 900),
        'c': 4 * (4 * (900 + 1) + 50)}
    assert found == {'a': 'host0', 'b': 'host1', 'c': 'host1'}
    lines = str(found).splitlines()
    assert lines[0].split() == ['LAYER', 'MB', 'DEVICE'] and len(lines) == 6
    assert re.match(r'sum of 2 +\d+\.\d\d  host1', lines[-1]) and found._repr_html_() == '<pre>%s</pre>' % found
    assert layer_places(place(model, found)) == dict(found)


@pytest.mark.parametrize('build', [
    pytest.param(zoo.functional, id='functional'), pytest.param(zoo.shared_layer, id='shared layer'),
    pytest.param(zoo.nested, id='nested'), pytest.param(lambda: towers(nowhere), id='towers', marks=pytest.mark.slow),
    pytest.param(zoo.MODELS['lstm, masking'][0], id='lstm, masking', marks=pytest.mark.slow)])
def test_balance_takes_any_model(build):
    with change_flags(mode=LAZY):
        model = build()
        found = balance(model, 2)
    assert list(found) == [layer.name for layer in model.layers if not isinstance(layer, L.InputLayer)]
    assert list(found.values()) == sorted(found.values()) and set(found.values()) == {'host0', 'host1'}


def test_balance_refuses():
    model = two_layers()
    with pytest.raises(ContextError, match='balance over 3 devices needs as many contexts; there are 2: host0->cpu'):
        balance(model, 3)
    with pytest.raises(ValueError, match='has 1 layers, which cannot be cut into 2 pieces'):
        balance(Sequential([L.Dense(2, input_shape=(3,))]), 2)
    with pytest.raises(ValueError, match='balance takes a batch_size, at least 1, not array'):
        balance(model, 2, noise(5, 3))


def test_layers_that_are_placed_twice_keep_the_state_of_the_optimizer():
    x, y = noise(20, 6), one_hot(20)
    plain, model = built(two_layers), multi_gpu_model(built(two_layers))
    for each in (plain, model):
        each.compile(zoo.OPTIMIZERS['adam'](), CROSS, mode=QUICK)
        each.train_on_batch(x, y)
    place(model, {'first': 'host0'})
    place(model, {'first': 'host1', 'second': 'host0'})
    found, expected = model.train_on_batch(x[:7], y[:7]), plain.train_on_batch(x[:7], y[:7])
    assert_equal(values(model.weights) + values(model.optimizer.weights) + [('loss', found)],
                 values(plain.weights) + values(plain.optimizer.weights) + [('loss', expected)], 1e-5)
