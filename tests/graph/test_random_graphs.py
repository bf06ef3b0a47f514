"""Random graphs that are cut give the results of plain Theano, or are refused with the name of an op."""
import collections
import logging

from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
from hypothesis import given, note
from support.modes import PYTHON
from support.random_graphs import RandomGraph
from support.stages import compiled, n_stages, split
from support.strategies import RANDOMS, examples

OURS = theano.Mode('py', None)
SIZES = (7, 5, 2), (3, 1, 1)
REFUSED = 'refused'


def stages_of(graph):
    """Return the number of stages of a graph that gives the same results either way, or REFUSED."""
    try:
        program = partition(graph.inputs, graph.outputs)
    except CannotCut as error:
        assert any(word in str(error) for word in ('{', '(', 'the output ')), error  # it names an op
        return REFUSED
    plain = theano.function(graph.inputs, graph.outputs, no_default_updates=True, on_unused_input='ignore', mode=PYTHON)
    run = compiled(program, OURS)
    for sizes in SIZES:
        data = graph.data(sum(sizes))
        try:
            results = run(split(data, sizes))
        except AssertionError as error:
            if 'Assert{' in str(error):
                return REFUSED  # lengths that only the batch shows
            raise
        for i, (ours, whole) in enumerate(zip(results, plain(*data))):
            about = 'output %d, shards of %s' % (i, sizes)
            assert np.shape(ours) == np.shape(whole) and ours.dtype == whole.dtype, about
            np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-12 + 1e-10 * np.abs(whole).max(),
                                       err_msg=about)
    return n_stages(program)


def check(n):
    """Check n graphs; neither may too many be refused, nor too few be of a single stage."""
    counts = collections.Counter()

    @examples(n)
    @given(RANDOMS)
    def check_one(random):
        graph = RandomGraph(random)
        note(theano.printing.debugprint(graph.outputs, file='str'))
        counts[stages_of(graph)] += 1
    check_one()
    print('graphs by their number of stages: %s' % dict(sorted(counts.items(), key=str)))
    assert counts[REFUSED] < 0.25 * n, counts
    assert counts[1] > 0.2 * n, counts


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    # Theano logs an error where its optimiser gives up on a graph, and goes on.
    logging.getLogger('theano').setLevel(logging.CRITICAL)
    monkeypatch.setattr(theano.config, 'floatX', 'float64')
    yield
    logging.getLogger('theano').setLevel(logging.NOTSET)


def test_random_graphs():
    check(25)


@pytest.mark.slow
def test_300_random_graphs():
    check(300)
