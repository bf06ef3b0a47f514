"""PyMC3: the mode, samples by Metropolis and by NUTS, and a variational fit of a logistic regression."""
import inspect
import logging

import numpy as np
import pymc3 as pm
import theano.tensor as T
from data import show

logging.disable(logging.CRITICAL)
rng = np.random.RandomState(0)
x, truth = rng.randn(400, 3), np.array([1., -2., .5])
y = (rng.rand(400) < 1 / (1 + np.exp(-x.dot(truth)))).astype('int64')
# Their names came and went.
OPTIONS = {'progressbar': False, 'chains': 1, 'cores': 1, 'njobs': 1, 'compute_convergence_checks': False,
           'return_inferencedata': False, 'init': None}


def call(function, *arguments, **options):
    """Call a function with those options of the table that it has."""
    known = inspect.signature(function).parameters
    return function(*arguments, **options, **{key: value for key, value in OPTIONS.items() if key in known})


with pm.Model():
    w = pm.Normal('w', 0, 3, shape=3)
    pm.Bernoulli('y', p=T.nnet.sigmoid(T.dot(x, w)), observed=y)
    start = {'w': np.zeros(3)}
    show('mode', call(pm.find_MAP, start=start)['w'])
    for method in (pm.Metropolis, pm.NUTS):
        np.random.seed(1)
        trace = call(pm.sample, 20, step=method(), start=start, random_seed=5, tune=20)
        show(method.__name__, trace['w'].mean(axis=0))
    if hasattr(pm, 'fit'):
        fitted = call(pm.fit, 100, method='advi', random_seed=7, progressbar=False)
        show('advi', fitted.hist[[0, 1, 50, 99]])
        show('means', fitted.mean.eval())
    else:  # PyMC3 3.0
        means = call(pm.variational.advi, n=100, random_seed=7).means
        show('means', means['w'])
