"""Models whose samples depend on each other: 20 ragged steps are the same as in plain Keras, everywhere."""
import os

from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
from resnet import resnet
from sklearn.datasets import load_digits
from support import keras_coupled as coupled
from support import keras_rank_jobs as rank_jobs
from support.keras_equivalence import DTYPES, QUICK, assert_equal, floatx
from support.launch import INTERPRETED, arrays, launch

TOLERANCE = {'float32': 1e-5, 'float64': 1e-9}
pytestmark = pytest.mark.filterwarnings('error::theano_mgpu.MgpuWarning')
MODELS = pytest.mark.parametrize('name', list(coupled.MODELS))


def check(name, dtype, contexts, kind, counts, mode):
    with floatx(dtype):
        expected = coupled.train(name, dtype, mode, gpus=0)
        for n in counts:
            contexts(kind, n)
            assert_equal(coupled.train(name, dtype, mode), expected, TOLERANCE[dtype])


@pytest.mark.slow_but_with('float32-dice, f1')
@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name == 'lstm with masks'))
                                  for name in coupled.MODELS])
@DTYPES
def test_on_the_host(name, dtype, contexts):
    check(name, dtype, contexts, 'cpu', [2, 3] if dtype == 'float64' else [3], QUICK)


@pytest.mark.opencl
@pytest.mark.cuda
@pytest.mark.slow
@MODELS
@pytest.mark.parametrize('n', [2, 3])
def test_on_devices(name, n, contexts):
    check(name, 'float32', contexts, 'gpu', [n], None)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.cuda)])
def test_a_resnet_of_20_layers_has_the_history_of_one_device(kind, contexts):
    """Two epochs use scanned digits of 8x8; in float32 the last bit of an image moves the losses by 2e-4, too."""
    digits = load_digits()
    x, y = digits.images[:512, :, :, None] / 16, np.eye(10)[digits.target[:512]]

    def history(n):
        contexts(kind, n)
        np.random.seed(1)
        model = resnet(8, 4, channels=1)
        if kind == 'gpu' or n > 1:  # on the host one context is plain Keras
            model = multi_gpu_model(model, gpus=n)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), 'categorical_crossentropy', metrics=['accuracy'])
        return model.fit(x, y, batch_size=60, epochs=2, validation_split=0.25, verbose=0).history

    with floatx('float64'):
        one, two = history(1), history(2)
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.mpi
def test_over_ranks(tmp_path):
    launch(2, 'coupled', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', job=os.path.abspath(rank_jobs.__file__),
           flags=INTERPRETED)
    found = iter(arrays(tmp_path / 'ranks.npz'))
    with floatx('float64'):
        for name in coupled.MODELS:
            for what, value in coupled.train(name, 'float64', QUICK, gpus=0):
                scale = np.abs(value).max() if np.size(value) else 1
                np.testing.assert_allclose(next(found), value, rtol=0, atol=1e-9 * scale, err_msg=name + ' ' + what)
    assert next(found, None) is None
