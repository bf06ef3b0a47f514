"""Commands that get a limit of time: one that hangs says where, and ends."""
from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence

PACKAGES = str(Path(__file__).resolve().parents[2])  # the folder that theano_mgpu is in
MODULES = 'Extension modules:'  # a line of faulthandler with hundreds of names
MISSING = 127  # the exit code of a command that cannot be run, as of a shell
PATIENCE = 3  # seconds for the stacks, and for the end


class Ended(NamedTuple):
    """The exit code of a command, None if it was ended at its limit; its output until then, and its stacks then."""

    code: int | None
    text: str
    stacks: str = ''


def run(command: Sequence[str], seconds: float, variables: Mapping[str, str] = {},
        show: Callable[[str], Any] = str) -> Ended:
    """Run a command for at most some seconds, with further variables of the environment, and `show` each line.

    At its limit, its Python processes print the stacks of all threads; then all of its processes are killed. One that
    the kernel does not let end, since a driver holds it, is left.
    """
    lines: list[str] = []
    said = 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no files of gigabytes
    try:
        process = subprocess.Popen(command, env={**environment(), 'PYTHONFAULTHANDLER': '1', **variables},
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors='replace', start_new_session=True)
    except OSError as error:
        return Ended(MISSING, '%s cannot be run: %s' % (command[0], error.strerror))

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            show(line)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code, said = None, len(lines)
        _send(process.pid, signal.SIGABRT)
        reader.join(PATIENCE)
    finally:
        _send(process.pid, signal.SIGKILL)  # processes that it has left behind, too
        reader.join(PATIENCE)
    if code is not None:
        return Ended(code, ''.join(lines))
    return Ended(None, ''.join(lines[:said]), ''.join(line for line in lines[said:] if not line.startswith(MODULES)))


def environment() -> dict[str, str]:
    """Return the variables of this process, with which others import the same package, and print at once."""
    path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get('PYTHONPATH')]))
    return {**os.environ, 'PYTHONPATH': path, 'PYTHONUNBUFFERED': '1'}


def _send(group, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
