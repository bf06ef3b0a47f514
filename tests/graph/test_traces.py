"""The lines of the user's script stay with a graph that this package rebuilds."""
import theano_mgpu.graph.analysis.rules  # noqa: F401
from theano_mgpu.graph import traces
from theano_mgpu.graph.analysis.shards import Shards
from theano_mgpu.graph.rewrites import inlined

import pytest
import theano
import theano.tensor as T
from theano.configparser import change_flags
from theano.gof.graph import ancestors


@pytest.fixture(autouse=True)
def lines():
    with change_flags(**{'traceback.limit': 8}):
        yield


def check(variables):
    """Check that no line of the package made an op of a graph."""
    ops = [variable for variable in ancestors(variables) if variable.owner is not None]
    assert ops and not list(filter(traces.is_ours, ops))
    assert {traces.user_frame(variable)[0] for variable in variables} == {__file__}


@pytest.mark.parametrize('make', [
    lambda x, w: x - x.mean(axis=0), lambda x, w: T.alloc(w, x.shape[0], 3) * x, lambda x, w: T.dot(x.T, x),
    lambda x, w: x.reshape((x.shape[0] * 3,)) * x.std(), lambda x, w: T.nnet.softmax(x).sum(axis=0)])
def test_shards(make):
    """Rules make ops of other types, and further ops."""
    x, w = T.fmatrix('x'), theano.shared(0, 'w')
    result = make(x, w)
    shards = Shards([x], [result])
    check([shards.outputs[0].variable, *(value for value, _ in shards.exchanges.values())])


def test_inner_graphs():
    x = T.fvector('x')
    square = theano.OpFromGraph([x], [T.exp(x) ** 2], inline=False)
    result, = inlined([square(x) + 1])
    check([result])


def test_a_line_is_the_nearest_one():
    x = T.fvector('x')
    result = T.exp(x)
    result.tag.trace = []
    assert traces.line_of(result.owner).startswith(' (%s, line ' % __file__)
    above = T.log(result)
    above.tag.trace = [[(traces.PACKAGE + 'x.py', 1, 'f', 'y = 1')], [(theano.__file__, 2, 'f', 'x')]]
    assert traces.is_ours(above) and traces.user_frame(above) is None
    assert "x = T.fvector('x')" in traces.line_of(above.owner)
    traces.keep_trace_above([above], T.tanh(x), {result})
    assert "T.tanh(x)" in traces.line_of(above.owner)
