"""Attention whose heads are merged into the axis of the samples and taken apart again, in both orders."""
from theano_mgpu.graph.analysis import CannotCut
from theano_mgpu.graph.partition import partition

import pytest
import theano
import theano.tensor as T
from test_analysis import DATA, PLAIN, check, s, w, with_gradients, words, x
from theano.configparser import change_flags

n = s.shape[0]
mask = T.cast(words > 0, 'float64')


def merged(values, heads):
    """Merge heads into the samples' axis, as keras-multi-head does: the heads of a sample are beside each other."""
    n, steps, width = values.shape[0], values.shape[1], values.shape[2]
    apart = T.reshape(values, (n, steps, heads, width // heads)).dimshuffle(0, 2, 1, 3)
    return T.reshape(apart, (n * heads, steps, width // heads))


def apart(values, heads):
    n, steps, width = values.shape[0], values.shape[1], values.shape[2]
    each = T.reshape(values, (n // heads, heads, steps, width)).dimshuffle(0, 2, 1, 3)
    return T.reshape(each, (n // heads, steps, heads * width))


def merged_outside(values, heads):
    """Merge heads that were joined along the axis of the samples: the samples of a head are beside each other."""
    n, steps, width = values.shape[0], values.shape[1], values.shape[2]
    each = T.reshape(values, (n, steps, heads, width // heads)).dimshuffle(2, 0, 1, 3)
    return T.reshape(each, (heads * n, steps, width // heads))


def apart_from_outside(values, heads):
    n, steps, width = values.shape[0], values.shape[1], values.shape[2]
    each = T.reshape(values, (heads, n // heads, steps, width)).dimshuffle(1, 2, 0, 3)
    return T.reshape(each, (n // heads, steps, heads * width))


def joined(values, heads):
    return T.concatenate([values[:, :, i * 4 // heads:(i + 1) * 4 // heads] for i in range(heads)], axis=0)


def attention(values, mask=None):
    scores = T.batched_tensordot(values, values, axes=[2, 2])
    if mask is not None:
        scores = scores - 9 * (1 - mask.dimshuffle(0, 'x', 1))
    weights = T.exp(scores - scores.max(axis=-1, keepdims=True))
    return T.batched_tensordot(weights / weights.sum(axis=-1, keepdims=True), values, axes=[2, 1])


def tiled(mask, heads):
    """Return a mask for the heads of each sample beside each other, as in keras-multi-head."""
    return T.reshape(T.tile(mask.dimshuffle(0, 'x', 1), (1, heads, 1)), (-1, mask.shape[1]))


def blocks(values, heads, length):
    return T.concatenate([values[i * length:(i + 1) * length] for i in range(heads)], axis=2)


def in_a_loop():
    """Return a loop that merges the heads of each step."""
    def step(values):
        y = T.reshape(T.reshape(values, (values.shape[0], 2, 2)), (values.shape[0] * 2, 2)).cumsum(axis=1)
        return T.reshape(y, (y.shape[0] // 2, 4))
    return theano.map(step, s.dimshuffle(1, 0, 2), mode=PLAIN)[0]


with change_flags(floatX='float64'):
    recurrent = theano.scan(lambda a, h: T.tanh(a + h), s.dimshuffle(1, 0, 2), T.zeros_like(s[:, 0]), mode=PLAIN)[0]
    DIVIDED = {
        'heads': apart(attention(merged(s, 2)), 2), 'as many heads as features': apart(merged(s, 4) * 2, 4),
        'heads of heads': apart(apart(T.tanh(merged(merged(s, 2), 2)), 2), 2),
        'two layers': apart(attention(merged(T.tanh(T.dot(apart(attention(merged(s, 2)), 2), T.dot(w, w.T))), 4)), 4),
        'after a recurrence': apart(merged(recurrent.dimshuffle(1, 0, 2), 2), 2),
        'a repeated mask': apart(attention(merged(s, 2), T.repeat(mask, 2, axis=0)), 2),
        'a tiled mask': apart(attention(merged(s, 2), tiled(mask, 2)), 2),
        'heads outside': apart_from_outside(attention(merged_outside(s, 2)), 2),
        'a mask tiled outside': apart_from_outside(attention(merged_outside(s, 2), T.tile(mask, (2, 1))), 2),
        'a joined mask': apart_from_outside(attention(merged_outside(s, 2), T.concatenate([mask, mask], axis=0)), 2),
        'joined heads': blocks(attention(joined(s, 2), T.tile(mask, (2, 1))), 2, n),
        'joined heads by their length': blocks(joined(s, 2) * 2, 2, joined(s, 2).shape[0] // 2),
        'pairs of four heads': T.reshape(merged(s, 4), (merged(s, 4).shape[0] // 2, 2, 3, 1)).sum(axis=(1, 2, 3)),
        'a number of heads that is a variable': apart(merged(s, words.shape[1] - 1), words.shape[1] - 1),
    }
    other_order = 'samples lie along different axes of its inputs'
    unknown = 'unknown which axis has the samples'
    REFUSED = {
        'samples in pairs': (T.reshape(x, (x.shape[0] // 2, 8)), unknown),
        'heads that do not divide': (T.reshape(merged(s, 4), (merged(s, 4).shape[0] // 3, 3, 3, 1)), unknown),
        'another number of heads': (T.reshape(merged(s, 2), (merged(s, 2).shape[0] // 4, 4, 3, 2)), unknown),
        'another number that is a variable': (apart(merged(s, words.shape[1] - 1), s.shape[1] - 1), unknown),
        'half of the samples': (T.zeros((n // 2, 2)) + T.reshape(x, (n // 2, 8))[:, :2], unknown),
        'a tiled mask of the other order': (attention(merged(s, 2), T.tile(mask, (2, 1))), other_order),
        'a repeated mask of the other order': (attention(joined(s, 2), T.repeat(mask, 2, axis=0)), other_order),
        'taken apart in the other order': (apart_from_outside(merged(s, 2), 2), 'merges or splits the axis'),
        'joined with what has more rows': (T.concatenate([x, T.repeat(x, 2, axis=0)], axis=0), 'joins along'),
        'from the middle of a head': (joined(s, 2)[1:n + 1], 'by their place'),
    }
    AT_RUN_TIME = {
        'outside taken apart in the other order': (apart(merged_outside(s, 2), 2), 'merges or splits the axis'),
        'two heads at once': (joined(s, 4)[:2 * n], 'several blocks, or not all of one'),
    }


@pytest.mark.slow_but_with('joined heads by their length', 'joined heads', 'a number of heads that is a variable',
                           'pairs of four heads')
@pytest.mark.parametrize('name', DIVIDED)
def test_heads_are_divided(name):
    check([DIVIDED[name]] + with_gradients(DIVIDED[name]))


def test_heads_within_a_loop_are_divided():
    check([in_a_loop()])


@pytest.mark.parametrize('name', REFUSED)
def test_what_mixes_samples_is_refused(name):
    variable, reason = REFUSED[name]
    with pytest.raises(CannotCut, match=r'^((?! \(/).)*' + reason):
        partition(list(DATA), [variable])


def test_heads_behind_a_deep_network_are_divided():
    """Python allows a depth of 1000 calls."""
    deep = s
    for _ in range(1200):
        deep = deep + 1
    program = partition(list(DATA), [apart(merged(deep, 2), 2)])
    assert len(program.stages) == 1


@pytest.mark.parametrize('name', AT_RUN_TIME)
def test_what_mixes_samples_is_refused_with_the_batch(name):
    variable, reason = AT_RUN_TIME[name]
    with pytest.raises(AssertionError, match=reason):
        check([variable])
