"""Messages name the line of the script that made an op, and no line of this package, which rebuilds each graph."""
import inspect
import os

import theano_mgpu as mgpu
from theano_mgpu.compat import kept_graphs
from theano_mgpu.errors import named

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from theano.configparser import change_flags

pytestmark = pytest.mark.verified
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


@pytest.mark.slow_with('batch_normalised-options6-optimised', 'loop-options7-as it is')
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


class Halves(theano.Op):
    """An op of a script, without a text of its own."""

    itypes, otypes, mgpu_pure = [T.fmatrix], [T.fmatrix], True

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0] / 2


def unnamed():
    return T.fmatrix()  # here


def data_of_a_script():
    return theano.shared(np.ones((40, 3), 'float32'), 'X')[:20]  # here


@pytest.mark.unverified
def test_messages_name_what_a_user_finds(cpu2):
    """They had "<__main__.Halves object at 0x7f66a286ae10>" and "<TensorType(float32, matrix)>"."""
    x, rows, w = unnamed(), data_of_a_script(), T.fvector('w')
    report = mgpu.enable(always=True, tell=str)
    try:
        f = theano.function([x], Halves()(x).sum(), mode=PYTHON)
        g = theano.function([w], Halves()(rows * w).sum(), mode=PYTHON)
    finally:
        mgpu.disable()
    f(BATCH)
    g(BATCH[0])
    own, of_data = [usage.why for usage in report.usages]
    assert 'how Halves depends on single samples: Halves(' in own and 'object at' not in own
    assert 'by the 40 rows of X: ' in of_data and line_in(data_of_a_script) in of_data, of_data
    step = mgpu.function([x, unnamed()], x.sum(), mode=PYTHON)
    with pytest.raises(mgpu.BatchError) as error:
        step(BATCH, BATCH[1:])
    assert str(error.value).count(line_in(unnamed)) >= 2, str(error.value)
    for call in mgpu.audit, kept_graphs._check, lambda function: mgpu.Checkpoint('folder', [function.maker]):
        with pytest.raises(Exception) as error:
            call(f)
        assert ' at 0x' not in str(error.value)
    assert named(f).startswith(__file__ + ':') and named([f.maker]) == '[FunctionMaker]'
