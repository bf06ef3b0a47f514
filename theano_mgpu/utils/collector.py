"""Python's collector of cyclic garbage."""
import contextlib
import gc


@contextlib.contextmanager
def collector_paused():
    """A block that makes many objects that stay: the collector would visit them over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
