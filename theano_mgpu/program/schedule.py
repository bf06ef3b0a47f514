"""In which order the pieces of a stage are computed for the micro-batches of a batch."""
from collections import namedtuple
from typing import Any, List, Sequence, Tuple

Launched = namedtuple('Launched', 'part number shards results')
Launched.__doc__ = """A part that was started: the `number` of the round, its `shards`, and the results of each."""


def schedule(pieces: Sequence[Any], n_rounds: int) -> List[List[Tuple[Any, int]]]:
    """The clock cycles of a pipeline.

    Parameters
    ----------
    pieces : list
        Each with the attribute `level`, see `pieces.Piece`.
    n_rounds : int
        Micro-batches.

    Returns
    -------
    list of list of (piece, int)
        For each cycle, the pieces that are started, and the number of the micro-batch of each: that which the level
        before has worked on in the last cycle.

    Notes
    -----
    The cycles are those of torchgpipe's ``clock_cycles`` (Kim et al., 2020), with the backward pass among the levels:
    once the pipeline is full, each device computes one forward and one backward piece a cycle, as in PipeDream-flush
    (Narayanan et al., 2021). The bubble is that of GPipe (Huang et al., 2019), ``(n - 1) / (m + n - 1)`` of the time
    for n devices and m micro-batches, but no device keeps the activations of more than 2 n - 1 micro-batches.

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
    return [[(piece, clock - piece.level) for piece in pieces if 0 <= clock - piece.level < n_rounds]
            for clock in range(n_rounds + max(piece.level for piece in pieces))]
