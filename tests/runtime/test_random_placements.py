"""Random models, placed at random, give the results of plain Theano on one device."""
import copy
import logging
import warnings

from theano_mgpu.errors import MgpuWarning

import pytest
import theano
from hypothesis import given, note
from support.placed_models import Training, assert_close
from support.random_placements import RandomModel
from support.strategies import RANDOMS, examples

SIZES = 7, 4, 1


@pytest.fixture(autouse=True)
def float64():
    # Theano logs an error where its optimiser gives up on a graph, and goes on.
    logging.getLogger('theano').setLevel(logging.CRITICAL)
    with theano.configparser.change_flags(floatX='float64'):
        yield
    logging.getLogger('theano').setLevel(logging.NOTSET)


def is_divided(random, contexts):
    """Compare a model with one device; return whether its batches were divided, if they were to be."""
    alone, m = RandomModel(copy.copy(random)), RandomModel(copy.copy(random), contexts)
    note('%s, compiled with %s:\n%s' % (m.how, m.options, theano.printing.debugprint(m.loss, file='str')))
    training = Training(m, m.how, m.updates, **m.options)
    plain = Training(alone, updates=m.updates)
    for i, (ours, theirs) in enumerate(zip(training.run(SIZES), plain.run(SIZES))):
        assert_close(ours, theirs, about='step %d' % i)
    assert_close(training.values(), plain.values(), about='after the steps')
    return not training.step.refused


@pytest.mark.parametrize('n', [8, pytest.param(90, marks=pytest.mark.slow)])
def test_random_placements(contexts, n):
    six, divided = contexts('cpu', 6), []

    @examples(n)
    @given(RANDOMS)
    def check_one(random):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', MgpuWarning)  # that a graph cannot be divided
            divided.append(is_divided(random, six))
    check_one()
    assert sum(divided) > 0.7 * n
