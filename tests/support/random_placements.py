"""Random small models with random placements: chains, branches, shared weights, samples that meet."""
import contextlib

import theano_mgpu  # noqa: F401

import numpy as np
import theano
import theano.tensor as T
from models import adam
from theano.sandbox.rng_mrg import MRG_RandomStreams

from .placed_models import Model, clipped_adam, squared

WIDTH = 3


def momentum(gradients, params):
    found = {}
    for param, gradient in zip(params, gradients):
        velocity = theano.shared(param.get_value() * 0, 'velocity of %s' % param)
        found[velocity] = T.cast(0.9 * velocity - 0.05 * gradient, param.dtype)
        found[param] = param + found[velocity]
    return found


def smooth_adam(gradients, params):
    return adam(gradients, params, learning_rate=0.01, epsilon=1e-3)


class RandomModel(Model):
    """A random model; the same choices give the same one, placed or not.

    Parameters
    ----------
    random : random.Random
        The source of the choices.
    contexts : list of Context, optional
        At least six; the model is placed on some of them.

    Attributes
    ----------
    updates : callable
        Of gradients and parameters.
    options : dict
        Options of the function that compiles the model.
    how : str
        See `placed_models.Training`.
    """

    def __init__(self, random, contexts=None):
        self._random = random
        n = random.randrange(2, 4)
        self.updates = random.choice([momentum, smooth_adam, clipped_adam])
        self.how = random.choice(['function', 'training_function'])
        names = [context.name for context in contexts or ()]
        replicas = random.choice([names[:n], names[:2 * n], [names[:n], names[n:2 * n]]])
        self.options = {'micro_batches': random.randrange(1, 4), 'recompute': random.choice([False, True]),
                        'update_on': random.choice(['auto', 'device', 'host']), 'contexts': replicas}
        order = self._permutation(n)
        super().__init__(contexts and [contexts[i] for i in order])
        self._numbers = list(range(n)) + [random.choice(['cpu', n - 1])]
        self._streams = MRG_RandomStreams(1)
        self._build()

    def somewhere(self):
        """Return a block on a random place; sometimes no block."""
        place = self._random.choice(self._numbers * 2 + [None])
        return self.on(place) if place is not None else theano_mgpu.device(None)

    def _permutation(self, n):
        rest = list(range(n))
        return [rest.pop(self._random.randrange(len(rest))) for _ in range(n)]

    def _build(self):
        random = self._random
        self._values = [self.rows(WIDTH) for _ in range(random.randrange(1, 4))]
        self._weights = []
        target = self.rows(WIDTH)
        # A layer on each of the places, so that all of them are used, and others.
        places = self._permutation(len(self._numbers)) + [None] * random.randrange(1, 5)
        for place in places:
            with self.somewhere() if place is None else self.on(self._numbers[place]):
                self._values.append(random.choice(LAYERS)(self))
        with self.somewhere():
            y = sum(self._values[-random.randrange(1, 4):]) + self.dense(self._values[-1], WIDTH, WIDTH)
            self.loss = squared(y, target)
        for term in TERMS:
            if random.choice([False, False, True]):
                with self.somewhere():
                    self.loss = self.loss + term(self, y)
        used = set(theano.gof.graph.ancestors([self.loss]))
        self.params = [param for param in self.params if param in used]
        self.outputs = [y, random.choice(self._values), random.choice(self._values).sum()]
        self.state += [update[0] for update in self._streams.state_updates
                       if update[0] in theano.gof.graph.ancestors([self.loss] + self.outputs)]
        if random.choice([False, True]):
            self._add_a_running_mean()

    def _add_a_running_mean(self):
        with self.somewhere():
            mean = self.shared(np.zeros(WIDTH), 'mean')
        with self.somewhere():
            self.batch_updates[mean] = 0.9 * mean + 0.1 * self.some().mean(axis=0)
        self.state.append(mean)

    def some(self):
        """Return one of the values so far, rather a late one."""
        return self._values[max(self._random.randrange(len(self._values)) for _ in range(2))]

    def some_weight(self):
        """Return a new or an old weight, made in this block or elsewhere."""
        way = self._random.choice(['new', 'new', 'elsewhere', 'old'])
        if way == 'old' and self._weights:
            return self._random.choice(self._weights)
        with self.somewhere() if way == 'elsewhere' else contextlib.nullcontext():
            self._weights.append(self.weight(WIDTH, WIDTH))
        return self._weights[-1]


def dense(m):
    return T.tanh(T.dot(m.some(), m.some_weight()))


def affine(m):
    return m.dense(m.some(), WIDTH, WIDTH)


def branches(m):
    return T.tanh(m.some() * m.some() + m.some())


def wide(m):
    both = T.concatenate([m.some(), m.some()], axis=1)
    return T.tanh(T.dot(both, m.weight(2 * WIDTH, WIDTH)))


def transposed(m):
    return T.tanh(T.dot(m.some_weight(), m.some().T).T)


def normalised(m):
    """Return samples normalised by their mean and variance."""
    x = m.some()
    return (x - x.mean(axis=0)) / T.sqrt(x.var(axis=0) + 0.1)


def gated(m):
    return T.nnet.softmax(m.some()) * m.some()


def correlated(m):
    """Return a product in which samples meet."""
    x = m.some()
    return T.dot(x, T.tanh(T.dot(x.T, m.some()) / x.shape[0]))


def dropped(m):
    x = m.some()
    return x * m._streams.binomial(x.shape, p=0.7, dtype=x.dtype)


def recurrent(m):
    x, w = m.some(), m.some_weight()
    states, _ = theano.scan(lambda before, x, w: T.tanh(T.dot(before, w)) + x, outputs_info=[T.zeros_like(x)],
                            non_sequences=[x, w], n_steps=2, mode=m.mode)
    return states[-1]


LAYERS = [dense] * 3 + [affine] * 3 + [branches, wide, transposed, normalised, gated, correlated, dropped, recurrent]
TERMS = [lambda m, y: 0.01 * sum(T.sqr(w).sum() for w in m.params),
         lambda m, y: 0.1 * T.sqrt(T.sqr(y).sum() + 1),
         lambda m, y: 0.1 * (y.max() - y.mean()),
         lambda m, y: 0.1 * T.log(1 + T.sqr(m.some()).mean())]
