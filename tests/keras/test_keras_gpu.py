"""The main kinds of model on two OpenCL (or CUDA) contexts against plain Keras on the CPU."""
import theano_mgpu as mgpu
from theano_mgpu.graph.audit import ON_WRONG_CONTEXT
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import regularizers
from keras.models import Sequential
from support import keras_zoo as zoo
from support.keras_equivalence import built, check, compiling, everything
from support.keras_zoo import COMPILED_MODELS, MODELS, VECTORS, N, dense, noise, one_hot

pytestmark = [pytest.mark.opencl, pytest.mark.needs_compiler]


@pytest.mark.cuda
@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.slow) for name in ('conv2d', 'lstm, masking')])
def test_models(name, contexts):
    build, data = MODELS.get(name) or COMPILED_MODELS[name]
    check(build, compiling(metrics=['accuracy']), data, 'float32', contexts, kind='gpu', mode=None, test=False)


@pytest.mark.cuda(opencl='slow')
def test_evaluation_and_prediction(contexts):
    contexts('gpu', 2)
    plain, model = built(dense), multi_gpu_model(built(dense))
    for m in (plain, model):
        m.compile('sgd', 'mse', metrics=['mae'])
    x, y = VECTORS[0][0][:11], VECTORS[1][0][:11]
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=4, verbose=0),
                               plain.evaluate(x, y, batch_size=4, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(x, batch_size=4), plain.predict(x, batch_size=4), rtol=1e-4)


@pytest.mark.slow
def test_several_inputs_and_outputs(contexts):
    data = [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]]
    losses = {'kind': keras.losses.CategoricalCrossentropy(reduction='sum'), 'place': 'mse'}
    check(zoo.functional, compiling(loss=losses, loss_weights={'kind': 0.3, 'place': 2.0}, metrics=['mae']), data,
          'float32', contexts, kind='gpu', mode=None, test=False)


def few_metrics():
    return [keras.metrics.Precision(), keras.metrics.AUC(num_thresholds=5)]


def placed(model, history):
    """Return everything that training leaves, after a check that each op of the train function was on its context."""
    entries = mgpu.audit(model.train_function.function) if hasattr(model, 'template') else []
    assert not [entry for entry in entries if entry.where == ON_WRONG_CONTEXT]
    return everything(model, history)


@pytest.mark.cuda
@pytest.mark.slow
def test_metrics_regularizers_and_running_statistics(contexts):
    def build():
        small = regularizers.l2(0.01)
        return Sequential([L.Dense(5, kernel_regularizer=small, activity_regularizer=small, input_shape=(6,)),
                           L.BatchNormalization(), L.Activation('tanh'), zoo.head()])
    check(build, compiling('clipnorm', metrics=few_metrics), VECTORS, 'float32', contexts, kind='gpu', mode=None,
          test=False, sizes=(8, 7), compare=placed)
