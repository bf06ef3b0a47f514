"""Optimizers that use more of a loss than its gradient, or that are wrapped, subclassed or changed on the instance.

Each is a function of a model that is not compiled yet, and returns a fresh optimizer.
"""
import theano_mgpu  # noqa: F401

import theano
import theano.tensor as T
from keras import backend as K
from keras.optimizers import SGD, Adam, Optimizer

OPTIMIZERS = {}


def optimizer(make):
    OPTIMIZERS[make.__name__] = make
    return make


def squares(values):
    return sum(K.sum(K.square(value)) for value in values)


class Steps(Optimizer):
    """An optimizer that counts its steps, and takes the steps that its method `steps` returns.

    Attributes
    ----------
    states : list of SharedVariable
        Further variables that it updates; some are not among `weights`.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.iterations = K.variable(0, dtype='int64', name='iterations')
        self.states = []

    def get_updates(self, loss, params):
        gradients = self.get_gradients(loss, params)
        self.weights, self.states = [self.iterations], []
        self.updates = [K.update_add(self.iterations, 1)]
        self.updates += [K.update(p, p - step) for p, step in zip(params, self.steps(loss, params, gradients))]
        return self.updates

    def state(self, value, new, name='state'):
        """Make a variable that has a new value after each step."""
        variable = K.variable(value, name=name)
        self.states.append(variable)
        self.updates.append(K.update(variable, new(variable)))
        return variable


def stepping(steps):
    """Add an optimizer with the method ``steps(self, loss, params, gradients)`` to the zoo."""
    cls = type(steps.__name__.title(), (Steps,), {'steps': steps})
    OPTIMIZERS[steps.__name__] = lambda model: cls()
    return steps


@stepping
def polyak(self, loss, params, gradients):
    return [.15 * loss / (squares(gradients) + 1e-3) * g for g in gradients]


@stepping
def l4(self, loss, params, gradients):
    """Return steps to a share of the least loss so far, along a running mean of the gradients."""
    least = self.state(1e3, lambda least: K.minimum(least * 1.01, loss))
    means = [self.state(K.get_value(p) * 0, lambda mean, g=g: .9 * mean + .1 * g) for p, g in zip(params, gradients)]
    self.weights += means
    moved = [.9 * mean + .1 * g for mean, g in zip(means, gradients)]
    rate = .15 * (loss - .9 * K.minimum(least, loss)) / (sum(K.sum(m * g) for m, g in zip(moved, gradients)) + 1e-2)
    return [rate * m for m in moved]


@stepping
def mean_loss(self, loss, params, gradients):
    """Return steps by a running mean of the loss, which is not among the weights of the optimizer."""
    mean = self.state(1., lambda mean: .9 * mean + .1 * loss)
    return [.05 * loss / mean * g for g in gradients]


@stepping
def sharpness(self, loss, params, gradients):
    """Return SAM's steps: the gradient of the loss at other weights, with the worst loss nearby."""
    norm = K.sqrt(squares(gradients)) + 1e-8
    moved = [p + .05 * g / norm for p, g in zip(params, gradients)]
    places = [p.type() for p in params]
    there = theano.clone(loss, dict(zip(params, places)))
    return [.1 * g for g in theano.clone(K.gradients(there, places), dict(zip(places, moved)))]


@stepping
def curvature(self, loss, params, gradients):
    """Return AdaHessian's steps: by the diagonal of the Hessian, from a product with a random vector."""
    signs = [K.cast(K.random_uniform(K.int_shape(p), seed=3 + i) < .5, K.floatx()) * 2 - 1
             for i, p in enumerate(params)]
    products = K.gradients(sum(K.sum(g * v) for g, v in zip(gradients, signs)), params)
    diagonals = [self.state(K.get_value(p) * 0, lambda d, h=h, v=v: .9 * d + .1 * K.square(h * v))
                 for p, h, v in zip(params, products, signs)]
    self.weights += diagonals
    return [.05 * g / (K.sqrt(d) + .1) for g, d in zip(gradients, diagonals)]


@stepping
def trust(self, loss, params, gradients):
    """Return LARS's steps: each rate is in relation to the norms of the weights and of the gradient."""
    return [.02 * K.sqrt(K.sum(K.square(p)) + 1e-3) / K.sqrt(K.sum(K.square(g)) + 1e-3) * g
            for p, g in zip(params, gradients)]


@stepping
def line_search(self, loss, params, gradients):
    """Return the better of two steps, by the loss after each."""
    def after(rate):
        return theano.clone(loss, {p: p - rate * g for p, g in zip(params, gradients)})
    is_better = K.less(after(.2), after(.05))
    return [K.switch(is_better, .2 * g, .05 * g) for g in gradients]


