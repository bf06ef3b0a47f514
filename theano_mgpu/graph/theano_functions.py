"""Functions of Theano: hooks after each call of `theano.function`, and functions and graphs of the package itself."""
from __future__ import annotations

import functools
import os
import sys
import threading
import time
from typing import Any, Callable, ContextManager, List, Mapping, Sequence, TypeVar, cast

import theano
from theano.compile import function_module
from theano.compile.function_module import alias_root

from ..compat.wrapping import arguments_of, wrap
from ..errors import folders
from ..utils import progress
from ..utils.attributes import temporarily
from .graph import fetched_values
from .layers import name_function, timed
from .updates import first_of_each

Function = TypeVar('Function', bound=Callable[..., Any])

_hooks: List[Callable[..., Any]] = []
_making = threading.local()


def plain_functions() -> ContextManager[Any]:
    """Keep `theano.function` from calling hooks within the ``with`` block: for functions of our own, and nested ones.
    """
    return temporarily(_making, 'plain', True)


def replaced_functions(replace: Callable[..., Any]) -> ContextManager[Any]:
    """Let a callable replace the functions that are made within the ``with`` block; no hook is called with these.

    Parameters
    ----------
    replace : callable
        ``replace(arguments, compile)`` returns the function: the arguments of `theano.compile.pfunc.pfunc`, and a
        callable that returns Theano's own function, the same one each time.
    """
    return temporarily(_making, 'replace', replace)


