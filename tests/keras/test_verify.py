"""The verification report: equal results, different ones and the reason; and that nothing is left behind."""
from theano_mgpu.keras import multi_gpu_model, verify

import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from keras.models import Sequential
from support import keras_zoo as zoo
from support.keras_equivalence import QUICK, assert_equal, built, compiling, values
from support.keras_zoo import dense, head, noise, one_hot

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
    report = verify(model, X, Y)
    assert report.passed and len(report.contexts) == 3
    assert {row.kind for row in report.rows} == {'loss', 'metric', 'gradient', 'weight', 'optimizer'}
    assert max(row.difference for row in report.rows) < 1e-5
    assert_equal(everything_of(model), before, 0)
    text = str(report)
    assert text.startswith('one step on one device and 3 contexts (host0->cpu;host1->cpu;host2->cpu)')
    assert 'same answer: the largest difference is' in text and 'dense' in text
    model.train_on_batch(X, Y)  # goes on


def test_a_plain_model_and_other_contexts(contexts):
    contexts('cpu', 3)
    model = built(dense)
    model.compile('adam', 'mse', mode=QUICK)
    report = verify(model, X, Y, gpus=2)
    assert report.passed and [c.name for c in report.contexts] == ['host0', 'host1']


def coupled_loss(y_true, y_pred):
    return K.sum(K.square(y_true - y_pred), axis=-1) * K.var(y_pred)


@pytest.mark.slow_but_with('scalar loss')
@pytest.mark.parametrize('layer,loss', [
    (lambda: L.Lambda(lambda x: x - K.mean(x, axis=0), output_shape=(6,)), 'mse'),
    (lambda: L.BatchNormalization(), 'mse'), (lambda: L.Dropout(0.5), 'mse'),
    (lambda: L.Lambda(lambda x: x / K.max(x, axis=0), output_shape=(6,)), 'mse'), (lambda: L.Dense(6), coupled_loss),
    (lambda: L.Dense(6), zoo.scalar_loss)], ids=['centred', 'normalised', 'dropout', 'maximum', 'loss', 'scalar loss'])
def test_what_mixes_samples_passes(layer, loss, contexts):
    contexts('cpu', 2)
    model = built(lambda: Sequential([L.Dense(6, input_shape=(6,)), layer(), head()]))
    parallel = multi_gpu_model(model)
    parallel.compile('sgd', loss, mode=QUICK)
    assert verify(parallel, X, Y, sample_weight=np.arange(1, 12.)).passed


def test_a_difference_is_shown(contexts):
    contexts('cpu', 2)
    model = built(dense)
    model.compile('sgd', 'mse', mode=QUICK)
    report = verify(model, X, Y, tolerance=1e-30)
    assert not report.passed and 'NOT the same answer' in str(report) and '<-- differs' in str(report)


def test_an_uncompiled_model(contexts):
    contexts('cpu', 2)
    with pytest.raises(ValueError, match='is not compiled'):
        verify(dense(), X, Y)
