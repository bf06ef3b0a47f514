"""Files that are there whole, or not at all."""
import contextlib
import os


@contextlib.contextmanager
def whole_file(path):
    """A name to write a file under; it becomes `path` at the end of the block, unless that raises.

    Who kills the process at any moment finds the former file, or the new one.
    """
    unfinished = '%s.%d.unfinished' % (path, os.getpid())
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)
