"""Drawn programs over lengths that are not the batch's give the values of plain Theano, or are refused."""
import collections
import random

from theano_mgpu.errors import NOT_DIVISIBLE
from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
from support.length_programs import LengthProgram
from support.stages import compiled, split
from theano.gof.vm import VM_Linker

# Branches are lazy, as on devices. The optimiser removes values of which only the shape is read, with their errors.
LAZY = VM_Linker(use_cloop=False, c_thunks=False, lazy=True)
PLAIN, OPTIMISED = theano.Mode(LAZY, None), theano.Mode(LAZY, 'fast_run')
SHARES = [(1, 1), (2, 1), (1, 1, 1), (3, 2), (2, 2), (1, 2, 3)]
WHOLE, REFUSED, FAILED, DIVIDED = 'whole', 'refused for the batch', 'an error, as on one device', 'divided'


def result(function, args):
    """Return the outputs of a function, or its error."""
    try:
        return function(*args)
    except Exception as error:  # whatever Theano raises
        return error


def outcome(seed):
    """Return what becomes of a drawn program, which gives the values of one device if it is divided.

    Where one device has an error without optimisation, and none with it, either is right.
    """
    source = random.Random(seed)
    sizes = source.choice(SHARES)
    try:
        program = LengthProgram(source, sum(sizes))
    except (TypeError, ValueError, IndexError, AssertionError, theano.gradient.DisconnectedInputError):
        return 'none'  # Theano does not build it
    try:
        cut = partition(program.inputs, program.outputs)
    except CannotCut:
        return WHOLE
    def on_one_device(mode):
        return result(theano.function(program.inputs, program.outputs, on_unused_input='ignore', mode=mode), data)
    data = program.data()
    results, expected = result(compiled(cut, PLAIN), [split(data, sizes)]), on_one_device(PLAIN)
    if isinstance(results, Exception):
        if isinstance(expected, Exception):
            return FAILED
        assert NOT_DIVISIBLE in str(results), results
        return REFUSED
    if isinstance(expected, Exception):
        expected = on_one_device(OPTIMISED)
    assert not isinstance(expected, Exception), 'one device has an error: %s' % expected
    for ours, whole in zip(results, expected):
        assert np.shape(ours) == np.shape(whole)
        np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-10)
    return DIVIDED


def check(seeds):
    """Check the programs of these seeds; enough of them have to be divided."""
    counts, wrong = collections.Counter(), {}
    for seed in seeds:
        try:
            counts[outcome(seed)] += 1
        except AssertionError as error:
            wrong[seed] = str(error)[:300]
    print(counts)
    assert not wrong, '%d of %d programs, by seed: %s' % (len(wrong), len(seeds), list(wrong.items())[:5])
    assert counts[DIVIDED] > 0.25 * len(seeds), counts


@pytest.fixture(autouse=True)
def float64(monkeypatch):
    monkeypatch.setattr(theano.config, 'floatX', 'float64')


def test_drawn_lengths():
    check(range(60))


@pytest.mark.slow
@pytest.mark.parametrize('part', range(5))
def test_2500_drawn_lengths(part):
    check(range(500 * part, 500 * part + 500))
