"""A hook after each call of `theano.function`."""
import contextlib
import functools
import inspect
import sys
import threading

_making = threading.local()


@contextlib.contextmanager
def plain_functions():
    """A block in which `theano.function` does not call the hook: for functions of our own, and nested ones.

    Yields
    ------
    bool
        Whether the block is within another such block.
    """
    before = getattr(_making, 'plain', False)
    _making.plain = True
    try:
        yield before
    finally:
        _making.plain = before


def plain_function(*args, **kwargs):
    """Make a function with `theano.function`, without the hook."""
    import theano
    with plain_functions():
        return theano.function(*args, **kwargs)


def after_each_function(attach):
    """Call a hook with each function that Theano makes from now on.

    Every `theano.function` calls `pfunc`, whatever name a script has imported it by.

    Parameters
    ----------
    attach : callable
        ``attach(function, arguments)``: the new function, and a dict of the arguments of `theano.compile.pfunc.pfunc`.
        It may set ``function.mgpu_divided``, a callable ``divided(args, kwargs)`` that then runs in place of the
        function; ``function.plain_call`` is Theano's own.
    """
    module = sys.modules['theano.compile.function']
    original = module.pfunc
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def pfunc(*args, **kwargs):
        with plain_functions() as is_within:
            function = original(*args, **kwargs)
        if not is_within:
            given = parameters.bind(*args, **kwargs)
            given.apply_defaults()
            attach(function, given.arguments)
        return function
    module.pfunc = pfunc