@stepping
def hypergradient(self, loss, params, gradients):
    """Return steps at a rate that is trained itself, by the product of two gradients in a row."""
    before = [self.state(K.get_value(p) * 0, lambda _, g=g: g) for p, g in zip(params, gradients)]
    product = sum(K.sum(g * b) for g, b in zip(gradients, before))
    self.rate = self.state(.05, lambda rate: rate + .001 * product, 'rate')
    self.weights += before + [self.rate]
    return [(self.rate + .001 * product) * g for g in gradients]


class Wrapper(Optimizer):
    """An optimizer around another one, which its configuration does not name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.iterations = K.variable(0, dtype='int64', name='wrapped_steps')
        self.states = []

    def get_updates(self, loss, params):
        updates = self.around(loss, params)
        self.weights = self.inner.weights + [self.iterations] + self.states
        self.updates = updates + [K.update_add(self.iterations, 1)]
        return self.updates


@optimizer
def lookahead(model):
    class Lookahead(Wrapper):
        """An optimizer that goes half of the way back in every third step; only a weight's first new value counts."""
        def around(self, loss, params):
            self.states = [K.variable(K.get_value(p)) for p in params]
            inner = self.inner.get_updates(loss, params)
            new, is_third = dict(inner), K.equal((self.iterations + 1) % 3, 0)
            updates = []
            for p, slow in zip(params, self.states):
                back = slow + .5 * (new[p] - slow)
                updates += [(p, K.switch(is_third, back, new[p])), (slow, K.switch(is_third, back, slow))]
            return updates + inner
    return Lookahead(Adam(.05))


@optimizer
def averaged(model):
    class Averaged(Wrapper):
        def around(self, loss, params):
            self.states = [K.variable(K.get_value(p)) for p in params]
            inner = self.inner.get_updates(loss=loss, params=params)
            new = dict(inner)
            return inner + [K.moving_average_update(mean, new[p], .9) for p, mean in zip(params, self.states)]
    return Averaged(SGD(.1, momentum=.9, nesterov=True))


@optimizer
def accumulated(model):
    class Accumulated(Wrapper):
        """An optimizer that makes one step of two batches' gradients; a replaced method hands them to another one."""
        def around(self, loss, params):
            gradients = self.inner.get_gradients(loss, params)
            self.states = [K.variable(K.get_value(p) * 0) for p in params]
            is_second = K.equal((self.iterations + 1) % 2, 0)
            sums = [a + g for a, g in zip(self.states, gradients)]
            self.inner.get_gradients = lambda loss, params: [s / 2 for s in sums]
            inner = self.inner.get_updates(loss, params)
            del self.inner.get_gradients
            return [(v, K.switch(is_second, new, v)) for v, new in inner] + \
                [(a, K.switch(is_second, s * 0, s)) for a, s in zip(self.states, sums)]
    return Accumulated(SGD(.1, momentum=.9))


@optimizer
def halved(model):
    class Halved(Wrapper):
        def around(self, loss, params):
            return self.inner.get_updates(loss / 2, params)
    return Halved(SGD(.1, momentum=.5, clipnorm=.3))


@optimizer
def centralised(model):
    class Centralised(Adam):
        """A subclass with other gradients."""
        def get_gradients(self, loss, params):
            gradients = super().get_gradients(loss, params)
            return [g - K.mean(g, axis=0, keepdims=True) if K.ndim(g) > 1 else g for g in gradients]
    return Centralised(.05, clipvalue=.1)


@optimizer
def gradients_replaced(model):
    """Return an optimizer with a method that is replaced on the instance."""
    made = SGD(.05, momentum=.5)
    original = made.get_gradients
    made.get_gradients = lambda loss, params: [K.sign(g) * K.sqrt(loss) for g in original(loss, params)]
    return made


@optimizer
def updates_replaced(model):
    made = Adam(.05)
    original = made.get_updates

    def get_updates(loss, params):
        return [(v, new if v not in params else new * .99) for v, new in original(loss=loss, params=params)]
    made.get_updates = get_updates
    return made


@optimizer
def flattened(model):
    """Return an optimizer with all gradients as one vector, whitened by the mean of its outer products with itself."""
    class Flattened(Steps):
        def steps(self, loss, params, gradients):
            sizes = [K.get_value(p).size for p in params]
            flat = T.concatenate([g.flatten() for g in gradients])
            outer = self.state(K.get_value(K.eye(sum(sizes))), lambda m: .9 * m + .1 * T.outer(flat, flat))
            steps = T.dot(T.nlinalg.matrix_inverse(outer), flat)
            parts = T.split(steps, sizes, len(sizes))
            return [.01 * part.reshape(K.int_shape(p)) for p, part in zip(params, parts)]
    return Flattened()


def states_of(made):
    """Return the variables of an optimizer that a training updates."""
    return list(dict.fromkeys(list(made.weights) + list(getattr(made, 'states', ()))))
