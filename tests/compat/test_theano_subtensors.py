"""Parts of tensors: gradients of parts are stored in zeros, not added to them."""
import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.tensor.subtensor import IncSubtensor

x, parts = T.dmatrix(), [T.dmatrix(), T.dmatrix()]
FAST = theano.Mode('py', 'fast_run')


def writes_of(output, inputs):
    """Return a function, and whether each op that writes to a part stores, rather than adds."""
    f = theano.function(inputs, output, mode=FAST)
    return f, [node.op.set_instead_of_inc for node in f.maker.fgraph.toposort() if isinstance(node.op, IncSubtensor)]


def test_gradients_of_parts_are_stored():
    cost = T.exp(x[:, :2]).sum() + T.sqr(x[:, 2:5]).sum() + T.tanh(x[:, 5:]).sum()
    f, stored = writes_of(T.grad(cost, x), [x])
    assert stored == [True] * 3
    value = np.random.RandomState(0).randn(4, 9)
    np.testing.assert_allclose(f(value), np.concatenate([
        np.exp(value[:, :2]), 2 * value[:, 2:5], 1 / np.cosh(value[:, 5:]) ** 2], axis=1))


@pytest.mark.parametrize('first, second', [
    (np.s_[:, :3], np.s_[:, 2:5]),    # an element in common
    (np.s_[:, :3], np.s_[2:5]),       # on different axes
    (np.s_[:, :3], np.s_[:, -3:]),    # from the end
    (np.s_[:, ::2], np.s_[:, 1::2])], ids=str)
def test_parts_that_may_meet_are_added(first, second):
    f, stored = writes_of(T.inc_subtensor(T.inc_subtensor(T.zeros_like(x)[first], parts[0])[second], parts[1]),
                          [x, *parts])
    assert stored == [first != np.s_[:, ::2] and stored[0], False]
    given = np.ones((5, 5))
    expected, ones = np.zeros((5, 5)), [np.ones_like(given[each]) for each in (first, second)]
    expected[first] += 1
    expected[second] += 1
    np.testing.assert_array_equal(f(given, *ones), expected)


def test_a_part_of_what_is_not_zero_is_added():
    f, stored = writes_of(T.inc_subtensor(T.ones_like(x)[:, :2], parts[0]), [x, parts[0]])
    assert stored == [False]
    np.testing.assert_array_equal(f(np.zeros((1, 3)), np.ones((1, 2))), [[2, 2, 1]])
