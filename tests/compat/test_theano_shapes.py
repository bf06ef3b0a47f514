"""The lengths of tensors in Theano's optimiser, after the patch of theano_mgpu."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import theano
import theano.tensor as T
from theano.gof import FunctionGraph
from theano.gof.graph import ancestors
from theano.tensor.opt import ShapeFeature

x, y, z = T.dvectors('xyz')
FAST = theano.Mode('py', 'fast_run')
VALUES = np.arange(6.), np.arange(4.), np.arange(4.) + 1


@pytest.mark.parametrize('others, made_of', [((0, 0), [set(), {0}]), ((1, 0), [{1}, set()])], ids=['one', 'two'])
def test_no_length_is_expressed_by_itself(others, made_of):
    """The optimisation went along nodes in a circle, for minutes, until the memory was full."""
    tensors = [T.exp(y), T.exp(z)]
    filled = [T.fill(x[:tensors[other].shape[0]], tensor) for other, tensor in zip(others, tensors)]
    graph = FunctionGraph([x, y, z], [*tensors, *filled], features=[ShapeFeature()])
    a, b, *parts = graph.outputs
    graph.replace_all(list(zip(parts, (a, b))))
    found = [ancestors(graph.shape_feature.shape_of[each]) for each in (a, b)]
    assert [{i for i in (0, 1) if (a, b)[i] in each} for each in found] == made_of
    # Without the patch, this would not end.
    f = theano.function([x, y, z], [each.sum() / each.shape[0] for each in filled], mode=FAST)
    np.testing.assert_allclose(f(*VALUES), [np.exp(value).mean() for value in VALUES[1:]])


def test_gradients_of_a_part_are_divided(cpu2):
    """A replica cuts its rows from the part, and refuses them unless they are as many as those that it adds."""
    part = x[:4].dimshuffle('x', 0).sum(axis=0) ** 2
    gradient = T.grad((y * part).sum(), x)
    f = mgpu.function([x, y], gradient, samples={y: 0}, mode=FAST)
    assert f.refused is None
    np.testing.assert_allclose(f(*VALUES[:2]), [*2 * VALUES[0][:4] * VALUES[1], 0, 0])
