"""A decorator that replaces a function of a library by one that calls it."""
from __future__ import annotations

import functools
import inspect
from typing import Any, Callable


def wrap(owner: Any, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function of a module, or a method of a class, by the decorated function.

    The decorated function is called with the original one, then with the arguments of the call. The original one is the
    ``__wrapped__`` of the replacement. In the place of a class method it does not get the class.

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
        static = isinstance(vars(owner).get(attribute), (staticmethod, classmethod))
        setattr(owner, attribute, staticmethod(replacement) if static else replacement)
        return replacement
    return replace


def arguments_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that are left out."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def mark_version(op: Any, mark: Callable[..., Any], name: str = 'c_code_cache_version') -> None:
    """Add to the version of an op's C code, by which Theano keeps it, unless there is none: then no process keeps it.

    Parameters
    ----------
    op : class of theano.Op
    mark : callable
        Returns a tuple, for the arguments of the method but the op.
    name : str
        The method: ``c_code_cache_version``, or ``c_code_cache_version_apply``, which takes the node.
    """
    @wrap(op, name)
    def version_of(original, self, *node):
        version = original(self, *node)
        return version and version + mark(*node)
