"""Loops that take one sample after the other: each replica takes its own samples, if no turn needs another one."""
from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import numpy as np
import pytest
import theano
import theano.tensor as T
from test_analysis import DATA, PLAIN, check, labels, s, v, w, with_gradients, words, x
from theano.configparser import change_flags
from theano.sandbox.rng_mrg import MRG_RandomStreams

n = x.shape[0]


def each(function, *sequences, **options):
    return theano.map(function, list(sequences), mode=PLAIN, **options)[0]


def longest(a, length):
    """Return the sum over as many steps of a sample as it has."""
    return T.tanh(T.dot(a[:length + 1], w)).sum(axis=0)


def recurrent(a):
    return theano.scan(lambda step, h: T.tanh(step + h), a, T.zeros_like(a[0]), mode=PLAIN)[0][-1]


def counting(first, step=1, place=0):
    """Return a loop like keras-contrib's CRF: samples count steps, and the count of one is the place in the mask."""
    def turn(a, h, count):
        here = T.cast(count[place, 0], 'int32')
        return T.tanh(h + a) * s[:, here, :], count + step
    return theano.scan(turn, s.dimshuffle(1, 0, 2), [T.zeros_like(x), first], mode=PLAIN)[0][0][-1]


with change_flags(floatX='float64'):
    zero = T.zeros_like(x[:, :1])
    streams = MRG_RandomStreams(1)
    DIVIDED = {
        'squares': each(lambda a: a ** 2, x), 'weights': each(lambda a: T.dot(a, w), x),
        'numbers': each(lambda a, b: (a * b).sum(), x, v), 'of different lengths': each(longest, s, labels),
        'sorted': each(lambda a, b: T.sort(a)[::-1] + b, x, v),
        'chosen': each(lambda a: a[T.gt(a, .5).nonzero()].sum(), x),
        'a constant for each': each(lambda a, b: a * b, x, T.arange(n) + 1),
        'by the number of samples': each(lambda a, m: a / m, x, non_sequences=[n]),
        'several rows of each': each(lambda a: T.dot(a, w).sum(), s.reshape((n * 3, 4))),
        'several rows outside': each(lambda a: T.dot(a, w).sum(), s.dimshuffle(1, 0, 2).reshape((3 * n, 4))).sum(),
        'backwards': each(lambda a: T.dot(a, w), x, go_backwards=True)[::-1],
        'a loop in a loop': each(recurrent, s), 'a loop around': theano.scan(
            lambda a, h: T.tanh(h + each(lambda b: b.sum(), a).dimshuffle(0, 'x')), s.dimshuffle(1, 0, 2),
            T.zeros_like(x), mode=PLAIN)[0][-1],
        'a count of steps': counting(zero), 'a count from the end': counting(zero + 2, -1, -1),
        'a count of all': x * (T.ones_like(x) * 3)[0],
        'words': each(lambda a, b: T.dot(a, w)[T.arange(3), b].sum(), s, words),
        'beside those in order': each(lambda a: a * 2, x, go_backwards=True) + x,
        'all samples': each(lambda a, b: T.tanh(a - b).sum(), x, non_sequences=[x]),
    }
    turns, place = 'it loops over samples, and each turn needs what the turns before', 'picks samples by their place'
    REFUSED = {
        'running sums': (theano.scan(lambda a, h: a + h, x, T.zeros((4,)))[0], turns),
        'a sum': (theano.reduce(lambda a, h: a + h, x, T.zeros((4,)))[0], turns),
        'a recurrence': (theano.scan(lambda a, h: T.tanh(a + h), x, w[:, 0])[0], turns),
        'a recurrence of two': (theano.scan(lambda a, h, g: a + h * g, x, dict(initial=w.T[:2], taps=[-2, -1]))[0],
                                turns),
        'neighbours': (theano.scan(lambda a, b, c: a + b - c, dict(input=x, taps=[-1, 0, 1]))[0], place),
        'the one before': (theano.scan(lambda a, b: a - b, dict(input=x, taps=[-1, 0]))[0], place),
        'backwards': (each(lambda a: a * 2, x, go_backwards=True), place),
        'two orders': (each(lambda a, b: a * b, x, v[::-1]), 'different orders'),
        'other axes': (each(lambda a, b: a.sum() + b.sum(), x, s[:, :, 0].T), 'what other samples have come to'),
        'until': (theano.scan(lambda a: (a, theano.scan_module.until(a.sum() > 2)), x)[0], 'one of them may end it'),
        'random': (each(lambda a: a + streams.uniform((4,)), x), turns),
        'a count that is the sample\'s own': (counting(x[:, :1]), place),
        'a count by the samples': (counting(zero, s[:, 0, :1]), place),
        'a count of the second sample': (counting(zero, place=1), place),
        'a count of places': (x * (T.ones_like(x) * T.arange(n).dimshuffle(0, 'x'))[0], place),
        'the first ones': (theano.scan(lambda a: a * 2, x, n_steps=3)[0], place),
    }


@pytest.mark.parametrize('name', DIVIDED)
def test_loops_over_samples_are_divided(name):
    check([DIVIDED[name]])


@pytest.mark.parametrize('name', ['weights', 'of different lengths', 'numbers', 'all samples', 'a loop in a loop',
                                  'a count of steps'])
def test_gradients_of_loops_over_samples_are_divided(name):
    check(with_gradients(DIVIDED[name]))


@pytest.mark.parametrize('name', REFUSED)
def test_what_needs_several_samples_is_refused(name):
    variable, reason = REFUSED[name]
    with pytest.raises(CannotCut, match=r'^((?! \(/).)*' + reason):
        partition(list(DATA), [variable])


def test_a_loop_over_time_stays_as_it_is():
    """The samples are along another axis: its graph is cut as before."""
    y = theano.scan(lambda a, h: T.tanh(a + h), s.dimshuffle(1, 0, 2), T.zeros_like(x), mode=PLAIN)[0]
    check([y] + with_gradients(y))
    assert np.shape(theano.function([s, x], y, mode=PLAIN)(DATA[s], DATA[x])) == (3, 7, 4)
