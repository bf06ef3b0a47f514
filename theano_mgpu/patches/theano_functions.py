"""Hooks after each call of `theano.function`."""
import contextlib
import functools
import inspect
import os
import sys
import threading

from ..utils.collector import collector_paused

_hooks = []
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


def name_for_user(given):
    """Return the name under which a new function is listed for the user.

    Theano names a function that has no name after the line that has called `theano.function`. Where that line is in
    Keras, as for ``K.function``, the line that has called Keras is meant. Call it while the function is being made.

    Parameters
    ----------
    given : dict
        The arguments of `theano.function`.

    Returns
    -------
    str or None
        None for a function that Theano or Keras makes for its own use, such as `K.eval`, and for one that computes
        nothing.
    """
    name = given['name'] or 'a function'
    if not name.startswith(_folders('theano', 'keras')):
        return name if given['params'] or given['outputs'] or given['updates'] else None
    if not (given['params'] and name.startswith(_folders(os.path.join('keras', 'backend')))):
        return None
    frame, others = sys._getframe(1), _folders('theano', 'keras', 'theano_mgpu')
    while frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return '%s:%d' % (frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(None)
def _folders(*packages):
    """Return the paths of packages' folders, a tuple of str that end with a separator."""
    installed = os.path.dirname(os.path.dirname(sys.modules['theano'].__file__))
    own = os.path.dirname(os.path.dirname(__file__))
    return tuple(os.path.join(own if package == 'theano_mgpu' else os.path.join(installed, package), '')
                 for package in packages)


def shown(name):
    """A function's name for messages. If it has none, Theano gives the place of its making; its folder is left out."""
    place, colon, line = (name or 'a function').rpartition(':')
    return os.path.basename(place) + colon + line if colon else line


def graph_of(function):
    """The outputs and new values of a function, before Theano's optimiser, and the shared variables that it updates."""
    updates = [(each.variable, each.update) for each in function.maker.inputs if each.update is not None]
    return [output.variable for output in function.maker.outputs] + [each for pair in updates for each in pair]


def compile_without_the_collector():
    """Pause Python's collector while a function is compiled.

    Without this, it takes more than a third of the time in which Theano optimises a graph.
    """
    module = sys.modules['theano.compile.pfunc']
    original = module.orig_function

    @functools.wraps(original)
    def orig_function(*args, **kwargs):
        with collector_paused():
            return original(*args, **kwargs)
    module.orig_function = orig_function


def after_each_function(attach, first=False):
    """Call a hook with each function that Theano makes from now on.

    Every `theano.function` calls `pfunc`, whatever name a script has imported it by.

    Parameters
    ----------
    attach : callable
        ``attach(function, arguments)``: the new function, and a dict of the arguments of `theano.compile.pfunc.pfunc`.
        It may set ``function.mgpu_divided``, a callable ``divided(args, kwargs)`` that then runs in place of the
        function; ``function.plain_call`` is Theano's own. If it returns True, no further hook is called.
    first : bool
        Call it before the hooks that there are; after them by default.
    """
    if not _hooks:
        _call_hooks()
    _hooks.insert(0 if first else len(_hooks), attach)


def _call_hooks():
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
            any(attach(function, given.arguments) for attach in _hooks)
        return function
    module.pfunc = pfunc


def divide_copies():
    """Have a copy of a function that runs over contexts run over them, too.

    Without this, `Function.copy` makes a function that runs on one device.
    """
    from theano.compile.function_module import Function
    original = Function.copy
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def copy(self, *args, **kwargs):
        function, divided = original(self, *args, **kwargs), self.mgpu_divided
        if divided is not None and not function.profile:
            given = parameters.bind(self, *args, **kwargs)
            given.apply_defaults()
            divided.copied(function, given.arguments['swap'], given.arguments['delete_updates'])
        return function
    Function.copy = copy
