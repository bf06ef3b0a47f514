"""Messages name the line of the script that made an op, and no line of this package, which rebuilds each graph."""
import inspect
import os

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from theano.configparser import change_flags

OPTIMISED = theano.Mode('py', 'fast_run').excluding('constant_folding', 'topo_constant_folding')
BATCH = np.ones((8, 3), 'float32')
BATCH[5] = 0
PACKAGE = os.path.dirname(mgpu.__file__)


@pytest.fixture(autouse=True)
def traces():
    """Have Theano record the lines of variables, which .ci/quickly turns off."""
    with change_flags(**{'traceback.limit': 8, 'mgpu.check': 1}):
        yield


def logarithm(x, w):
    return T.log(T.dot(x, w)).mean()  # here


def later_stage(x, w):
    shares = x / x.sum(axis=0)
    total = T.log(shares).sum()  # here
    return total * w.sum()


def gradient_alone(x, w):
    return T.sqrt(T.dot(x, w)).mean()  # here


def whole_batch(x, w):
    return w.sum() / (T.dot(x, w) * 0).sum()  # here


def batch_normalised(x, w):
    normal = T.nnet.bn.batch_normalization_train(x, T.ones((3,)), T.zeros((3,)), 'per-activation')[0]
    wide = T.exp(1e38 * (2 + normal))  # here
    return T.dot(wide, w).mean()


def loop(x, w):
    rows = theano.scan(lambda row: T.log(T.dot(row, w)), x)[0]  # here
    return rows.mean()


def placed(x, w):
    with mgpu.device('host1'):
        hidden = T.log(T.dot(x, w))  # here
    with mgpu.device('host0'):
        return hidden.mean()


def placed_gradient(x, w):
    with mgpu.device('host1'):
        hidden = T.sqrt(T.dot(x, w))  # here
    with mgpu.device('host0'):
        return hidden.mean()


def line_in(function):
    """Return the line that a function marks, as a message names it."""
    lines, first = inspect.getsourcelines(function)
    number, = [i for i, line in enumerate(lines) if '# here' in line]
    return '%s, line %d: %s' % (__file__, first + number, lines[number].strip())


@pytest.mark.parametrize('mode', [PYTHON, OPTIMISED], ids=['as it is', 'optimised'])
@pytest.mark.parametrize('loss, options', [
    (logarithm, {}), (logarithm, {'micro_batches': 2}), (logarithm, {'update_on': 'sharded'}), (later_stage, {}),
    (gradient_alone, {}), (whole_batch, {}), (batch_normalised, {}), (loop, {}), (placed, {}),
    (placed_gradient, {})])
def test_values_that_are_not_finite(loss, options, mode, cpu2):
    x, w = T.fmatrix('x'), theano.shared(np.ones(3, 'float32'), name='w')
    step = mgpu.training_function([x], loss(x, w), [w], lambda gradients: {w: T.cast(w - gradients[0], 'float32')},
                                  mode=mode, **options)
    with pytest.raises(mgpu.NonFiniteError) as error:
        step(BATCH)
    assert line_in(loss) in str(error.value) and PACKAGE not in str(error.value)


def mismatch(x, w):
    return T.dot(T.tanh(x)[:, 1:], w).mean()  # here


@pytest.mark.unverified  # plain Theano, which computes first then, has lost the line of an optimised op
@pytest.mark.parametrize('mode', [PYTHON, OPTIMISED], ids=['as it is', 'optimised'])
def test_errors_of_theano(mode, cpu2):
    """Theano's own errors end with "Backtrace when the node is created"."""
    x, w = T.fmatrix('x'), theano.shared(np.ones(3, 'float32'), name='w')
    step = mgpu.function([x], mismatch(x, w), mode=mode)
    with pytest.raises(ValueError) as error:
        step(BATCH)
    text = str(error.value).partition('Backtrace when the node is created')[2]
    assert line_in(mismatch).partition(', line')[0] in text and 'mismatch' in text, str(error.value)
    assert PACKAGE not in text
