"""Samples of two classes, and numbers in a form that can be compared, for the programs of this folder."""
import numpy as np


def classes(n, *shape):
    """Return n samples of a shape, and the class of each: whether its mean is above one half."""
    x = np.random.RandomState(0).rand(n, *shape)
    return x.astype('float64'), (x.reshape(n, -1).mean(axis=1) > .5).astype('int32')


def show(name, values):
    """Print numbers with their first ten digits."""
    print(name, *('%.10g' % value for value in np.ravel(values)))
