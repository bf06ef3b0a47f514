"""Replicas: copies of the user's shared variables, one a context, and which of them are current.

Two methods mark a copy as current: `Replicated.refresh`, if no new version has come since it read the value, and
`commit`, for values that the step itself wrote. A value that anybody sets, at whatever time, is a new version.
"""
from __future__ import annotations

import contextlib
import sys
import threading
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import theano
from theano.gpuarray.type import GpuArrayType, get_context
from theano.tensor.sharedvar import TensorSharedVariable

from ...comm import alone
from ...devices.arena import is_large
from ...devices.context_map import Context
from ...devices.contexts import check_process, is_fork
from ...devices.processes import arena
from ...devices.shared_variables import watch, watcher_of
from ...errors import MgpuError, named
from ...graph.graph import fits_gpu, host_type
from ...utils.values import checksum
from .borrowed import is_lent, warn_if_large

_counting = threading.Lock()  # two threads that set a variable at once make two versions
_is_within_a_step = ContextVar('_is_within_a_step', default=False)  # each thread has its own


@contextlib.contextmanager
def within_a_step() -> Iterator[None]:
    """Run code of the user's in a block while a step is under way: it must not touch replicated variables.

    The code would read values from before the step, and its new values would reach some of the replicas only.
    """
    before = _is_within_a_step.set(True)
    try:
        yield
    finally:
        _is_within_a_step.reset(before)


def _note_change() -> None:
    with _counting:
        Replicated.changes += 1


def _check_turn(variable):
    if _is_within_a_step.get():
        raise MgpuError('%s was read or set by what prepares the next batch, while a step was under way whose new '
                        'values it would miss. Have each batch prepared in its turn: step.over(batches) without '
                        'ahead=True' % named(variable))


def replicated(variable: Any) -> Replicated:
    """Return the Replicated of a shared variable; all functions over the variable share it."""
    variable = getattr(variable.tag, 'stands_for', variable)
    return watcher_of(variable) or Replicated(variable)


class Storages(NamedTuple):
    """The places of the values of some variables: on some contexts, and maybe on others."""

    variables: Sequence[Replicated]
    copies: Sequence[tuple[Any, ...]]           # for each variable, its copies on the contexts, each once
    cells: Sequence[list[Any]]                  # of the copies: of all variables on the first context, then on the next
    others: Sequence[tuple[int, Context, Any]]  # copies on other contexts, by the number of the variable
    everywhere: bool                            # no variable has further copies


def storages_of(variables: Sequence[Replicated], contexts: Sequence[Context],
                others: Sequence[Context] = ()) -> Storages:
    """Return the Storages of variables that have copies on contexts, and maybe on others."""
    # Contexts on the host share a copy.
    copies = [tuple(dict.fromkeys(variable.copies[context] for context in contexts)) for variable in variables]
    on_others = {(i, variable.copies[context]): (i, context, variable.copies[context])
                 for i, variable in enumerate(variables) for context in others
                 if context in variable.copies and variable.copies[context] not in copies[i]}
    return Storages(variables, copies,
                    [variable.copies[context].container.storage for context in contexts for variable in variables],
                    list(on_others.values()),
                    all(copy in copies[i] or (i, copy) in on_others for i, variable in enumerate(variables)
                        for copy in variable.copies.values()))


def commit(variables: Iterable[Replicated], copies: Iterable[tuple[Any, ...]]) -> None:
    """Note of each variable that some copies, and they alone, have a new value that is the same on each."""
    with _counting:
        Replicated.changes += 1
        alone.n_changes += alone.is_alone()
        for variable, of_variable in zip(variables, copies):
            variable.version += 1
            variable.lent = None
            variable.latest_in = of_variable
            variable.ahead = variable.ahead or alone.is_alone()


