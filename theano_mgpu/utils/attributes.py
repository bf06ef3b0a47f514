"""Attributes of objects that have another value for a while."""
from __future__ import annotations

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set an attribute in the ``with`` block; yield its value before, which is None where there was none.

    Examples
    --------
    >>> import threading
    >>> state = threading.local()
    >>> with temporarily(state, 'depth', 1):
    ...     state.depth
    1
    """
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)
