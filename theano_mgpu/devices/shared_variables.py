"""Hooks on reads and writes of shared variables.

Theano 1.0.5's shared variables have no hooks: when a variable is set, its copies on other contexts become stale in
silence, and when the copies are trained, the variable does. With this patch, the watcher of a variable is called before
each read and around each write.
"""
from __future__ import annotations

import functools
import threading
import weakref
from types import SimpleNamespace
from typing import Any, Callable, Iterable, List, MutableMapping, NamedTuple

from ..compat.wrapping import wrap

_watchers: MutableMapping[int, Any] = weakref.WeakValueDictionary()  # id(storage); a watcher keeps its storage alive
_generation = 0  # grows with each watcher, and each lock, so that functions look again
_adding = threading.RLock()


class _Uses(NamedTuple):
    """The watchers of a function's variables, the watchers of updated variables among them, and their step locks.

    The references are weak: a function that outlives the last step over a variable must not keep its copies on the
    devices.
    """

    generation: int
    watched: List[Any]
    updated: List[Any]
    locks: List[Any]


def watch(variable: Any, watcher: Any) -> None:
    """Call a watcher, which the caller keeps alive, at each use of a shared variable.

    ``before_read()`` is called before the variable's value is read, ``before_write()`` and ``after_write()`` around a
    change, by get_value, set_value, or any Theano function over the variable. ``step_locks`` are held during the
    change, see `add_step_lock`. ``read_only`` says that there are copies, which would miss a write to a borrowed value:
    an array on the host is then made read-only. ``lend()`` is called before any other value is given away itself.
    """
    global _generation
    with _adding:
        _watchers[id(variable.container.storage)] = watcher
        _generation += 1


def watcher_of(variable: Any) -> Any:
    """Return the watcher of a shared variable; None if it is not watched."""
    return _watchers.get(id(variable.container.storage))


def add_step_lock(watcher: Any, lock: Any) -> None:
    """Hold a lock, a ``threading.RLock``, whenever the variable of a watcher is changed."""
    global _generation
    with _adding:
        others = [other for other in _living(watcher.step_locks) if other is not lock]
        watcher.step_locks = [weakref.ref(each) for each in others + [lock]]  # another thread may read the old list
        _generation += 1


def _living(references: Iterable[Callable[[], Any]]) -> list[Any]:
    return [each for each in [reference() for reference in references] if each is not None]


def _locks_of(watchers):
    """Return the step locks of watchers, each once, in one order, so that two threads cannot wait for each other."""
    locks = {id(lock): lock for watcher in watchers for lock in _living(watcher.step_locks)}
    return [lock for _, lock in sorted(locks.items())]


def _holding(locks, call):
    if not locks:
        return call()
    # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
    with locks[0]: return _holding(locks[1:], call)  # noqa: E701


def hook_shared_variables() -> None:
    """Call the watchers of shared variables from `SharedVariable`, `Container` and `Function`.

    Containers of a function, such as ``f.container[variable]``, have the storage of the variable.
    """
    from theano.compile.function_module import Function
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.link import Container
    from theano.gpuarray.type import GpuArraySharedVariable
    for cls in (SharedVariable, GpuArraySharedVariable):
        for name, function in (('get_value', _get_value), ('set_value', _change), ('zero', _change)):
            if name in vars(cls):
                wrap(cls, name)(function)
    _wrap_container(Container)
    _wrap_function_call(Function)


def _get_value(original, variable, borrow=False, return_internal_type=False):
    """Return the value of a shared variable as `original` does: itself, or a copy, which is not lent."""
    container = variable.container
    watcher = _watchers.get(id(container.storage))
    if watcher is None:
        return original(variable, borrow, return_internal_type)
    watcher.before_read()
    stand_in = SimpleNamespace(container=SimpleNamespace(value=container.unwatched))
    return _given(watcher, container, original(stand_in, borrow, return_internal_type))


def _given(watcher, container, value):
    """Return a value for the user; if it is the container's own, the user may write to it unless that is an error."""
    if value is container.storage[0]:
        if watcher.read_only and hasattr(value, 'setflags'):
            value = value.view()
            value.setflags(write=False)
        else:
            watcher.lend()
    return value


def _change(original, owner, *args, **kwargs):
    """Call a method that changes the value of a shared variable or of a container, and tell the watcher."""
    watcher = _watchers.get(id(getattr(owner, 'container', owner).storage))
    if watcher is None:
        return original(owner, *args, **kwargs)
    watcher.before_write()

    def change():
        result = original(owner, *args, **kwargs)
        watcher.after_write()
        return result
    return _holding(_locks_of([watcher]), change)


def _wrap_container(cls):
    get, set_ = cls.__get__, cls.__set__

    def reading(original, container, *args):
        watcher = _watchers.get(id(container.storage)) if _watchers else None
        if watcher is not None:
            watcher.before_read()
        return original(container, *args)

    def lent(container):
        watcher, value = _watchers.get(id(container.storage)), reading(get, container)
        return value if watcher is None else _given(watcher, container, value)

    wrap(cls, '__deepcopy__')(reading)
    wrap(cls, '__reduce_ex__')(reading)
    cls.unwatched = property(get, set_)
    cls.data = cls.value = property(lent, functools.partial(_change, set_))


def _uses_of(function):
    uses, generation = function.__dict__.get('_mgpu_uses'), _generation
    if uses is None or uses.generation != generation:
        from theano.compile.function_module import alias_root
        maker = function.maker
        # An output that is memory of a variable, as with ``theano.Out(variable, borrow=True)``, may be written to.
        lent = {alias_root(variable) for variable, output in zip(maker.fgraph.outputs, maker.outputs)
                if output.borrow and not hasattr(function, 'mgpu_only_reads')}
        specs = [(_watchers.get(id(container.storage)), spec.update is not None or variable in lent) for
                 container, spec, variable in zip(function.input_storage, maker.expanded_inputs, maker.fgraph.inputs)]
        watched = [watcher for watcher, _ in specs if watcher is not None]
        updated = [watcher for watcher, is_updated in specs if watcher is not None and is_updated]
        uses = function._mgpu_uses = _Uses(generation, list(map(weakref.ref, watched)),
                                           list(map(weakref.ref, updated)), _locks_of(updated))
    return uses


def _wrap_function_call(cls):
    original = cls.__call__

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if not _watchers:
            return original(self, *args, **kwargs)
        uses = _uses_of(self)
        watched, updated = _living(uses.watched), _living(uses.updated)
        for watcher in updated:
            watcher.before_write()

        def compute():
            for watcher in watched:
                watcher.before_read()
            try:
                return original(self, *args, **kwargs)
            finally:  # a function that fails may have updated some variables before
                for watcher in updated:
                    watcher.after_write()
        return _holding(uses.locks, compute)

    @functools.wraps(original)
    def dispatched(self, *args, **kwargs):
        if self.mgpu_divided is None:
            return self.plain_call(*args, **kwargs)
        return self.mgpu_divided(args, kwargs)

    cls.unwatched_call, cls.plain_call, cls.mgpu_divided = original, __call__, None
    cls.__call__ = dispatched
