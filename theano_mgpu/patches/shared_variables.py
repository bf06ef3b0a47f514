"""Hooks on reads and writes of shared variables.

Theano 1.0.5's shared variables have no hooks: when a variable is set, its copies on other contexts become stale in
silence, and when the copies are trained, the variable does. With this patch, the watcher of a variable is called before
each read and around each write.
"""
import functools
import threading
import weakref
from collections import namedtuple

_watchers = weakref.WeakValueDictionary()  # id(storage) -> watcher; a watcher keeps its storage alive
_generation = 0                            # grows with each watcher, and each lock, so that functions look again
_adding = threading.RLock()

# The watchers of a function's shared variables, and of those that it updates, with the locks of the latter. The
# references are weak: a function that outlives the last step over a variable must not keep its copies on the devices.
_Uses = namedtuple('_Uses', 'generation watched updated locks')
_UNKNOWN = _Uses(None, (), (), ())


def watch(variable, watcher):
    """Have a watcher called at each use of a shared variable.

    Parameters
    ----------
    variable : theano.compile.SharedVariable
    watcher : object
        Its ``before_read()`` is called before the variable's value is read, ``before_write()`` and
        ``after_write()`` around a change, by get_value, set_value, or any Theano function over the variable; its
        ``step_locks`` are held during the change, see `add_step_lock`; ``read_only`` says that there are copies, which
        would miss a write to a borrowed value: an array on the host is then made read-only, and ``lend()`` is called
        before one on a device is given away. The caller keeps the watcher alive.
    """
    global _generation
    with _adding:
        _watchers[id(variable.container.storage)] = watcher
        _generation += 1


def watcher_of(variable):
    """The watcher of a shared variable; None if it is not watched."""
    return _watchers.get(id(variable.container.storage))


def add_step_lock(watcher, lock):
    """Have a lock held whenever the variable of a watcher is changed.

    Parameters
    ----------
    watcher : object
    lock : threading.RLock
    """
    global _generation
    with _adding:
        others = [other for other in _living(watcher.step_locks) if other is not lock]
        watcher.step_locks = [weakref.ref(each) for each in others + [lock]]  # another thread may read the old list
        _generation += 1


def _living(references):
    """The objects of weak references that still exist."""
    return [each for each in [reference() for reference in references] if each is not None]


def _locks_of(watchers):
    """The step locks of watchers, each once, in one order, so that two threads cannot wait for each other."""
    locks = {id(lock): lock for watcher in watchers for lock in _living(watcher.step_locks)}
    return [lock for _, lock in sorted(locks.items())]


def _holding(locks, call):
    """What ``call()`` returns, with locks held."""
    if not locks:
        return call()
    # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
    with locks[0]: return _holding(locks[1:], call)  # noqa: E701


def hook_shared_variables():
    """Have `SharedVariable`, `Container` and `Function` call the watchers of shared variables.

    Containers of a function, such as ``f.container[variable]``, have the storage of the variable. Without this, a copy
    of a variable keeps its old value when the variable is set, and the other way round.
    """
    from theano.compile.function_module import Function
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof.link import Container
    from theano.gpuarray.type import GpuArraySharedVariable
    _wrap_accessors(SharedVariable)
    _wrap_accessors(GpuArraySharedVariable)
    _wrap_container(Container)
    _wrap_function_call(Function)


def _wrap_accessors(cls):
    def wrapped(name, wrap):
        original = cls.__dict__.get(name)
        if original is not None:
            setattr(cls, name, functools.wraps(original)(wrap(original)))

    def reads(original):
        def get_value(self, borrow=False, return_internal_type=False):
            watcher = watcher_of(self)
            if watcher is None:
                return original(self, borrow, return_internal_type)
            watcher.before_read()
            value = original(self, borrow, return_internal_type)
            if borrow and watcher.read_only:
                if hasattr(value, 'setflags'):
                    value = value.view()
                    value.setflags(write=False)
                elif value is self.container.storage[0]:
                    watcher.lend()
            return value
        return get_value

    def writes(original):
        def write(self, *args, **kwargs):
            watcher = watcher_of(self)
            if watcher is None:
                return original(self, *args, **kwargs)
            watcher.before_write()

            def set_and_note():
                result = original(self, *args, **kwargs)
                watcher.after_write()
                return result
            return _holding(_locks_of([watcher]), set_and_note)
        return write

    wrapped('get_value', reads)
    wrapped('set_value', writes)
    wrapped('zero', writes)


def _wrap_container(cls):
    get, set_, deepcopy = cls.__get__, cls.__set__, cls.__deepcopy__

    def before_read(container):
        watcher = _watchers.get(id(container.storage)) if _watchers else None
        if watcher is not None:
            watcher.before_read()

    def watched_get(self):
        before_read(self)
        return get(self)

    def watched_set(self, value):
        watcher = _watchers.get(id(self.storage)) if _watchers else None
        if watcher is None:
            return set_(self, value)
        watcher.before_write()

        def set_and_note():
            set_(self, value)
            watcher.after_write()
        return _holding(_locks_of([watcher]), set_and_note)

    def __deepcopy__(self, memo):
        before_read(self)
        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol):
        before_read(self)
        return object.__reduce_ex__(self, protocol)

    cls.data = cls.value = property(watched_get, watched_set)
    cls.unwatched = property(get, set_)
    cls.__deepcopy__, cls.__reduce_ex__ = __deepcopy__, __reduce_ex__


def _uses_of(function):
    """The _Uses of a compiled function."""
    uses, generation = function.__dict__.get('_mgpu_uses', _UNKNOWN), _generation
    if uses.generation != generation:
        found = [(_watchers.get(id(container.storage)), spec)
                 for container, spec in zip(function.input_storage, function.maker.expanded_inputs)]
        watched = [watcher for watcher, _ in found if watcher is not None]
        updated = [watcher for watcher, spec in found if watcher is not None and spec.update is not None]
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
        if not updated:
            for watcher in watched:
                watcher.before_read()
            return original(self, *args, **kwargs)
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
            return __call__(self, *args, **kwargs)
        return self.mgpu_divided(args, kwargs)

    cls.unwatched_call, cls.plain_call, cls.mgpu_divided = original, __call__, None
    cls.__call__ = dispatched
