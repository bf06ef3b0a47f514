"""Processes that take commands on stdin and print answers: the sides of a measurement, such as ranks."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any, Callable, Sequence

from theano_mgpu.errors import MgpuError

TAIL = 3000  # characters of a failed worker's stderr that are shown


class WorkerError(MgpuError):
    """A worker ended, or did not answer in time."""


class Worker:
    """A process, and its child processes; a context manager that ends them.

    Parameters
    ----------
    label : str
        Its name in error messages.
    command : list of str
    environment : dict of str to str
    patience : float, optional
        Seconds that an answer may take; any number by default.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, label: str, command: Sequence[str], environment: dict[str, str],
                 patience: float | None = None) -> None:
        self._label, self._patience = label, patience or threading.TIMEOUT_MAX
        self._stderr = tempfile.TemporaryFile('w+', errors='replace')
        # In its own session: Ctrl-C reaches this process only, which then ends the worker in order.
        self._process: Any = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                              stderr=self._stderr, universal_newlines=True, start_new_session=True)
        self.pid = self._process.pid

    def send(self, line: str) -> None:
        """Write a line to its stdin."""
        with contextlib.suppress(BrokenPipeError):  # `answer` then reports why the worker has ended
            self._process.stdin.write(line + '\n')
            self._process.stdin.flush()

    def answer(self, is_answer: Callable[[str], bool]) -> str:
        """Return the next line that it prints for which ``is_answer(line)`` is true: libraries print others, too.

        Raises
        ------
        WorkerError
            If the process ends, or `patience` is over, before such a line.
        """
        start = time.monotonic()
        timer = threading.Timer(self._patience, self.kill)
        timer.start()
        try:
            for line in map(str.strip, self._process.stdout):
                if is_answer(line):
                    return line
        finally:
            timer.cancel()
        late = time.monotonic() - start >= self._patience
        self.kill()
        self._stderr.seek(0)
        raise WorkerError('%s %s. The end of its stderr:\n%s' % (
            self._label, 'did not answer within %g s' % self._patience if late else
            'ended without an answer, with exit code %s' % self._process.returncode,
            self._stderr.read()[-TAIL:].strip() or '(nothing)'))

    def kill(self) -> None:
        """End it and the processes that it has started; mpirun ends its ranks when it is terminated."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its commands
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()
        self._process.stdout.close()
        self._stderr.close()
