"""Random graphs that are cut give the results of plain Theano, or are refused with the name of an op."""
import collections
import logging

from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
from support.modes import PYTHON
from support.random_graphs import RandomGraph
from support.stages import compiled, n_stages, split

OURS = theano.Mode('py', None)
SIZES = (7, 5, 2), (3, 1, 1)
REFUSED = 'refused'


def stages_of(seed):
    """Return the number of stages of a random graph that gives the same either way, or REFUSED."""
    graph = RandomGraph(seed)
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
            found = run(split(data, sizes))
        except AssertionError as error:
            if 'Assert{' in str(error):
                return REFUSED  # lengths that only the batch shows
            raise
        for i, (ours, whole) in enumerate(zip(found, plain(*data))):
            about = 'seed %d, output %d, shards of %s' % (seed, i, sizes)
            assert np.shape(ours) == np.shape(whole) and ours.dtype == whole.dtype, about
            np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-12 + 1e-10 * np.abs(whole).max(),
                                       err_msg=about)
    return n_stages(program)


def check(seeds):
    found = collections.Counter()
    for seed in seeds:
        try:
            found[stages_of(seed)] += 1
        except Exception as error:
            graph = theano.printing.debugprint(RandomGraph(seed).outputs, file='str')
            raise AssertionError('random graph of seed %d:\n%s' % (seed, graph)) from error
    print('graphs by their number of stages: %s' % dict(sorted(found.items(), key=str)))
    assert found[REFUSED] < 0.25 * len(seeds), found
    assert found[1] > 0.2 * len(seeds), found


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    # Theano logs an error where its optimiser gives up on a graph, and goes on.
    logging.getLogger('theano').setLevel(logging.CRITICAL)
    monkeypatch.setattr(theano.config, 'floatX', 'float64')
    yield
    logging.getLogger('theano').setLevel(logging.NOTSET)


def test_20_random_graphs():
    check(range(80, 100))


@pytest.mark.slow
def test_300_random_graphs():
    check([*range(80), *range(100, 320)])
