"""Computations that a rank makes alone within a job: those that a source of batches asks for.

Rank 0 alone asks a generator for the batches of all ranks, maybe in a thread of Keras's. The functions that it calls
compute in this process, as they do without a job. All ranks take what they change, see `checks.ranks.Changes`.
"""
from __future__ import annotations

import threading
from typing import Any

from ..utils.attributes import temporarily

n_changes = 0  # of variables, by this process alone
_block = threading.local()


def computing_alone() -> Any:
    """Let this thread compute alone in a ``with`` block, or in a function that this decorates."""
    return temporarily(_block, 'is_on', True)


def is_alone() -> bool:
    """Return whether this thread computes alone."""
    return bool(getattr(_block, 'is_on', False))
