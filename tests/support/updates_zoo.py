"""Updates as code for Lasagne and plain Theano writes them: ``updates(gradients, params, model)`` returns new values.

They depend on more than the gradients: the loss, other expressions of the batch, derivatives of these, states.
"""
import theano_mgpu  # noqa: F401

import numpy as np
import theano
import theano.tensor as T
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams

UPDATES = {}


def case(function):
    UPDATES[function.__name__] = function
    return function


def state(value, name='state'):
    value = np.asarray(value, 'float64')
    return theano.shared(value, name=name)


def like(param):
    return theano.shared(param.get_value() * 0, name='of %s' % param, broadcastable=param.broadcastable)


def sgd(gradients, params, rate=.1):
    return {p: p - rate * g for p, g in zip(params, gradients)}


def momentum(updates, params):
    """Return the updates of lasagne.updates.apply_momentum."""
    found = dict(updates)
    for p in params:
        velocity = like(p)
        new = .9 * velocity + updates[p] - p
        found[velocity], found[p] = new, p + new
    return found


def squares(values):
    return sum((value ** 2).sum() for value in values)


@case
def rate_of_the_loss(gradients, params, model):
    return momentum(sgd(gradients, params, .15 * model.loss / (squares(gradients) + 1e-3)), params)


@case
def total_norm(gradients, params, model):
    """Return updates for gradients as by lasagne.updates.total_norm_constraint; the norm is among the states."""
    norm, last = T.sqrt(squares(gradients)), state(0)
    gradients = [g * (T.clip(norm, 0, .1) / (1e-7 + norm)) for g in gradients]
    return {**momentum(sgd(gradients, params), params), last: norm}


@case
def norm_constraint(gradients, params, model):
    """Return updates for weights as by lasagne.updates.norm_constraint."""
    found = sgd(gradients, params)
    for p in params:
        if p.ndim == 2:
            norms = T.sqrt((found[p] ** 2).sum(axis=0, keepdims=True))
            found[p] = found[p] * (T.clip(norms, 0, .8) / (1e-7 + norms))
    return found


@case
def averaged_weights(gradients, params, model):
    found = momentum(sgd(gradients, params), params)
    averages = {like(p): found[p] for p in params}
    found.update((average, .9 * average + .1 * new) for average, new in averages.items())
    return found


@case
def mean_of_the_loss(gradients, params, model):
    mean, count = state(1), theano.shared(np.int64(0), name='count')
    rate = T.switch(T.gt(model.loss, mean), .02, .1)
    return list({**sgd(gradients, params, rate), mean: .9 * mean + .1 * model.loss, count: count + 1}.items())


@case
def of_samples(gradients, params, model):
    """Return updates with a rate that depends on inputs and on the model's results for each sample."""
    entropy = -(model.probabilities * T.log(model.probabilities)).sum(axis=1)
    return sgd(gradients, params, .1 / (1 + entropy.max() + abs(model.inputs[0]).mean()) * model.accuracy)


@case
def penalised(gradients, params, model):
    return sgd(T.grad(model.loss + .1 * squares(gradients), params), params)


@case
def curvature(gradients, params, model):
    vectors = [T.constant(np.sign(np.random.RandomState(1).randn(*p.get_value().shape))) for p in params]
    products = T.grad(sum((g * v).sum() for g, v in zip(gradients, vectors)), params)
    return {p: p - .05 * g / (abs(h * v) + .1) for p, g, h, v in zip(params, gradients, products, vectors)}


@case
def sharpness(gradients, params, model):
    norm = T.sqrt(squares(gradients)) + 1e-8
    places = [p.type() for p in params]
    there = theano.clone(model.loss, dict(zip(params, places)))
    moved = {place: p + .05 * g / norm for place, p, g in zip(places, params, gradients)}
    return sgd(theano.clone(T.grad(there, places), moved), params)


@case
def gradients_of_its_own(gradients, params, model):
    """Return updates of a function such as lasagne.updates.sgd, which is given the loss."""
    return sgd(T.grad(model.loss * 2 + T.sqrt(model.loss), params), params)


@case
def noise(gradients, params, model):
    streams = MRG_RandomStreams(4)
    return sgd([g + .1 * streams.normal(p.get_value().shape, dtype='float64') for p, g in zip(params, gradients)],
               params)


@case
def accumulated(gradients, params, model):
    count, sums = theano.shared(np.int64(0), name='count'), [like(p) for p in params]
    is_last, new = T.eq(count % 2, 1), [s + g for s, g in zip(sums, gradients)]
    found = {p: ifelse(is_last, p - .05 * n, T.as_tensor_variable(p) * 1) for p, n in zip(params, new)}
    found.update((s, T.switch(is_last, 0, n)) for s, n in zip(sums, new))
    return {**found, count: count + 1}


@case
def conflicting(gradients, params, model):
    others = T.grad(-T.log(model.probabilities.max(axis=1)).mean(), params)
    products = [T.minimum((g * o).sum(), 0) / ((o ** 2).sum() + 1e-6) for g, o in zip(gradients, others)]
    return sgd([g - p * o + o for g, o, p in zip(gradients, others, products)], params)


@case
def slices(gradients, params, model):
    """Replicas agree on the end of a slice beside a list; a slice is no array."""
    new = sgd(gradients, params)
    new[params[0]] += .01 * (model.loss * params[0])[[0, 1], :model.inputs[0].shape[1] - 5].sum()
    return new
