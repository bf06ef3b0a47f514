"""The new values of a step: all of them are stored, or none."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np
from theano.compile.sharedvalue import SharedVariable

from ..devices.shared_variables import watcher_of
from ..devices.transfers import own_copy


class Transaction:
    """The values that shared storage held before a step, so that an error can put them back.

    Compiled replicas never write to shared storage: they return new values, which replace old ones.
    Keeping a reference to each old one is all that it takes.
    """

    def __init__(self) -> None:
        self._old: list[tuple[list[Any], Any]] = []
        self._actions: list[tuple[Callable[..., Any], Any]] = []

    def replace(self, storages: Sequence[list[Any]], values: Iterable[Any]) -> None:
        """Put new values, of their internal types, into the storages of shared variables; remember the old ones."""
        for storage, value in zip(storages, values):
            self._old.append((storage, storage[0]))
            storage[0] = value

    def has_replaced(self, shared: SharedVariable) -> bool:
        """Return whether the step has given a shared variable a new value."""
        return any(storage is shared.container.storage for storage, _ in self._old)

    def then(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Add a call that is made once the new values are to stay."""
        self._actions.append((action, arguments))

    def commit(self) -> None:
        """Let the new values stay: make the calls that were added, in order."""
        for action, arguments in self._actions:
            action(*arguments)

    def roll_back(self) -> None:
        """Put every old value back, latest first."""
        for storage, value in reversed(self._old):
            storage[0] = value
        self._old.clear()

    def store_rows(self, variable: SharedVariable, value: np.ndarray) -> None:
        """Give a shared variable with a row a sample, of the user's or its stand-in, its new value."""
        variable = getattr(variable.tag, 'stands_for', variable)
        value = own_copy(variable, value)  # the caller may be given the same rows as an output
        self.replace([variable.container.storage], [variable.type.filter(value)])
        self.then(_note_written_by_step, watcher_of(variable))


def _note_written_by_step(watcher):
    watcher.after_write()
    watcher.touched = False  # every rank has computed the same value from the added sums
