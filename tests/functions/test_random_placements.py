"""Random models, placed at random, give the results of plain Theano on one device."""
import logging
import warnings

from theano_mgpu.errors import MgpuWarning

import pytest
import theano
from support.placed_models import Training, assert_close
from support.random_placements import RandomModel

SIZES = 7, 4, 1


@pytest.fixture(autouse=True)
def float64():
    # Theano logs an error where its optimiser gives up on a graph, and goes on.
    logging.getLogger('theano').setLevel(logging.CRITICAL)
    with theano.configparser.change_flags(floatX='float64'):
        yield
    logging.getLogger('theano').setLevel(logging.NOTSET)


def is_divided(seed, contexts):
    """Compare a model with one device; return whether its batches were divided, if they were to be."""
    alone, m = RandomModel(seed), RandomModel(seed, contexts)
    training = Training(m, m.how, m.updates, **m.options)
    plain = Training(alone, updates=m.updates)
    for i, (ours, theirs) in enumerate(zip(training.run(SIZES), plain.run(SIZES))):
        assert_close(ours, theirs, about='step %d' % i)
    assert_close(training.values(), plain.values(), about='after the steps')
    return not training.step.refused


@pytest.mark.parametrize('seeds', [range(10)] + [
    pytest.param(range(first, first + 18), marks=pytest.mark.slow) for first in range(10, 100, 18)],
    ids=lambda seeds: '%d to %d' % (seeds[0], seeds[-1]))
def test_random_placements(contexts, seeds):
    six, n_divided = contexts('cpu', 6), 0
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore', MgpuWarning)  # that a graph cannot be divided
                n_divided += is_divided(seed, six)
        except Exception as error:
            model = RandomModel(seed, six)
            graph = theano.printing.debugprint(model.loss, file='str')
            raise AssertionError('random model of seed %d, compiled with %s:\n%s'
                                 % (seed, model.options, graph)) from error
    assert n_divided > 0.7 * len(seeds)
