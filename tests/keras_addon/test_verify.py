"""The certificate: what is the same, what is not and why; and that nothing is left behind."""
import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model, verify

import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Sequential

from . import zoo
from .equivalence import QUICK, assert_equal, built, values
from .test_exact import compiling
from .zoo import dense, head, noise, one_hot

X, Y = noise(11, 6), one_hot(11)


def everything_of(model):
    return values(model.weights) + values(model.optimizer.weights) + [
        ('metric', K.get_value(w)) for metric in model.metrics for w in metric.weights]


def test_an_exact_model_passes_and_is_left_as_it_was(contexts):
    contexts('cpu', 3)
    model = multi_gpu_model(built(dense))
    model.compile(mode=QUICK, **compiling('nesterov, decay', metrics=['accuracy'])())
    model.train_on_batch(X, Y, reset_metrics=False)
    before = everything_of(model)
    certificate = verify(model, X, Y)
    assert certificate.passed and not certificate.inexact and len(certificate.contexts) == 3
    assert {row.kind for row in certificate.rows} == {'loss', 'metric', 'gradient', 'weight', 'optimizer'}
    assert max(row.difference for row in certificate.rows) < 1e-5
    assert_equal(everything_of(model), before, 0)
    text = str(certificate)
    assert text.startswith('one step on one device and on 3 contexts (host0->cpu;host1->cpu;host2->cpu)')
    assert 'same answer: the largest difference is' in text and 'dense' in text
    model.train_on_batch(X, Y)  # goes on


def test_a_plain_model_and_other_contexts(contexts):
    contexts('cpu', 3)
    model = built(dense)
    model.compile('adam', 'mse', mode=QUICK)
    certificate = verify(model, X, Y, gpus=2)
    assert certificate.passed and [c.name for c in certificate.contexts] == ['host0', 'host1']


def coupled_loss(y_true, y_pred):
    return K.sum(K.square(y_true - y_pred), axis=-1) * K.var(y_pred)


@pytest.mark.filterwarnings('ignore:.*is not exactly as on one')
@pytest.mark.parametrize('layer,loss,message', [
    (lambda: L.Lambda(lambda x: x - K.mean(x, axis=0), name='centre'), 'mse', 'layer centre mixes samples'),
    (lambda: L.BatchNormalization(name='normal'), 'mse',
     'layer normal normalises each sub-batch by its own statistics'),
    (lambda: L.Lambda(lambda x: x / K.max(x, axis=0), name='peak'), 'mse', 'layer peak takes the maximum over samples'),
    (lambda: L.Dense(6), coupled_loss, 'the loss of .* mixes samples')])
def test_what_is_inexact_is_named_and_shown(layer, loss, message, contexts):
    contexts('cpu', 2)
    model = built(lambda: Sequential([L.Dense(6, input_shape=(6,)), layer(), head()]))
    parallel = multi_gpu_model(model)
    with pytest.warns(mgpu.MgpuWarning, match=message):
        parallel.compile('sgd', loss, mode=QUICK)
    certificate = verify(parallel, X, Y)
    assert not certificate.passed and 'NOT the same answer' in str(certificate)
    assert any(np.all([part in ' '.join(named) for part in message.split('.*')]) for named in certificate.inexact)


def test_random_layers_are_named(contexts):
    contexts('cpu', 2)
    model = built(lambda: Sequential([L.Dense(6, input_shape=(6,)), L.Dropout(0.5, name='drop'), head()]))
    model.compile('sgd', 'mse', mode=QUICK)
    certificate = verify(model, X, Y)
    assert ('layer drop', 'draws from a random stream of its own on each replica') in certificate.inexact


def test_nothing_is_said_on_one_context(contexts, recwarn):
    contexts('cpu', 1)
    model = multi_gpu_model(built(lambda: Sequential([L.BatchNormalization(input_shape=(6,)), head()])))
    model.compile('sgd', 'mse', mode=QUICK)
    assert not [w for w in recwarn if issubclass(w.category, mgpu.MgpuWarning)]
    assert verify(model, X, Y).passed


def test_weights_that_make_a_loss_inexact_are_warned_of_when_they_come(contexts):
    """A scalar loss is exact as long as all samples weigh the same."""
    contexts('cpu', 2)
    model = multi_gpu_model(built(dense))
    model.compile('sgd', zoo.scalar_loss, mode=QUICK)
    model.train_on_batch(X, Y)
    with pytest.warns(mgpu.MgpuWarning, match='with sample or class weights'):
        model.train_on_batch(X, Y, sample_weight=np.arange(11.))


def test_an_uncompiled_model(contexts):
    contexts('cpu', 2)
    with pytest.raises(ValueError, match='is not compiled'):
        verify(dense(), X, Y)
