"""In which order the pieces of a stage are computed for the micro-batches of a batch."""
from typing import List, Sequence, Tuple


def schedule(levels: Sequence[int], n_rounds: int) -> List[List[Tuple[int, int]]]:
    """The clock cycles of a pipeline.

    Parameters
    ----------
    levels : list of int
        The level of each piece, see `pieces.Piece`.
    n_rounds : int
        Micro-batches.

    Returns
    -------
    list of list of (int, int)
        For each cycle, the pieces that are started, and the micro-batch of each: in every cycle, each level works on
        the micro-batch that the level before it has worked on in the last one.

    Notes
    -----
    The cycles are those of torchgpipe's ``clock_cycles`` (Kim et al., 2020), with the backward pass among the levels:
    once the pipeline is full, each device computes one forward and one backward piece a cycle, as in PipeDream-flush
    (Narayanan et al., 2021). The bubble is that of GPipe (Huang et al., 2019), ``(n - 1) / (m + n - 1)`` of the time
    for n devices and m micro-batches, but no device keeps the activations of more than 2 n - 1 micro-batches.

    Examples
    --------
    >>> schedule([0, 1, 2], 2)
    [[(0, 0)], [(0, 1), (1, 0)], [(1, 1), (2, 0)], [(2, 1)]]
    """
    return [[(i, clock - level) for i, level in enumerate(levels) if 0 <= clock - level < n_rounds]
            for clock in range(n_rounds + max(levels))]
