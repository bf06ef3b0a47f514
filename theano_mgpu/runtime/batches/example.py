"""The arguments of a process whose data has ended: one sample, which does not count."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ...comm.collectives import broadcast_object
from ...comm.communicator import Communicator
from .arguments import Arguments


class Example:
    """The arguments of one sample that some rank has met; each rank is given samples of its own."""

    def __init__(self, arguments: Arguments, ranks: Communicator) -> None:
        self._arguments, self._ranks = arguments, ranks
        self._values: Any = None

    def replacing(self, values: Sequence[Any] | None, lengths: Sequence[int]) -> Sequence[Any]:
        """Return the arguments of a call, or the example where they are None; all ranks have to make the call."""
        if min(lengths) == 0 and (self._values is None or not all(self._arguments.split)):
            # A rank whose first step has no samples has no example. Inputs without samples may change with each call.
            sample = None if values is None else self._arguments.first_sample(values)
            self._values = broadcast_object(self._ranks, sample, int(np.argmax(lengths)))
        elif self._values is None and values is not None:
            self._values = self._arguments.first_sample(values)
        return self._values if values is None else values
