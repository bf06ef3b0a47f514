"""The main kinds of model on two OpenCL (or CUDA) contexts against plain Keras on the CPU."""
import theano_mgpu as mgpu
from theano_mgpu.audit import ON_WRONG_CONTEXT
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from conftest import needs_compiler
from keras import regularizers

from . import zoo
from .equivalence import COMPILED, built, check
from .test_exact import compiling
from .zoo import COMPILED_MODELS, MODELS, VECTORS, N, dense, noise, one_hot

pytestmark = needs_compiler
NAMES = ['shared layer', 'nested', 'lstm, masking', 'add_loss, add_metric', 'conv2d', 'conv2dtranspose']


@pytest.mark.parametrize('name', NAMES)
def test_models(name, contexts):
    build, data = (MODELS.get(name) or COMPILED_MODELS[name])
    check(build, compiling(metrics=['accuracy']), data, 'float32', contexts, kind='gpu', mode=COMPILED, test=False)


def test_evaluation_and_prediction(contexts):
    contexts('gpu', 2)
    plain, model = built(dense), multi_gpu_model(built(dense))
    for m in (plain, model):
        m.compile('sgd', 'mse', metrics=['mae'], mode=COMPILED)
    x, y = VECTORS[0][0][:11], VECTORS[1][0][:11]
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=4, verbose=0),
                               plain.evaluate(x, y, batch_size=4, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(x, batch_size=4), plain.predict(x, batch_size=4), rtol=1e-4)


def test_several_inputs_and_outputs(contexts):
    data = [[noise(N, 6), noise(N, 4, seed=3)], [one_hot(N), noise(N, 2, seed=4)]]
    losses = {'kind': keras.losses.CategoricalCrossentropy(reduction='sum'), 'place': 'mse'}
    check(zoo.functional, compiling(loss=losses, loss_weights={'kind': 0.3, 'place': 2.0}, metrics=['mae']), data,
          'float32', contexts, kind='gpu', mode=COMPILED, test=False)


def few_metrics():
    return [keras.metrics.Precision(), keras.metrics.AUC(num_thresholds=5)]


def test_metrics_and_regularizers(contexts):
    check(lambda: dense(kernel_regularizer=regularizers.l2(0.1), activity_regularizer=regularizers.l2(0.01)),
          compiling('clipnorm', metrics=few_metrics), VECTORS, 'float32', contexts, kind='gpu', mode=COMPILED,
          test=False)


def test_nothing_runs_on_a_wrong_context(contexts):
    contexts('gpu', 2)
    model = multi_gpu_model(dense())
    model.compile('adam', 'categorical_crossentropy', mode=COMPILED)
    model._make_train_function()
    entries = mgpu.audit(model.train_function.function)
    assert entries and not [entry for entry in entries if entry.where == ON_WRONG_CONTEXT]
