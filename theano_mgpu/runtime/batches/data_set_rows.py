"""The rows of a data set inside of a function: each device has its own, which are sent once.

A data set is a shared variable with a row a sample. It enters a step as an argument does, by a stand-in, and is divided
by the same shares. On the host, a replica has a view of the variable's value. A device, or a process, gets a copy of
its rows when it first needs them, and again after the variable was set. Where a batch is in slices for lack of memory,
each slice is sent in its turn, and no device keeps rows.
"""
from __future__ import annotations

import contextlib
from typing import Any, Sequence

import theano

from ...devices.arena import ArenaFull
from ...devices.context_map import HOST, Context
from ...devices.processes import arena
from ...devices.transfers import DeviceBuffers, fetch
from ...errors import named
from ...graph.graph import host_type, is_sparse
from ..replicas.replicated import replicated


class DataSetRows:
    """Some rows of a data set, where they are, and on the devices that have taken them.

    They keep no reference to the variable's value, as an owner of its memory would.
    """

    def __init__(self, storage: list[Any], rows: slice) -> None:
        self._storage, self._rows = storage, rows
        self._on: dict[Context, Any] = {}

    def on(self, context: Context) -> Any:
        """Return the rows where functions of a context take them."""
        if context.kind == 'cpu':
            return fetch(self._storage[0][self._rows])
        if context not in self._on:
            self._on[context] = DeviceBuffers(context).send(self, self._storage[0][self._rows])
        return self._on[context]

    def in_arena(self) -> Any:
        """Return a copy of the rows in the memory that processes share; if that is full, the rows where they are."""
        if HOST not in self._on:
            with contextlib.suppress(ArenaFull):
                self._on[HOST] = arena().with_array(self.on(HOST))
        return self._on.get(HOST, self.on(HOST))


class DataSet:
    """A shared variable with a row a sample, and the input of the replicas that stands for it."""

    def __init__(self, variable: Any) -> None:
        self._replica = replicated(variable)
        self._storage, self._is_private = variable.container.storage, hasattr(variable.tag, 'private')
        self.stand_in = stand_in(variable, named(variable))
        self._key: Any = None  # the version of the value, and the pieces, that the parts are of
        self._parts: Sequence[DataSetRows] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the latest value."""
        return self._storage[0].shape

    def latest(self) -> DataSet:
        """Bring the value up to date, and return the data set."""
        self._replica.note_edits()
        self._replica.before_read()
        return self

    def parts(self, pieces: Sequence[slice], stay: bool, are_forked: bool = False) -> Sequence[Any]:
        """Return the rows of each piece: arrays of the host or, if they `stay` on devices, `DataSetRows` to send there.

        For processes, all but the first lie in the memory that they share.
        """
        key = self._replica.state if are_forked else self._replica.version, pieces
        if key != self._key:  # rows of other pieces, or of an earlier value, are freed
            # The thread of a replica cannot read the memory of another device, which may compute meanwhile.
            storage = [fetch(self._storage[0])] if hasattr(self._storage[0], 'sync') else self._storage
            self._key, self._parts = key, [DataSetRows(storage, piece) for piece in pieces]
            self._replica.is_in_parts |= stay or storage is not self._storage
            if not self._is_private:
                self._replica.watch_lent_memory()  # a copy would miss edits
        return self._parts if stay else [rows.in_arena() if are_forked and i else rows.on(HOST)
                                         for i, rows in enumerate(self._parts)]


def stand_in(variable: Any, name: str) -> theano.Variable:
    """Return an input with the rows of a variable."""
    return (variable.type if is_sparse(variable) else host_type(variable))(name)
