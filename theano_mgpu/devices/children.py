"""Child processes of the package's own, which a script that waits for any of its children does not meet."""
from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from ..compat.wrapping import wrap

_own: weakref.WeakSet[Any] = weakref.WeakSet()  # objects with a method `kill`, which waits, too


def add(child: Any) -> None:
    """Note a child process, or an object that starts one now and then: its method `kill` ends the process, if any."""
    _own.add(child)


def end_all() -> None:
    """End all child processes of the package's own. Those that are needed are started again."""
    for child in list(_own):
        child.kill()


def wait_for_others() -> None:
    """Have ``os.wait()`` and the like, when they wait for any child, find children of the script alone."""
    def wait(is_any, own, *arguments):
        if is_any(*arguments):
            end_all()
        return own(*arguments)

    for name, is_any in [('wait', lambda: True), ('wait3', lambda options: True),
                         ('wait4', lambda process, options: process < 1),
                         ('waitpid', lambda process, options: process < 1),
                         ('waitid', lambda kind, *_: kind in (os.P_ALL, os.P_PGID))]:
        if hasattr(os, name):  # waitid is not on macOS
            wrap(os, name)(functools.partial(wait, is_any))


os.register_at_fork(after_in_child=_own.clear)  # they are the parent's
