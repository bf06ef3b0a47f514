"""Models with tables of which a batch touches a few rows, over contexts and by plain Theano."""
import sys
from pathlib import Path

if __name__ == '__main__':
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / 'benchmarks')]

import theano_mgpu as mgpu
from theano_mgpu.graph.analysis import touched_rows

import numpy as np
import theano
import theano.tensor as T

WORDS, SIZE, LENGTH = 60, 4, 3
LENGTHS = 4, 5, 1, 2, 40, 4, 33, 3  # samples of each batch: 60 words are touched 12 times, or 120


def sentences(n, rng):
    """Return words, a label each, and a number each; negative words count from the end, and some occur twice."""
    words = rng.randint(-WORDS, WORDS, (n, LENGTH)).astype('int32')
    words[:, 1] = words[0, 0]
    return words, rng.randint(0, 3, n).astype('int32'), rng.uniform(-1, 1, n).astype(theano.config.floatX)


def begin():
    """Have small tables, which are quick, treated as large ones."""
    touched_rows.LARGE = 0


def looked_up(E, words):
    """Return the rows of a matrix of words."""
    return E[words.flatten()].reshape((words.shape[0], words.shape[1], SIZE))


def mean_of_words(words, E, W):
    return T.dot(looked_up(E, words).mean(axis=1), W)


def matrix_of_words(words, E, W):
    return T.dot(E[words].sum(axis=1), W)


def time_major(words, E, W):
    rows = E[words.T.flatten()].reshape((words.shape[1], words.shape[0], SIZE))
    return T.dot(T.tanh(rows).sum(axis=0), W)


def two_lookups(words, E, W):
    return T.dot(E[words[:, 0]] * E[words[:, 1]] + E[words[:, 2]], W)


def masked(words, E, W):
    mask = T.cast(T.neq(words, 0), E.dtype).dimshuffle(0, 1, 'x')
    return T.dot((looked_up(E, words) * mask).sum(axis=1) / T.maximum(mask.sum(axis=1), 1), W)


def tied(words, E, W):
    scores = T.dot(T.tanh(looked_up(E, words).sum(axis=1)), E.T)
    return scores[:, :3] + scores.mean(axis=1, keepdims=True) + T.dot(E[words[:, 0]], W)


def loop(words, E, W):
    rows = looked_up(E, words).dimshuffle(1, 0, 2)
    states, _ = theano.scan(lambda x, h: T.tanh(x + .5 * h), sequences=rows, outputs_info=T.zeros_like(rows[0]))
    return T.dot(states[-1], W)


MODELS = mean_of_words, matrix_of_words, time_major, two_lookups, masked, tied, loop


def shared(value, name):
    return theano.shared(value.astype(theano.config.floatX), name)


def number(value):
    return np.asarray(value, theano.config.floatX)


def sgd(gradients, params):
    return [(p, p - number(.5) * g) for p, g in zip(params, gradients)]


def adam(gradients, params):
    updates = []
    for p, g in zip(params, gradients):
        m, v = shared(0 * p.get_value(), '%s.m' % p), shared(0 * p.get_value(), '%s.v' % p)
        new_m, new_v = number(.9) * m + number(.1) * g, number(.99) * v + number(.01) * g ** 2
        updates += [(m, new_m), (v, new_v), (p, p - number(.01) * new_m / (T.sqrt(new_v) + number(1e-3)))]
    return updates


def clipped(gradients, params):
    norm = T.sqrt(sum(T.sum(g ** 2) for g in gradients))
    return sgd([g * T.minimum(1, number(.1) / norm) for g in gradients], params)


def constrained(gradients, params):
    return [(p, new / T.maximum(1, T.sqrt(T.sum(new ** 2, axis=1, keepdims=True)))) for p, new in
            sgd(gradients, params)]


OPTIMIZERS = sgd, adam, clipped, constrained


