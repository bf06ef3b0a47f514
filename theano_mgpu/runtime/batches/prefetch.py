"""The next batch, scattered and sent while the devices compute this one."""
from __future__ import annotations

import contextlib
import operator
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, Sequence

from ...utils.values import checksum
from ..batch import Batch
from ..replicas.replicated import within_a_step


class LookAhead:
    """The preparation of the next batch, if it is known.

    ``prepare(args)`` returns the values of a call's arguments and the Batch made of them, or None.
    """

    def __init__(self, prepare: Callable[[Any], tuple[Any, Batch] | None]) -> None:
        self._prepare = prepare
        # The arguments, a number that an edit changes, and the result of `prepare`.
        self._prepared: tuple[Any, int, Any] | None = None
        self._next_batch: Callable[[], Any] | None = None
        self._number: Callable[[Any], int] = len
        self._block: Callable[[], ContextManager] = within_a_step

    @contextlib.contextmanager
    def asking(self, next_batch: Callable[[], Any] | None, may_change: bool = False,
               is_apart: bool = False) -> Iterator[None]:
        """Prepare, within the block, the batch whose arguments ``next_batch()`` returns, or None.

        It runs within a step: no variable may be read, unless the function `is_apart`, over variables that are the
        package's own. The arguments `may_change` in place before their turn.
        """
        self._next_batch, self._number = next_batch, checksum if may_change else len
        self._block = contextlib.nullcontext if is_apart else within_a_step
        try:
            yield
        finally:
            self._next_batch = None  # it holds the data of a loop

    def prepare(self) -> None:
        """Prepare the next batch, if it is known."""
        if self._next_batch is None:
            return
        try:
            with self._block():
                args = self._next_batch()
            self._prepared = None if args is None else (args, self._number(args), self._prepare(args))
        except Exception:
            # An error of the next batch (its shape, no room for it on a device) must not undo the current step.
            # Nothing is prepared: the work is done again, and raises the error, when the batch is due.
            self._prepared = None

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Batch] | None:
        """Return the values and the batch that were prepared, if they are of these arguments."""
        if self._prepared is None:
            return None
        (before, number, prepared), self._prepared = self._prepared, None
        is_of_these = not kwargs and all(map(operator.is_, args, before)) and self._number(args) == number
        return prepared if is_of_these else None

    def forget(self) -> None:
        """Drop the prepared batch, because it will not be used."""
        self._prepared = None


class PeekableBatches:
    """An iterator over batches, as tuples, that can look one ahead; an error of the source is raised in its turn."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source = (batch if isinstance(batch, (tuple, list)) else (batch,) for batch in batches)
        self._taken: list[tuple[Any, Exception | None]] = []

    def peek(self) -> Any:
        """Return the next batch; None if there is none."""
        if not self._taken:
            try:
                self._taken.append((next(self._source), None))
            except Exception as error:  # raised by __next__
                self._taken.append((None, error))
        return self._taken[0][0]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.peek()
        item, error = self._taken.pop()
        if error is not None:
            raise error
        return item
