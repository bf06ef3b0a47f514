"""Fit a Bayesian linear regression with PyMC3: ADVI on minibatches, then NUTS on all the data.

Install: see the section on PyMC3 in examples/README.md.

Run:

    theano-mgpu run examples/pymc3_minibatch.py
"""
import argparse

import numpy as np
import pymc3 as pm
import theano

TRUE_WEIGHTS, TRUE_BIAS, TRUE_NOISE = np.array([1.0, -2.0, 0.5]), 0.7, 0.3


def make_data(n):
    rng = np.random.RandomState(0)
    x = rng.randn(n, len(TRUE_WEIGHTS))
    y = x.dot(TRUE_WEIGHTS) + TRUE_BIAS + TRUE_NOISE * rng.randn(n)
    return x.astype(theano.config.floatX), y.astype(theano.config.floatX)


def make_model(x, y, total_size=None):
    """Return the model of `y` given `x`; `total_size` scales the density of a minibatch to all samples."""
    with pm.Model() as model:
        weights = pm.Normal('weights', mu=0, sigma=2, shape=len(TRUE_WEIGHTS))
        bias = pm.Normal('bias', mu=0, sigma=2)
        noise = pm.HalfNormal('noise', sigma=1)
        pm.Normal('y', mu=pm.math.dot(x, weights) + bias, sigma=noise, observed=y, total_size=total_size)
    return model


def report(method, means):
    print('%s: weights %s, bias %.2f, noise %.2f' % (
        method, ' '.join('%.2f' % weight for weight in means['weights']), means['bias'], means['noise']), flush=True)


def main(steps, draws):
    x, y = make_data(2000)
    report('truth', {'weights': TRUE_WEIGHTS, 'bias': TRUE_BIAS, 'noise': TRUE_NOISE})

    # Each evaluation of the graph draws other samples. Both minibatches draw the same samples, from one seed.
    x_batch, y_batch = pm.Minibatch(x, batch_size=100), pm.Minibatch(y, batch_size=100)
    with make_model(x_batch, y_batch, total_size=len(x)):
        approximation = pm.fit(steps, method='advi', obj_optimizer=pm.adam(learning_rate=0.02), random_seed=1,
                               progressbar=False)
        fitted = approximation.sample(500)
    report('ADVI', {name: fitted[name].mean(axis=0) for name in ('weights', 'bias', 'noise')})

    with make_model(x, y):
        trace = pm.sample(draws, tune=draws, chains=2, cores=1, random_seed=1, progressbar=False,
                          return_inferencedata=False, compute_convergence_checks=False)
    report('NUTS', {name: trace[name].mean(axis=0) for name in ('weights', 'bias', 'noise')})


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=3000)
    parser.add_argument('--draws', type=int, default=300)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.draws)
