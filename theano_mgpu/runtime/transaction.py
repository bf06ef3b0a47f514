"""The new values of a step: all of them are stored, or none."""
from typing import Any, Callable

import numpy as np
from theano.compile.sharedvalue import SharedVariable

from ..patches.shared_variables import watcher_of
from ..replicas.transfers import own_copy, wait


class Transaction:
    """What shared storage held before a step, so that an error can put it back.

    Compiled replicas never write to shared storage: they return new values, which replace old ones.
    Keeping a reference to each old one is all that it takes.
    """

    def __init__(self):
        self._old = []
        self._actions = []

    def replace(self, shared: SharedVariable, value: Any) -> None:
        """Give a shared variable a new value, of its internal type; remember the old one."""
        storage = shared.container.storage
        self._old.append((storage, storage[0]))
        storage[0] = value

    def convert(self, shared: SharedVariable, value: Any) -> None:
        """As `replace`, with a value from the host."""
        self.replace(shared, shared.type.filter(value))

    def wait(self) -> None:
        """Wait until devices have computed the new values."""
        wait(storage[0] for storage, _ in self._old if hasattr(storage[0], 'sync'))

    def then(self, action: Callable, *arguments: Any) -> None:
        """Have something called once the new values are to stay."""
        self._actions.append((action, arguments))

    def commit(self) -> None:
        """The new values stay: do what was to be done then, in order."""
        for action, arguments in self._actions:
            action(*arguments)

    def roll_back(self) -> None:
        """Put every old value back, latest first."""
        for storage, value in reversed(self._old):
            storage[0] = value
        self._old.clear()

    def store_rows(self, variable: SharedVariable, value: np.ndarray) -> None:
        """Give a shared variable with a row a sample, of the user's or what stands for it, its new value."""
        variable = getattr(variable.tag, 'stands_for', variable)
        self.convert(variable, own_copy(variable, value))  # the caller may be given the same rows as an output
        self.then(_written_by_step, watcher_of(variable))


def _written_by_step(watcher):
    watcher.after_write()
    watcher.touched = False  # the same on every rank: made from what they have added
