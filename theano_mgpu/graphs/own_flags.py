"""Theano's flags for graphs that the package builds, whatever a script has set them to for its own."""
import functools

from theano.configparser import change_flags


def builds_graphs(function):
    """Have a function build graphs without test values, which inputs of the package's own have none of.

    With the flag ``compute_test_value=raise``, each op on such an input is an error.
    """
    @functools.wraps(function)
    def within_own_flags(*args, **kwargs):
        with change_flags(compute_test_value='off', warn_float64='ignore'):
            return function(*args, **kwargs)
    return within_own_flags