def plain_function(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Make a function with `theano.function`, without the hook."""
    with plain_functions():
        return theano.function(*args, **kwargs)


def host_function(inputs: Sequence[Any], outputs: Any, **options: Any) -> Callable[..., Any]:
    """Make such a function that computes on the host."""
    mode = theano.compile.get_default_mode().excluding('gpuarray_opt')
    graph = [getattr(each, 'variable', each) for each in (outputs if isinstance(outputs, list) else [outputs])]
    return plain_function(inputs, outputs, mode=mode, givens=fetched_values(graph), **options)


def builds_graphs(function: Function) -> Function:
    """Make a function build graphs without test values, which the inputs of the package itself do not have.

    With the flag ``compute_test_value=raise``, each op on such an input is an error.
    """
    @functools.wraps(function)
    def within_own_flags(*args, **kwargs):
        with temporarily(theano.config, 'compute_test_value', 'off'), \
                temporarily(theano.config, 'warn_float64', 'ignore'):
            return function(*args, **kwargs)
    return cast(Function, within_own_flags)


def is_of_user(arguments: Mapping[str, Any]) -> bool:
    """Return whether a new function is listed for the user.

    A function that Theano or Keras makes for its own use, such as `K.eval`, is not, nor is one that computes nothing.
    """
    name, outputs = arguments['name'] or '', arguments['outputs']
    if not name.startswith(folders('theano', 'keras')):
        is_empty = outputs is None or isinstance(outputs, (list, tuple, dict)) and not outputs
        return bool(arguments['params'] or arguments['updates'] or not is_empty)  # a variable is neither true nor false
    return bool(arguments['params'] and name.startswith(folders('keras.backend')))


def _name_for_user(name):
    """Return the name of the function that is being made, for messages.

    Theano names a function that has no name after the line that has called `theano.function`. Where that line is in
    Theano or Keras, as for ``K.function``, the line that has called Keras is meant. Folders are left out.
    """
    frame: Any
    frame, others = sys._getframe(1), folders('theano', 'keras', 'theano_mgpu')
    if name and name.startswith(others):
        while frame and frame.f_code.co_filename.startswith(others):
            frame = frame.f_back
        name = '%s:%d' % (frame.f_code.co_filename, frame.f_lineno) if frame else name
    place, colon, line = (name or 'a function').rpartition(':')
    return os.path.basename(place) + colon + line if colon else line


def graph_of(function: Any) -> list[Any]:
    """Return the outputs and new values of a function, before Theano's optimiser, and the variables that it updates."""
    updates = [(each.variable, each.update) for each in function.maker.inputs if each.update is not None]
    return [output.variable for output in function.maker.outputs] + [each for pair in updates for each in pair]


def lends_memory(function: Any) -> bool:
    """Return whether an output is memory of a shared variable, as ``theano.Out(variable, borrow=True)`` asks for."""
    maker = function.maker
    shared = {variable for spec, variable in zip(maker.expanded_inputs, maker.fgraph.inputs) if spec.shared}
    return any(output.borrow and alias_root(variable) in shared
               for variable, output in zip(maker.fgraph.outputs, maker.outputs))


def after_each_function(attach: Callable[[Any, Mapping[str, Any]], Any], first: bool = False) -> None:
    """Call a hook with each function that Theano makes from now on.

    Every `theano.function` calls `pfunc`, whatever name a script has imported it by.

    Parameters
    ----------
    attach : callable
        ``attach(function, arguments)``: the new function, and a dict of the arguments of `theano.compile.pfunc.pfunc`.
        The attribute ``function.mgpu_name`` is its name for messages, ``mgpu_seconds`` the time in which it was made.
        The hook may set ``function.mgpu_divided``, a
        callable ``divided(args, kwargs)`` that then runs in place of the function; ``function.plain_call`` is Theano's
        own, unless a callable with a method `copied` is set there. If the hook returns True, no further one is called.
    first : bool
        Call it before the hooks that there are; after them by default.
    """
    hook_functions_once()
    _hooks.insert(0 if first else len(_hooks), attach)


@functools.lru_cache(None)
def hook_functions_once() -> None:
    """Call the hooks with each function that Theano makes, or reads from a pickle, from now on."""
    @wrap(function_module)
    def _constructor_Function(original, maker, *args, **kwargs):
        began, function = time.perf_counter(), original(maker, *args, **kwargs)
        if function is not None and not getattr(_making, 'plain', False):
            function.mgpu_name = _name_for_user(maker.name)
            function.mgpu_seconds = time.perf_counter() - began
            any(attach(function, _arguments_of(maker)) for attach in _hooks)
        return function

    @wrap(sys.modules['theano.compile.function'])
    def pfunc(original, *args, **kwargs):
        if getattr(_making, 'plain', False):
            return original(*args, **kwargs)
        arguments = arguments_of(original, *args, **kwargs)
        name_function(arguments['outputs'], first_of_each(arguments['updates']).values())
        replace = getattr(_making, 'replace', None)
        if replace is not None:
            return replace(arguments, functools.lru_cache(None)(functools.partial(_made, original, arguments)))
        function = _made(original, arguments)
        any(attach(function, arguments) for attach in _hooks)
        return function


def _arguments_of(maker):
    """Return the arguments of `theano.compile.pfunc.pfunc` for the function of a maker."""
    updates = [(each.variable, each.update) for each in maker.inputs if each.shared and each.update is not None]
    return dict(params=[each for each in maker.inputs if not each.shared], updates=updates, givens=(), name=None,
                outputs=[each.variable for each in maker.outputs], mode=maker.mode, profile=maker.profile,
                no_default_updates=True)


def _made(original, arguments):
    name, began = _name_for_user(arguments['name']), time.perf_counter()
    with plain_functions(), progress.compiling(name):
        function = original(**{**arguments, 'mode': timed(arguments['mode'], name)})
    function.mgpu_name, function.mgpu_seconds = name, time.perf_counter() - began
    return function


def divide_copies() -> None:
    """Divide the copy of a function that runs over contexts over the same contexts."""
    from theano.compile.function_module import Function

    @wrap(Function)
    def copy(original, self, *args, **kwargs):
        function, ways = original(self, *args, **kwargs), [vars(self).get('plain_call'), self.mgpu_divided]
        for way in filter(None, ways):
            arguments = arguments_of(original, self, *args, **kwargs)
            function.mgpu_name, function.mgpu_seconds = arguments['name'] or self.mgpu_name + ' copy', self.mgpu_seconds
            way.copied(function, arguments['swap'], arguments['delete_updates'])
        return function
