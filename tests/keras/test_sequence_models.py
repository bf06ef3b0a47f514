"""Attention of several heads, chains of tags, loops over samples and CTC, over contexts and in plain Keras."""
from theano_mgpu.keras import multi_gpu_model

import numpy as np
import pytest
from keras.optimizers import SGD
from support import keras_sequences as models
from support.keras_equivalence import QUICK, RAGGED, assert_equal, built, everything, floatx, trained
from support.keras_zoo import labels, noise, one_hot, tokens
from support.modes import LAZY
from theano.configparser import change_flags

# A note says that a model runs on one context.
pytestmark = pytest.mark.filterwarnings('error::theano_mgpu.MgpuWarning')

N = sum(RAGGED)
QUICK_ONES = 'maps',
CASES = {
    'transformer': (models.transformer, [[tokens(N, 5)], [one_hot(N)]], 'categorical_crossentropy'),
    'chain': (lambda: models.tagger(False), [[tokens(N, 5)], [np.eye(3)[tokens(N, 5, 3)]]], None),
    'chain with masks': (lambda: models.tagger(True), [[tokens(N, 5)], [np.eye(3)[tokens(N, 5, 3)]]], None),
    'maps': (models.mapped, [[noise(N, 5, 4)], [labels(N)[:, None]]], 'sparse_categorical_crossentropy'),
    'ctc': (models.speech, models.speech_data(N), lambda true, cost: cost),
}


# The graphs of the others are in tests/graph/test_attention_heads.py and tests/graph/test_loops_over_samples.py, too.
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_ONES))
                                  for name in CASES])
def test_a_model_trains_and_tests_as_plain_keras(name, contexts):
    build, data, loss = CASES[name]
    contexts('cpu', 3)
    found = []
    with floatx('float64'), change_flags(mode=LAZY):
        for gpus in (0, 3):
            np.random.seed(3)
            model = template = built(build)
            if gpus:
                model = multi_gpu_model(template, gpus=gpus)
            model.compile(SGD(0.05, momentum=0.9), loss or template.chain_loss, mode=QUICK)
            found.append(everything(model, trained(model, data, test=name != 'ctc')))
            if name != 'ctc':
                found[-1].append(('predictions', model.predict(data[0], batch_size=5)))
    assert_equal(*found, 1e-10)
