"""Logical shards of Keras models: the same bits on any number of contexts, in fit, evaluate and predict."""
import hashlib
import os

import theano_mgpu as mgpu
from theano_mgpu.keras import multi_gpu_model

import cuda_on_cpu
import keras
import numpy as np
import pytest
from keras import backend as K
from keras import layers as L
from support.keras_equivalence import built
from support.keras_zoo import CLASSES, labels, noise, tokens
from support.processes import python
from support.standin import run
from theano.configparser import change_flags

N = 27  # the last batch of eight has three samples


def cnn():
    return keras.Sequential([L.Conv2D(4, 3, input_shape=(8, 8, 2)), L.BatchNormalization(), L.Activation('relu'),
                             L.MaxPooling2D(), L.Flatten(), L.Dropout(.3), L.Dense(CLASSES, activation='softmax')])


def dense():
    return keras.Sequential([L.Dense(9, activation='tanh', input_shape=(6,)), L.BatchNormalization(), L.Dropout(.3),
                             L.Dense(CLASSES, activation='softmax')])


def lstm():
    return keras.Sequential([L.Embedding(7, 5, mask_zero=True, input_length=6), L.LSTM(4, dropout=.2),
                             L.Dense(CLASSES, activation='softmax')])


DATA = {dense: noise(N, 6), cnn: noise(N, 8, 8, 2), lstm: tokens(N, 6)}


def everything(make, n, epochs, device='cpu'):
    """Train a model on n contexts; return its weights, the optimizer's, the history, evaluations and predictions."""
    mgpu.init(';'.join('dev%d->%s' % (i, device.format(i)) for i in range(n)))
    np.random.seed(4)
    model = multi_gpu_model(built(make), n)
    model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    x, y, weights = DATA[make], labels(N), np.linspace(.5, 1.5, N)
    history = model.fit(x, y, batch_size=8, epochs=epochs, sample_weight=weights, shuffle=False, verbose=0,
                        validation_data=(x[:11], y[:11])).history
    values = [np.array(history[name]) for name in sorted(history)]
    return values + [np.array(model.evaluate(x, y, 8, verbose=0)), model.predict(x, 8),
                     *K.batch_get_value(model.weights + model.optimizer.weights)]


def digest(make, *arguments):
    """Return one digest of `everything`."""
    values = everything(make, *arguments)
    return hashlib.md5(b''.join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


def test_three_contexts_give_the_bits_of_one(interpreted, contexts):
    check_bits(dense, (1, 3), 2)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize('make, counts', [
    (dense, (1, 2, 3, 4, 8)), (cnn, (1, 2, 3, 4, 8)), (lstm, (1, 2, 3, 4, 8))])
def test_any_number_of_contexts_gives_the_same_bits(make, counts, contexts):
    check_bits(make, counts, 50)


def check_bits(make, counts, epochs):
    """Check that numbers of contexts give the same bits; the last batch of an epoch has fewer samples than shards."""
    with change_flags(**{'mgpu.logical_shards': 8}):
        first, *others = [everything(make, n, epochs) for n in counts]
    for other in others:
        assert len(other) == len(first) > 10
        for one, two in zip(other, first):
            np.testing.assert_array_equal(one, two)


PROGRAM = '''
import sys
sys.path += %r
import test_keras_logical_shards as tests
for n in %r:
    print('digest', tests.digest(tests.%s, n, %d, %r))
'''
FOLDERS = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
FLAGS = 'floatX=float32,mgpu.logical_shards=8'
each_model = pytest.mark.parametrize('model', ['dense', 'cnn', 'lstm'])


def digests(printed, counts):
    """Return the digests that a program has printed, one for each number of contexts."""
    found = [line.split()[1] for line in printed if line.startswith('digest')]
    assert len(found) == len(counts)
    return found


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.needs_compiler
@each_model
def test_any_number_of_ranks_gives_the_same_bits(model, tmp_path):
    path, found = tmp_path / 'program.py', []
    path.write_text(PROGRAM % (FOLDERS, (1, 2), model, 20, 'cpu'))
    for start in ([], ['-m', 'theano_mgpu', 'launch', '-n', '2'], ['-m', 'theano_mgpu', 'launch', '-n', '3']):
        printed = python(*start, path, flags=FLAGS, KERAS_BACKEND='theano').stdout
        found += digests(printed.splitlines(), (1, 2))
    assert len(set(found)) == 1


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
@each_model
def test_any_number_of_cuda_devices_gives_the_same_bits(model):
    printed = run(PROGRAM % (FOLDERS, (1, 2, 4), model, 10, 'cuda{}'), 4, FLAGS.partition(',')[2])
    assert len(set(digests(printed, (1, 2, 4)))) == 1