class Replicated:
    """A shared variable of the user's and its copies on contexts.

    The copies hold the truth after a step, the variable after it was set; each is brought up to date from the other
    when it is needed, and not before. On the host (contexts of kind ``cpu``, and values of others that stay there) the
    variable is itself the replica: nothing is copied, and edits of borrowed memory count for every replica, as in plain
    Theano.

    Its states, which may hold at the same time:

    ================ ==================================== ==========================================================
    state            where it is kept                     what follows
    ================ ==================================== ==========================================================
    at home          ``copies[context] is variable``      the variable is the replica of that context
    current, stale   a copy is in ``latest_in``, or not   a stale copy is refreshed before a step reads it
    evicted          a stale copy of no or one element    its device has memory for other values
    divided          ``divided()`` gathers the value      one process alone has the latest value, until it is read
    lent             ``lent`` is a checksum               the user may edit it in place: steps compare the checksum
    asked            ``on_read(variable)``                it is called before each read, by a step, too
    in parts         ``is_in_parts``                      devices have copies of its rows, and miss edits in place
    in expressions   ``is_in_expressions``                values were computed of it, see `Private` of auto.data_sets
    shared           ``shared``                           it has had rank 0's value
    touched          ``touched``                          it was set since a rank last compared it with other ranks
    ahead            ``ahead``                            a rank has set it alone, since all have it alike
    ================ ==================================== ==========================================================
    """

    # Of all variables: it grows with each new value, and each other event after which steps have to look at them.
    changes = 0

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.copies: dict[Context, Any] = {}
        self.is_in_parts = self.is_in_expressions = self.ahead = self.touched = self.shared = False
        self.version = 0      # it grows with each new value
        self.divided: Callable[[], None] | None = None
        self.on_read: Callable[[Any], object] | None = None
        # Weak references to locks that are held during the steps of functions over the variable, and while it is set:
        # so a new value counts from the next step on, for every replica.
        self.step_locks: list[Any] = []
        self.lent: int | None = None
        self._times_given = 0
        self._in_arena: tuple[Any, Any] = (None, None)  # a state, and the copy of the value then
        self.latest_in: tuple[Any, ...] = (variable,)  # the copies, and the variable, with the latest value
        watch(variable, self)

    def __del__(self, is_finalizing=sys.is_finalizing):  # Python may have emptied this module by then
        # The last function over the variable is gone, and with it the copies: bring the value home.
        if not is_finalizing() and not is_fork():
            self.refresh(self.variable)

    @property
    def read_only(self) -> bool:
        """Return whether a copy would miss writes through a borrowed value."""
        return self.is_in_parts or any(replica is not self.variable for replica in self.copies.values())

    def on(self, context: Context) -> Any:
        """Return the replica on a context, made if there is none."""
        if context not in self.copies:
            self.copies[context] = self.variable if self._is_home(context) else self._copy(context)
            self.watch_lent_memory()
        return self.copies[context]

    def refresh(self, replica: Any, own: bool = False) -> None:
        """Bring a copy, or the variable, up to date; `own` is the part of this process of a sharded update."""
        if self.divided and not own:
            self.divided()
        if replica not in self.latest_in:
            version = self.version  # before the value is read: one that is set meanwhile is another version
            replica.container.unwatched = self.latest()
            self._has_read(replica, version)
            self.watch_lent_memory()

    def _new_version(self, *replicas):
        commit([self], [replicas])

    def watch_lent_memory(self):
        """Watch a value that was copied for edits in place, if somebody else refers to it."""
        if self.variable in self.latest_in and is_lent(self.variable.container.storage):
            self.lend()

    def evict(self) -> None:
        """Free the memory of the copies on devices. Those that are read again get the value again.

        Nothing is freed while another thread runs a step over the variable.
        """
        if self.divided:  # all processes have to come here, whatever their threads do
            self.divided()
        with contextlib.ExitStack() as stack:
            for lock in [each for each in [reference() for reference in self.step_locks] if each is not None]:
                if not lock.acquire(blocking=False):
                    return
                stack.callback(lock.release)
            _note_change()
            self.refresh(self.variable)
            for copy in self.copies.values():
                if copy is not self.variable and isinstance(copy.type, GpuArrayType):
                    self.latest_in = tuple(each for each in self.latest_in if each is not copy)
                    value = copy.container.storage[0]
                    copy.container.unwatched = value[tuple(slice(0, 1 if fixed else 0) for fixed in
                                                           copy.type.broadcastable)].copy()

    def in_arena(self) -> Any:
        """Return the current value, of a large array a copy in the memory that processes share.

        A value that the user may have edited in place since it was copied is copied again. New values that processes
        have computed lie there.
        """
        value = self.variable.container.storage[0]
        if is_large(value) and arena().place_of(value) is not None:
            return value
        state, (of, copy) = self.state, self._in_arena
        if state != of:
            if is_large(value) and is_large(copy) and (copy.shape, copy.dtype) == (value.shape, value.dtype):
                copy[...] = value
            else:
                copy = arena().with_array(value)
            self._in_arena = state, copy
        return copy

    @property
    def state(self) -> Any:
        """A value that is equal to an earlier one as long as a copy of the variable's value from then is right.

        It is equal to none where the user refers to the memory, and may edit it in place.
        """
        return object() if is_lent(self.variable.container.storage) else (self.version, self._times_given)

    def lend(self) -> None:
        """Watch the variable's value for edits in place, if others would miss them: the user may refer to it."""
        self._times_given += 1
        if self.lent is None and (self.read_only or self.is_in_expressions):
            self.lent = checksum(self.variable.container.storage[0])
            warn_if_large(self.variable)
            _note_change()

    def note_edits(self) -> None:
        """Take an edit in place of the variable's value, where it is `lent`, as a new version."""
        if self.lent is None:
            return
        storage = self.variable.container.storage
        if self.variable in self.latest_in and checksum(storage[0]) != self.lent:
            self._new_version(self.variable)
            self.touched = True
        elif not is_lent(storage):
            self.lent = None

    def divide(self, gather: Callable[[], None], is_here: bool) -> None:
        """Note that a step has left the new value on one process: this one, whose copy is current, or another.

        ``gather()`` sends it to every process; all have to read the variable at the same place. Until then something
        has to keep this object alive.
        """
        if not is_here:
            self._new_version()
        self.divided = gather
        _note_change()

    def ask(self, on_read: Callable[[Any], object] | None) -> None:
        """Call ``on_read(variable)`` before each read of the variable, by a step, too; None ends that."""
        self.on_read = on_read
        _note_change()

    def give(self, value: Any) -> None:
        """Note that every process has the latest value: `value`, or for None the value of this process."""
        if value is not None:
            self.variable.container.unwatched = value
            self._new_version(self.variable)
        self.divided = None

    def take(self, value: Any) -> None:
        """Set the value of all ranks, in the variable's memory if it fits: the user may have lent the memory."""
        here = self.variable.container.storage[0]
        if isinstance(here, np.ndarray) and here.flags.writeable and \
                (here.shape, here.dtype) == (np.shape(value), getattr(value, 'dtype', None)):
            here[...] = value
        elif checksum(here) != checksum(value):
            self.variable.container.unwatched = value
        self.after_write()
        self.touched = self.ahead = False

    def latest(self) -> Any:
        """Return the latest value that this process has, on the host; a copy on a lost device is passed over.

        It is a ContextError in a fork of the process that has it on a device.
        """
        # Copies on the host come first: they cost least.
        copies = sorted(self.latest_in, key=lambda shared: isinstance(shared.type, GpuArrayType))
        if isinstance(copies[0].type, GpuArrayType):
            check_process()
        for shared in copies[:-1]:
            try:
                return host_value(shared)
            except Exception:  # pygpu's GpuArrayException: the step in which the device failed has reported it
                continue
        return host_value(copies[-1])

    def before_read(self) -> None:
        """Bring the user's variable up to date, before any read of it."""
        _check_turn(self.variable)
        if self.on_read is not None:
            self.on_read(self.variable)
        self.refresh(self.variable)

    def before_write(self) -> None:
        """Check that the user's variable may be set, or updated by a Theano function."""
        _check_turn(self.variable)
        if alone.is_alone() and self.divided:  # an error says so: other ranks cannot be told
            self.divided()

    def after_write(self) -> None:
        """Note that the user's variable was set, or updated by a Theano function."""
        self._new_version(self.variable)
        self.divided = None
        self.touched = self.touched or not alone.is_alone()

    def _has_read(self, replica, version):
        """Note that a replica has the value of a version, which is no more the latest if another one has come since."""
        with _counting:
            if version == self.version:
                self.latest_in += (replica,)

    def current(self) -> dict[Any, Context | None]:
        """Return the copies with the latest value, each with its context; without any, the variable, and None."""
        current: dict[Any, Context | None] = {}
        for context, copy in self.copies.items():
            if copy in self.latest_in:
                current.setdefault(copy, context)
        return current or {self.variable: None}

    def peek(self) -> Any:
        """Return the variable's current value itself, which is not to be changed or kept."""
        self.refresh(self.variable)
        return self.variable.container.storage[0]

    def value(self) -> Any:
        """Return a copy of the variable's current value on the host."""
        self.refresh(self.variable)
        return host_value(self.variable)

    def _is_home(self, context):
        """Return whether the variable is itself the replica on a context, in the memory that the user may share."""
        if isinstance(self.variable.type, GpuArrayType):  # without a name, it lies on the device of the flag `device`
            return context.kind != 'cpu' and get_context(self.variable.type.context_name) is get_context(context.name)
        return not _lies_on_device(context, self.variable)

    def _copy(self, context):
        version = self.version
        replica = copy_on(context, self.variable, self.latest())
        self._has_read(replica, version)
        return replica


def host_value(shared: Any) -> Any:
    """Return a copy of a shared variable's value on the host, without asking its watcher."""
    value = shared.container.storage[0]
    return np.asarray(value) if isinstance(shared.type, GpuArrayType) else deepcopy(value)


def copy_on(context: Context, variable: Any, value: Any) -> Any:
    """Return a new shared variable on a context, of the user's variable's type; the value is not copied on the host."""
    if _lies_on_device(context, variable):
        return theano.shared(value, name=variable.name, target=context.name,
                             broadcastable=variable.type.broadcastable)
    if isinstance(variable.type, GpuArrayType):
        return TensorSharedVariable(variable.name, host_type(variable), value, strict=True)
    return variable.__class__(variable.name, variable.type, value, strict=True)


def _lies_on_device(context, variable):
    """Return whether a context's replica of a shared variable lies on its device, and not on the host."""
    on_gpu = context.kind != 'cpu' and (fits_gpu(variable) or isinstance(variable.type, GpuArrayType))
    return on_gpu and variable.type.ndim > 0  # scalars stay on the host, where Theano keeps them too
