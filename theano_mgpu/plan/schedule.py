"""The order in which the parts of a stage are computed for the micro-batches of a batch."""
from __future__ import annotations

from typing import Any, Sequence


def schedule(parts: Sequence[Any], n_rounds: int) -> list[list[tuple[Any, int]]]:
    """Return the clock cycles of a pipeline of parts with a `level` each, and `n_rounds` micro-batches.

    A cycle has the parts that are started, each with the number of its micro-batch: the one that the level before has
    worked on in the last cycle. The cycles are as in torchgpipe's ``clock_cycles`` (Kim et al., 2020), with the
    backward pass among the levels: once the pipeline is full, each device computes one forward and one backward piece a
    cycle, as in PipeDream-flush (Narayanan et al., 2021). The bubble is as in GPipe (Huang et al., 2019), ``(n - 1) /
    (m + n - 1)`` of the time for n devices and m micro-batches, but no device keeps the activations of more than 2 n -
    1 micro-batches.

    Examples
    --------
    >>> from collections import namedtuple
    >>> Piece = namedtuple('Piece', 'name level')
    >>> for cycle in schedule([Piece('forward', 0), Piece('middle', 1), Piece('backward', 2)], 2):
    ...     print(*['%s %d' % (piece.name, number) for piece, number in cycle], sep=', ')
    forward 0
    forward 1, middle 0
    middle 1, backward 0
    backward 1
    """
    return [[(part, clock - part.level) for part in parts if 0 <= clock - part.level < n_rounds]
            for clock in range(n_rounds + max(part.level for part in parts))]
