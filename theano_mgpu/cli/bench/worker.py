"""A process that takes commands on its stdin and prints answers: one side of a measurement."""
import contextlib
import os
import signal
import subprocess
import tempfile
import threading

from ...errors import MgpuError

TAIL = 3000  # characters of a failed worker's stderr that are shown


class WorkerError(MgpuError):
    """A worker ended, or did not answer in time."""


class Worker:
    """A process, and those that it starts; a context manager that ends them.

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

    def __init__(self, label, command, environment, patience=None):
        self._label, self._patience = label, patience
        self._stderr = tempfile.TemporaryFile('w+', errors='replace')
        # A session of its own: Ctrl-C reaches this process only, which ends the worker in order.
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._stderr, universal_newlines=True, start_new_session=True)
        self.pid = self._process.pid

    def send(self, line):
        """Write a line to its stdin."""
        with contextlib.suppress(BrokenPipeError):  # `answer` then reports why it has ended
            self._process.stdin.write(line + '\n')
            self._process.stdin.flush()

    def answer(self, is_answer):
        """Return the next line that it prints for which ``is_answer(line)`` is true: libraries print others, too.

        Raises
        ------
        WorkerError
            If the process ends, or `patience` is over, before such a line.
        """
        late = threading.Event()
        timer = threading.Timer(self._patience or 0, lambda: (late.set(), os.killpg(self.pid, signal.SIGTERM)))
        if self._patience:
            timer.start()
        try:
            for line in iter(self._process.stdout.readline, ''):
                if is_answer(line.strip()):
                    return line.strip()
        finally:
            timer.cancel()
        self.kill()
        self._stderr.seek(0)
        raise WorkerError('%s %s. The end of its stderr:\n%s' % (
            self._label, 'did not answer within %g s' % self._patience if late.is_set() else
            'ended without an answer, with exit code %s' % self._process.returncode,
            self._stderr.read()[-TAIL:].strip() or '(nothing)'))

    def kill(self):
        """End it and the processes that it has started; mpirun ends its ranks when it is terminated."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its commands
        if kind is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()
        self._process.stdout.close()
        self._stderr.close()
