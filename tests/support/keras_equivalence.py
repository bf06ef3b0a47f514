"""A comparison of all results of training on several contexts and with plain Keras."""
import contextlib

from theano_mgpu.keras import multi_gpu_model

import numpy as np
import pytest
import theano
from keras import backend as K

from .keras_zoo import OPTIMIZERS
from .modes import PYTHON

TOLERANCE = {'float32': 1e-5, 'float64': 1e-10}
RAGGED = (7, 5, 8, 3, 1)
# Interpreted: the graphs are compared, and compiling each would take minutes.
QUICK = PYTHON
COMPILED = theano.Mode(linker='cvm', optimizer='fast_compile')
# Each of the two numbers of contexts, each of the two types.
COUNTS = {'float32': [2], 'float64': [3]}
# float64 shows more, but all that it needs is compiled for these tests alone: in `make test-slow`.
DTYPES = pytest.mark.parametrize('dtype', ['float32', pytest.param('float64', marks=pytest.mark.slow)])


@contextlib.contextmanager
def floatx(dtype):
    before = K.floatx(), theano.config.floatX
    K.set_floatx(dtype)
    theano.config.floatX = dtype
    try:
        yield
    finally:
        K.set_floatx(before[0])
        theano.config.floatX = before[1]


def built(build, seed=1):
    """Return a model with the same weights at each call."""
    model = build()
    rng = np.random.RandomState(seed)
    for weight in model.weights:
        if 'moving' not in weight.name:  # a variance is positive
            K.set_value(weight, rng.randn(*K.int_shape(weight)) * 0.3)
    return model


def batches(data, sizes):
    """Yield slices of (inputs, targets), lists of arrays, one batch a size."""
    start = 0
    for size in sizes:
        yield [[array[start:start + size] for array in arrays] for arrays in data]
        start += size


def trained(model, data, sizes=RAGGED, test=True, **kwargs):
    """Return losses and metrics of each step, then of a test on the last batch."""
    history = []
    for x, y, *weights in batches(data, sizes):
        if weights:
            kwargs['sample_weight'] = weights[0]
        history.append(model.train_on_batch(x, y, reset_metrics=False, **kwargs))
    kwargs.pop('class_weight', None)
    if test:
        history.append(model.test_on_batch(x, y, **kwargs))
    return [np.ravel(values) for values in history]


def everything(model, history):
    """Return the results to compare: names and arrays."""
    found = [('step %d' % i, values) for i, values in enumerate(history)]
    return found + values(model.weights) + values(model.optimizer.weights)


def values(variables):
    """Return names and values of shared variables."""
    return [(str(variable), K.get_value(variable)) for variable in variables]


def assert_equal(parallel, plain, tolerance):
    assert len(parallel) == len(plain)
    for (name, value), (_, expected) in zip(parallel, plain):
        scale = max(1e-30, np.abs(expected).max()) if np.size(expected) else 1
        assert np.shape(value) == np.shape(expected), name
        np.testing.assert_allclose(np.asarray(value, 'float64') / scale, np.asarray(expected, 'float64') / scale,
                                   rtol=0, atol=tolerance, err_msg=name)


def compiling(optimizer='adam', loss='categorical_crossentropy', **others):
    """Return a function that makes the arguments of compile afresh for each model."""
    def make():
        made = {name: value() if name in ('metrics', 'weighted_metrics') and callable(value) else value
                for name, value in others.items()}
        return dict(optimizer=OPTIMIZERS[optimizer](), loss=loss, **made)
    return make


def check(build, compile_args, data, dtype, contexts, kind='cpu', counts=None, sizes=RAGGED, mode=QUICK,
          compare=everything, **kwargs):
    """Compare plain Keras with the add-on on each number of contexts."""
    with floatx(dtype):
        data = [[array.astype(dtype) if array.dtype.kind == 'f' else array for array in arrays] for arrays in data]
        plain = built(build)
        plain.compile(mode=mode, **compile_args())
        expected = compare(plain, trained(plain, data, sizes, **kwargs))
        for n in counts or COUNTS[dtype]:
            contexts(kind, n)
            template = built(build)
            parallel = multi_gpu_model(template, gpus=n)
            parallel.compile(mode=mode, **compile_args())
            actual = compare(parallel, trained(parallel, data, sizes, **kwargs))
            assert_equal(actual, expected, TOLERANCE[dtype])
            for own, its in zip(template.get_weights(), parallel.get_weights()):
                np.testing.assert_array_equal(own, its)
