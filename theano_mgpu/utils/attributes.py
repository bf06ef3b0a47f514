"""States that are another one for a while: attributes of objects, and Python's collector of cyclic garbage."""
from __future__ import annotations

import contextlib
import gc
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


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector in a ``with`` block that makes many objects that stay: it would visit them over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
