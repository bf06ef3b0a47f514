"""Initial weights of Keras's models, drawn by NumPy: Keras would compile a Theano function for each weight."""
import functools

from theano_mgpu.compat import import_hooks

import numpy as np
import theano


class Backend:
    """The backend of Keras's initializers, with constants that NumPy draws in place of Theano's random variables."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def random_uniform(self, shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        return self.constant(_stream(seed).uniform(minval, maxval, shape), dtype)

    def random_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        return self.constant(_stream(seed).normal(mean, stddev, shape), dtype)

    def truncated_normal(self, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        draws = _stream(seed).normal(mean, stddev, shape)
        return self.constant(draws.clip(mean - 2 * stddev, mean + 2 * stddev), dtype)


def draw_by_numpy():
    """Have Keras draw initial weights by NumPy, once it is imported."""
    import_hooks.at_import('after', 'keras.initializers', _replace_backend)
    import_hooks.at_import('after', 'keras.backend.theano_backend', _read_constants)


def _stream(seed):
    return np.random.RandomState(np.random.randint(1, 10**7) if seed is None else seed)


def _replace_backend(initializers):
    initializers.K = Backend(initializers.K)


def _read_constants(backend):
    """Have Keras read the value of a constant; it would compile a function that returns it."""
    make_variable = backend.variable

    @functools.wraps(make_variable)
    def variable(value, *args, **kwargs):
        return make_variable(value.data if isinstance(value, theano.Constant) else value, *args, **kwargs)

    backend.variable = variable
