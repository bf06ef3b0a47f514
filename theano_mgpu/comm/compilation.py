"""The order in which the ranks compile a function."""
from __future__ import annotations

import contextlib
from typing import Iterator

from ..utils import mpi_environment
from .activities import COMPILE
from .communicator import Communicator
from .rank_errors import raise_common


@contextlib.contextmanager
def first_compiler(ranks: Communicator) -> Iterator[None]:
    """Open a ``with`` block for one rank a host first; the others then find its compiled code.

    Theano locks its folder of compiled code, and a rank that finds its code there need not wait. An error in the block
    is one of all ranks.
    """
    is_first = mpi_environment.local_rank() == 0
    if not is_first:
        ranks.handshake((COMPILE,))
    try:
        try:
            yield
        finally:
            if is_first:
                ranks.handshake((COMPILE,))
        ranks.handshake((COMPILE, 1))
    except BaseException as error:
        raise_common(ranks, error)
