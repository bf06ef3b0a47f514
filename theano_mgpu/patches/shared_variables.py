"""Hooks on reads and writes of shared variables.

Theano 1.0.5's shared variables have no hooks: when a variable is set, its copies on other contexts become stale in
silence, and when the copies are trained, the variable does. With this patch, the watcher of a variable is called before
each read and around each write.
"""
import contextlib
import functools
import weakref

_watchers = weakref.WeakValueDictionary()  # id(storage) -> watcher; a watcher keeps its storage alive
_generation = 0                            # grows with each call of watch, so that functions look again


def watch(variable, watcher):
    """Have a watcher called at each use of a shared variable.

    Parameters
    ----------
    variable : theano.compile.SharedVariable
    watcher : object
        Its ``before_read()`` is called before the variable's value is read, ``before_write()`` and
        ``after_write()`` around a change, by get_value, set_value, or any Theano function over the variable; its
        ``step_locks`` are held during the change; ``read_only`` says that a borrowed value must not be written to,
        since such a write would go unnoticed. The caller keeps the watcher alive.
    """
    global _generation
    _watchers[id(variable.container.storage)] = watcher
    _generation += 1


def watcher_of(variable):
    """The watcher of a shared variable; None if it is not watched."""
    return _watchers.get(id(variable.container.storage))


@contextlib.contextmanager
def _writing(watchers):
    """The block in which the variables of these watchers are changed."""
    for watcher in watchers:
        watcher.before_write()
    locks = {id(lock): lock for watcher in watchers for lock in list(watcher.step_locks)}
    with contextlib.ExitStack() as stack:
        for _, lock in sorted(locks.items()):  # in one order, so that two threads cannot wait for each other
            stack.enter_context(lock)
        yield


def hook_shared_variables():
    """Have `SharedVariable` and `Function` call the watchers of shared variables.

    Without this, a copy of a variable keeps its old value when the variable is set, and the other way round.
    """
    from theano.compile.function_module import Function
    from theano.compile.sharedvalue import SharedVariable
    from theano.gpuarray.type import GpuArraySharedVariable
    _wrap_accessors(SharedVariable)
    _wrap_accessors(GpuArraySharedVariable)
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
            if borrow and watcher.read_only and hasattr(value, 'setflags'):
                value = value.view()
                value.setflags(write=False)
            return value
        return get_value

    def writes(original):
        def write(self, *args, **kwargs):
            watcher = watcher_of(self)
            if watcher is None:
                return original(self, *args, **kwargs)
            with _writing([watcher]):
                result = original(self, *args, **kwargs)
                watcher.after_write()
            return result
        return write

    wrapped('get_value', reads)
    wrapped('set_value', writes)
    wrapped('zero', writes)


def _watched_by(function):
    """Watchers of the shared variables of a compiled function: (all, those that it updates)."""
    generation, watched, updated = getattr(function, '_mgpu_watched', (None, (), ()))
    if generation != _generation:
        found = [(_watchers.get(id(container.storage)), spec)
                 for container, spec in zip(function.input_storage, function.maker.expanded_inputs)]
        # Weak: a function that outlives the last step over a variable must not keep its copies on the devices.
        watched = [weakref.ref(watcher) for watcher, _ in found if watcher is not None]
        updated = [weakref.ref(watcher) for watcher, spec in found if watcher is not None and spec.update is not None]
        function._mgpu_watched = (_generation, watched, updated)
    return [[watcher for watcher in (reference() for reference in references) if watcher is not None]
            for references in (watched, updated)]


def _wrap_function_call(cls):
    original = cls.__call__

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if not _watchers:
            return original(self, *args, **kwargs)
        watched, updated = _watched_by(self)
        with _writing(updated) if updated else contextlib.nullcontext():  # most functions update nothing
            for watcher in watched:
                watcher.before_read()
            try:
                return original(self, *args, **kwargs)
            finally:  # a function that fails may have updated some variables before
                for watcher in updated:
                    watcher.after_write()

    @functools.wraps(original)
    def dispatched(self, *args, **kwargs):
        if self.mgpu_divided is None:
            return __call__(self, *args, **kwargs)
        return self.mgpu_divided(args, kwargs)

    cls.unwatched_call, cls.plain_call, cls.mgpu_divided = original, __call__, None
    cls.__call__ = dispatched