def made(model, optimizer, divided, **options):
    """Return a training function and its variables, for several contexts or of plain Theano."""
    rng = np.random.RandomState(1)
    words, labels, numbers = T.imatrix('words'), T.ivector('labels'), T.vector('numbers')
    params = [shared(rng.uniform(-1, 1, shape), name) for shape, name in (((WORDS, SIZE), 'E'), ((SIZE, 3), 'W'))]
    losses = T.nnet.categorical_crossentropy(T.nnet.softmax(model(words, *params)), labels) * numbers
    inputs, loss = [words, labels, numbers], losses.mean()
    updates = []

    def keep(gradients):
        updates[:] = optimizer(gradients, params)
        return updates
    if divided:
        step = mgpu.training_function(inputs, loss, params, keep, **options)
    else:
        step = theano.function(inputs, loss, updates=keep(T.grad(loss, params)))
    return step, [variable for variable, _ in updates]


def trained(model, optimizer, divided, lengths=LENGTHS, **options):
    """Return the losses, and the values of all variables, of some batches; and the function."""
    step, variables = made(model, optimizer, divided, **options)
    rng = np.random.RandomState(2)
    losses = [float(step(*sentences(n, rng))) for n in lengths]
    return [np.array(losses), *(np.asarray(each.get_value()) for each in variables)], step


def difference(one, other):
    """Return the largest difference, relative to the largest value of each array."""
    return max(abs(a - b).max() / abs(b).max() for a, b in zip(one, other))


def tolerance():
    return 1e-12 if theano.config.floatX == 'float64' else 3e-5


def check(models=MODELS, optimizers=OPTIMIZERS, **options):
    """Compare trainings with plain Theano."""
    for model in models:
        for optimizer in optimizers:
            expected, _ = trained(model, optimizer, False)
            found, _ = trained(model, optimizer, True, **options)
            assert difference(found, expected) < tolerance(), (model.__name__, optimizer.__name__,
                                                               difference(found, expected))


def drawn(seed):
    """Return a model that looks words up in some ways, an optimizer, and options, all of them drawn."""
    rng = np.random.RandomState(seed)
    lookups = {
        'flat': lambda words, E: looked_up(E, words).sum(axis=1),
        'matrix': lambda words, E: T.tanh(E[words]).sum(axis=1),
        'column': lambda words, E: E[words[:, 0]] * E[words[:, 1]],
        'shifted': lambda words, E: E[T.abs_(words[:, 1:]) - 1].sum(axis=1),
        'time-major': lambda words, E: E[words.T.flatten()].reshape((words.shape[1], words.shape[0], SIZE)).sum(axis=0),
        'none': lambda words, E: E[words[:, :0]].sum(axis=1),
        'few': lambda words, E: E[words[:, :1] % 2].sum(axis=1),
        'with the table': lambda words, E: T.dot(E[words[:, 0]], E.T)[:, :SIZE],
        'of a product': lambda words, E: (E * number(.5))[words[:, 2]]}
    chosen = rng.choice(sorted(lookups), rng.randint(1, 4), replace=False)

    def model(words, E, W):
        return T.dot(sum(lookups[name](words, E) for name in chosen), W)
    model.__name__ = ', '.join(chosen)
    optimizer = OPTIMIZERS[rng.randint(len(OPTIMIZERS))]
    options = [{}, {'micro_batches': 2}, {'micro_batches': 3}][rng.randint(3)]
    return model, optimizer, options, tuple(rng.choice([1, 2, 3, 5, 8, 30, 50], 5))


def check_drawn(seeds):
    """Compare drawn trainings with plain Theano."""
    for seed in seeds:
        model, optimizer, options, lengths = drawn(seed)
        expected, _ = trained(model, optimizer, False, lengths)
        found, _ = trained(model, optimizer, True, lengths, **options)
        assert difference(found, expected) < tolerance(), (seed, model.__name__, optimizer.__name__, options, lengths)


def check_own_samples():
    """Compare trainings of ranks that have samples of their own, of other lengths, with and without large tables."""
    results = []
    for touched_rows.LARGE in (0, 1 << 60):
        step, variables = made(matrix_of_words, sgd, True)
        rng = np.random.RandomState(mgpu.rank())
        for n in (4, 3, 30):
            words, *others = sentences(n, rng)
            step(np.hstack([words] * (1 + 9 * mgpu.rank())), *others)
        results.append([each.get_value() for each in variables])
    assert difference(*results) < tolerance()


if __name__ == '__main__':
    mgpu.init()
    begin()
    check_own_samples() if 'own' in sys.argv else check(MODELS[:3], OPTIMIZERS[:2])
