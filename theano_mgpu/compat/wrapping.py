"""A decorator that replaces a function of a library by one that calls it."""
from __future__ import annotations

import functools
from typing import Any, Callable


def wrap(owner: Any, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function of a module, or a method of a class, by the decorated function.

    The decorated function is called with the original one, then with the arguments of the call. The original one is the
    ``__wrapped__`` of the replacement.

    Parameters
    ----------
    owner : module or class
    name : str, optional
        The name of the function; by default the name of the decorated one.

    Examples
    --------
    >>> class Greeting:
    ...     def text(self):
    ...         return 'hello'
    >>> @wrap(Greeting)
    ... def text(original, self):
    ...     return original(self).upper()
    >>> Greeting().text()
    'HELLO'
    """
    def replace(function):
        attribute = name or function.__name__
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)
        static = isinstance(vars(owner).get(attribute), staticmethod)
        setattr(owner, attribute, staticmethod(replacement) if static else replacement)
        return replacement
    return replace
