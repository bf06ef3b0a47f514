"""States that are another one for a while: attributes of objects, and Python's collector of cyclic garbage."""
from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any, Dict, Iterator, List

_before: Dict[Any, List[Any]] = {}  # the values of an attribute before each block that runs


@contextlib.contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set an attribute in the ``with`` block; yield its value before, which is None where there was none.

    Where threads are in blocks for one attribute, it has its first value again when the last thread leaves.

    Examples
    --------
    >>> import threading
    >>> state = threading.local()
    >>> with temporarily(state, 'depth', 1):
    ...     state.depth
    1
    """
    before = getattr(owner, name, None)
    key = id(owner), name, isinstance(owner, threading.local) and threading.get_ident()
    _before.setdefault(key, []).append(before)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, _before[key].pop())


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
