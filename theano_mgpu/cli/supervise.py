"""Run mpirun or srun: restart it after errors, and end it with this process."""
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from ..jobs import rank_process
from .launcher_output import Filter, forward
from .output import note

FOLDERS = ['OMPI_MCA_orte_%stmpdir_base' % where for where in ('', 'local_', 'remote_')]
GRACE = 3  # seconds in which mpirun may end by itself after a signal that a terminal may have sent to it, too


def run_with_restarts(command, environment, restarts):
    """Run a command until it succeeds, with at most `restarts` more attempts; return the last exit code.

    It is not restarted after a signal to this process, nor if it has failed twice without a step in between.
    """
    with Signals() as signals:
        for restart in range(restarts + 1):
            began = time.monotonic()
            code, stepped = run_once(command, environment, signals)
            if code == 0 or signals.received:
                return code
            left, hopeless = restarts - restart, restart and not stepped
            note('the job ended with exit code %d after %.0f s%s'
                 % (code, time.monotonic() - began, '' if not left else ', again before the first step was done: it is '
                    'not started once more' if hopeless else ': restart %d of %d' % (restart + 1, restarts)))
            if hopeless:
                return code
    return code


def run_once(command, environment, signals):
    """Run a command; return its exit code, and whether a step was done."""
    prepare = functools.partial(rank_process.end_with, os.getpid(), signal.SIGTERM)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=prepare)
    messages = Filter()
    reader = threading.Thread(target=forward, args=(process.stderr, messages), daemon=True)
    reader.start()
    with signals.sent_on_to(process):
        status = process.wait()
    reader.join(5)
    if status and not messages.any_passed:
        sys.stderr.write(messages.internal.decode(errors='replace'))
    return 128 + signals.received if signals.received else exit_code(status), messages.stepped


@contextlib.contextmanager
def own_folder(environment):
    """An environment in which mpirun has a folder of its own for temporary files, unless it names one already.

    By default all jobs of a user share one. Open MPI removes it with the last job in it, even if the next one is about
    to use it, which then ends with an error (open-mpi/ompi#8510).
    """
    if any(name in environment for name in FOLDERS):
        yield environment
        return
    folder = tempfile.mkdtemp(prefix='mgpu.')
    try:
        yield dict(environment, **{FOLDERS[0]: folder})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Signals:
    """Redirects the signals that would end this process to mpirun, which then ends the ranks.

    Attributes
    ----------
    received : int
        Number of the first signal; 0 if there was none.
    """

    ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self):
        self.received = 0
        self._process = None

    def __enter__(self):
        # Ignored signals stay ignored: SIGHUP under nohup, SIGINT of a background process.
        self._before = {number: signal.signal(number, self._receive) for number in self.ENDING
                        if signal.getsignal(number) != signal.SIG_IGN}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def sent_on_to(self, process):
        """A context manager: signals end this process while it is open."""
        self._process = process
        if self.received:
            process.terminate()
        try:
            yield
        finally:
            self._process = None

    def _receive(self, number, frame):
        again, self.received = self.received, self.received or number
        process = self._process
        if process is None:
            return
        if again:
            process.kill()  # its ranks end with it, see rank_process.install
        elif number == signal.SIGTERM:
            process.terminate()
        else:  # a terminal sends these to mpirun, too; at a second signal mpirun would abandon its ranks
            timer = threading.Timer(GRACE, process.terminate)
            timer.daemon = True
            timer.start()


def exit_code(status):
    """The exit code that a shell would show.

    Examples
    --------
    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return status if status >= 0 else 128 - status
