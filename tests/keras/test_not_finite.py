"""The flag `mgpu.check` on Keras models: the layer, the input and its samples, or the weight, of the first NaN."""
import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import keras
import numpy as np
import pytest
import theano
from keras import backend as K
from keras.layers import Dense, Lambda
from keras.models import Sequential
from theano.configparser import change_flags


@pytest.fixture(autouse=True)
def check():
    with change_flags(**{'mgpu.check': 1, 'traceback.limit': 8}):
        yield


def error_of(layers, data=(), targets=(), weight=None):
    """Return the text of the error of a batch of 8 samples, some of which have other values."""
    model = Sequential([Dense(4, input_shape=(3,), name='inner'), *layers, Dense(1, name='last')])
    if weight is not None:
        kernel, *others = model.get_weights()
        kernel[1, 2] = weight
        model.set_weights([kernel, *others])
    x, y = np.ones((8, 3), 'float32'), np.ones((8, 1), 'float32')
    for array, values in ((x, data), (y, targets)):
        for i, value in values:
            array[i] = value
    parallel = multi_gpu_model(model)
    parallel.compile('sgd', 'mse')
    with pytest.raises(mgpu.NonFiniteError) as error:
        parallel.train_on_batch(x, y)
    return str(error.value)


@pytest.mark.slow
def test_a_layer(cpu2):
    """A Lambda was reported as "near inner/kernel and inner/bias"."""
    text = error_of([Lambda(lambda values: K.log(values - 1000), output_shape=(4,), name='mylog')])
    assert ', in layer mylog, near inner' in text and '. Samples are numbered from 0' in text, text
    assert __file__ in text and 'K.log(values - 1000)' in text


@pytest.mark.slow
def test_a_layer_of_keras(cpu2):
    text = error_of([keras.layers.Activation('exponential', name='grow')], [(slice(None), 0), (3, 1)], weight=1e30)
    assert ', in layer grow, near ' in text and 'in sample 3 of the batch' in text and __file__ in text, text


def test_the_last_layer(cpu2):
    """Theano fuses it with the loss, and the layer before it was named in its place."""
    model = Sequential([Dense(1, input_shape=(3,), name='inner'), Lambda(K.log, output_shape=(1,), name='mylog')])
    model.set_weights([np.ones((3, 1)), [-9]])
    parallel = multi_gpu_model(model)
    parallel.compile('sgd', 'mse', mode=theano.Mode('py', 'fast_run'))
    with pytest.raises(mgpu.NonFiniteError, match=r'Log\(-6.0\) = nan in .*, near layer mylog and .* or of a negative'):
        parallel.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))


def test_a_loss_is_near_a_layer(cpu2):
    text = error_of([], [(slice(None), 1e30)])
    assert ', near layer last and ' in text and ', in layer' not in text, text


@pytest.mark.slow_but_with('values2*')
@pytest.mark.parametrize('values, how', [
    ([(5, np.nan)], 'NaN already in sample 5'), ([(2, np.inf)], 'infinity already in sample 2'),
    ([(0, np.nan), (3, -np.inf)], 'NaN and infinity already in samples 0, 3')])
def test_data(values, how, cpu2):
    """The parts of 4 samples have the shape of the transposed kernel, so that the samples were not named."""
    text = error_of([], values)
    assert ': inner_input had %s of the batch, on host' % how in text, text
    assert 'No value was changed. Look for such numbers in the data' in text
    assert ': last_target had NaN already in sample 7 of the batch, on host1' in error_of([], targets=[(7, np.nan)])


def test_a_weight(cpu2):
    """A weight has no samples."""
    text = error_of([], weight=np.nan)
    assert ': inner/kernel had NaN already (1 of 12 numbers, the first at [1, 2]), on host0->cpu. No ' in text, text
    assert 'Set it to finite values, or go on from a checkpoint' in text
