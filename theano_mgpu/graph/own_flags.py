"""Theano's flags for graphs that the package builds, whatever a script has set them to for its own."""
from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar, cast

from theano.configparser import change_flags

Function = TypeVar('Function', bound=Callable[..., Any])


def builds_graphs(function: Function) -> Function:
    """Make a function build graphs without test values, which the inputs of the package itself do not have.

    With the flag ``compute_test_value=raise``, each op on such an input is an error.
    """
    @functools.wraps(function)
    def within_own_flags(*args, **kwargs):
        with change_flags(compute_test_value='off', warn_float64='ignore'):
            return function(*args, **kwargs)
    return cast(Function, within_own_flags)
