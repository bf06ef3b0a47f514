"""Arguments of multi_gpu_model, and bad input: errors name the argument and the remedy; nothing is changed."""
import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential
from support.keras_equivalence import QUICK, assert_equal, built, values
from support.keras_zoo import dense, noise, one_hot

pytestmark = pytest.mark.verified
X, Y = noise(11, 6), one_hot(11)


@pytest.mark.parametrize('gpus,names', [(None, '012'), (2, '01'), (1, '0'), ([2, 0], '20'), (['host1', 'host0'], '10'),
                                        ((1, 'host2'), '12'), (np.int64(3), '012')])
def test_gpus(gpus, names, contexts):
    contexts('cpu', 3)
    model = multi_gpu_model(dense(), gpus=gpus, cpu_merge=False, cpu_relocation=True)
    assert [c.name for c in model.contexts] == ['host%s' % number for number in names]
    assert isinstance(model, keras.Model) and model.predict(X).shape == (11, 3)


@pytest.mark.parametrize('gpus,message', [
    (0, 'gpus=0: a model needs at least one context; there are 2: host0->cpu;host1->cpu'),
    (-1, 'gpus=-1'),
    (4, r'with `gpus=4`, as many contexts must be mapped; there are 2: .*"theano-mgpu run --gpus 2", which .*'
        r"init\('host0->cpu;host1->cpu;dev2->cpu;dev3->cpu'\)"),
    ([0, 5], 'context 5 is not mapped; known contexts: host0, host1'), ([True], 'context True is not mapped'),
    (['host0', 'dev7'], "context 'dev7' is not mapped"),
    ([1, 'host1'], 'each named once'), ([], 'at least one context'), ('2', "gpus='2' is neither"),
    (True, 'gpus=True is neither'), (2.0, 'gpus=2.0 is neither')])
def test_wrong_gpus(gpus, message, contexts):
    contexts('cpu', 2)
    with pytest.raises(ValueError, match=message) as caught:
        multi_gpu_model(dense(), gpus=gpus)
    assert isinstance(caught.value, mgpu.ContextError)


class Subclassed(Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(2)

    def call(self, x):
        return self.dense(x)


def from_tensor():
    data = L.Input(tensor=K.variable(np.ones((4, 2))))
    return Model(data, L.Dense(1)(data))


@pytest.mark.parametrize('make,message', [
    (lambda: Sequential([L.Dense(3)]), 'is not built yet.*input_shape'),
    (Subclassed, 'is not built yet'),
    (lambda: 'a model', "takes a keras.Model or keras.Sequential, not 'a model'"),
    (lambda: multi_gpu_model(dense()), 'is already a parallel model: pass its template'),
    (from_tensor, r'reads its data from a tensor \(Input\(tensor=...\)\)')])
def test_wrong_models(make, message, contexts):
    contexts('cpu', 2)
    with pytest.raises(ValueError, match=message):
        multi_gpu_model(make())


@pytest.fixture
def model(contexts):
    contexts('cpu', 2)
    made = multi_gpu_model(built(dense))
    made.compile('adam', 'categorical_crossentropy', metrics=['accuracy'], mode=QUICK)
    made.train_on_batch(X, Y)
    return made


@pytest.mark.slow_with('x4-None-kwargs4-None', 'x0-y0*', 'x8-y8-kwargs8-empty')
@pytest.mark.parametrize('x,y,kwargs,message', [
    (X, Y[:10], {}, 'same number of samples|11 input samples and 10 target samples'),
    (X[:, :5], Y, {}, r'to have shape \(6,\) but got array with shape \(5,\)'),
    (X, Y[:, :2], {}, r'to have shape \(3,\) but got array with shape \(2,\)'),
    ([X, X], Y, {}, 'Expected to see 1 array'),
    (X, None, {}, None),
    (X, Y, {'sample_weight': np.ones(5)}, 'same number of samples|sample_weight'),
    (K.variable(X), Y, {}, r'tensors \(.*\) cannot be split into sub-batches: pass the data as arrays'),
    (X, K.variable(Y), {}, 'cannot be split into sub-batches'),
    (X[:0], Y[:0], {}, 'empty')])
def test_bad_data_changes_nothing(x, y, kwargs, message, model):
    before = values(model.weights) + values(model.optimizer.weights)
    with pytest.raises((ValueError, AttributeError, TypeError), match=message):
        model.train_on_batch(x, y, **kwargs)
    assert_equal(values(model.weights) + values(model.optimizer.weights), before, 0)
    assert np.isfinite(model.train_on_batch(X, Y)).all()


def test_uncompiled(contexts):
    contexts('cpu', 2)
    model = multi_gpu_model(dense())
    for call in (lambda: model.fit(X, Y), lambda: model.evaluate(X, Y), lambda: model.train_on_batch(X, Y)):
        with pytest.raises(RuntimeError, match='must compile'):
            call()
    assert model.predict(X).shape == (11, 3)


def test_wrong_options_of_compile(contexts):
    contexts('cpu', 2)
    model = multi_gpu_model(dense())
    with pytest.raises(ValueError, match='does not take options.*mode and givens'):
        model.compile('sgd', 'mse', options={})
    with pytest.raises(ValueError, match='target_tensors=.* cannot be split'):
        model.compile('sgd', 'mse', target_tensors=[K.variable(Y)])
    with pytest.raises(ValueError, match='Unknown loss function'):
        model.compile('sgd', 'no such loss')


@pytest.mark.slow
def test_a_stateful_model_is_split_unevenly(contexts):
    """Each context takes the states of its own samples."""
    contexts('cpu', 4)
    plain, template = [built(lambda: Sequential([L.SimpleRNN(3, stateful=True, batch_input_shape=(6, 5, 4))]))
                       for _ in range(2)]
    for model in (plain, multi_gpu_model(template)):
        model.compile('sgd', 'mse', mode=QUICK)
        for _ in range(2):
            model.train_on_batch(noise(6, 5, 4), noise(6, 3))
    assert_equal(values(template.weights + template.layers[0].states), values(plain.weights + plain.layers[0].states),
                 1e-5)
