"""Runs of mpirun or srun, which start again after errors, and end with this process."""
from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Iterable, Iterator

from ..utils import mpi_environment, rank_process
from .job_command import Start
from .job_folders import job_folders
from .launcher_output import JobOutput
from .output import note

GRACE = 3  # seconds in which mpirun may end by itself after a signal that a terminal may have sent to it, too


def run_with_restarts(start: Start, environment: dict[str, str], program: list[str], restarts: int) -> int:
    """Run a job until it succeeds, with at most `restarts` more attempts; return the last exit code.

    It is not restarted after a signal to this process, nor if it has failed twice without a step in between.

    Parameters
    ----------
    start : Start
    environment : dict of str to str
    program : list of str
        Python's arguments in each rank.
    restarts : int
    """
    environment = {**environment, mpi_environment.SEED: str(int.from_bytes(os.urandom(4), 'big'))}
    with Signals() as signals:
        for restart in range(restarts + 1):
            began = time.monotonic()
            code, stepped = run_once(start, environment, program, signals)
            if code == 0 or signals.received:
                return code
            is_hopeless, next_step = restart and not stepped, ''
            if restart < restarts:
                next_step = (', again before the first step was done: it is not started once more' if is_hopeless
                             else ': restart %d of %d' % (restart + 1, restarts))
            note('the job ended with exit code %d after %.0f s%s' % (code, time.monotonic() - began, next_step))
            if is_hopeless:
                break
    return code


def run_once(start: Start, environment: dict[str, str], program: list[str], signals: Signals) -> tuple[int, bool]:
    """Run a job; return its exit code, and whether a step was done.

    Raises
    ------
    OutputError
        If its output cannot be written, as on a full disk. Where only the reader of a pipe has ended, as `head` does,
        the job ends as by SIGPIPE.
    """
    # On other hosts the folders would have to be there, too.
    folders = job_folders(environment) if start.on_this_host else contextlib.nullcontext((dict(environment), []))
    with folders as (environment, locks):
        # A number that no script prints by chance: the report of rank 0 is taken out of the output.
        environment[mpi_environment.QUIET] = secrets.token_hex(8)
        output = JobOutput(mpi_environment.report_of_step(environment), start.by_mpirun,
                           lambda: signals.end(signal.SIGPIPE))
        process = subprocess.Popen(
            start.command(environment, program), env=dict(environment, **output.environment), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, pass_fds=locks + output.descriptors,
            preexec_fn=functools.partial(rank_process.end_with, os.getpid(), signal.SIGTERM))
        with process:
            with signals.sent_on_to(process):
                output.copy(process)
                status = process.wait()
            output.finish(status, GRACE if signals.received else None)
    ended_by = signals.received or -status
    return 128 + ended_by if ended_by > 0 else status, output.stepped


class Signals:
    """A redirection to mpirun of the signals that would end this process, and that the ranks are to get.

    Attributes
    ----------
    received : int
        Number of the first signal; 0 if there was none.
    """

    FROM_A_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ENDING = FROM_A_TERMINAL + (signal.SIGTERM, signal.SIGABRT)
    PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # mpirun and srun send these to the ranks

    def __init__(self) -> None:
        self.received = 0
        self._process: subprocess.Popen | None = None
        self._early: list[int] = []  # to be passed on once there is a process

    def __enter__(self) -> Signals:
        # Ignored signals stay ignored: SIGHUP under nohup, SIGINT of a background process.
        handlers = {**dict.fromkeys(self.ENDING, self._receive), **dict.fromkeys(self.PASSED_ON, self._pass_on)}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()
                        if signal.getsignal(number) != signal.SIG_IGN}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def sent_on_to(self, process: subprocess.Popen) -> Iterator[None]:
        """Send signals on to a process during the ``with`` block."""
        self._process = process
        if self.received:
            process.terminate()
        while self._early:
            self._pass_on(self._early.pop(0), None)
        try:
            yield
        finally:
            self._process = None

    def end(self, number: int) -> None:
        """End the job as if this process had received a signal."""
        if not self.received:
            self._receive(number, None)

    def _pass_on(self, number, frame):
        process = self._process
        if process is None:
            self._early.append(number)
        else:
            # Open MPI 4.1's mpirun does not pass on SIGUSR1, against its manual.
            for rank in ranks_of(process.pid) or [process.pid]:
                os.kill(rank, number)

    def _receive(self, number, frame):
        again, self.received = self.received, self.received or number
        process = self._process
        if process is None:
            return
        if again:
            process.kill()  # its ranks end with it, see rank_process.install
        elif number not in self.FROM_A_TERMINAL:
            process.terminate()
        else:  # a terminal sends these to mpirun, too; at a second signal mpirun would abandon its ranks
            timer = threading.Timer(GRACE, process.terminate)
            timer.daemon = True
            timer.start()


def ranks_of(mpirun: int) -> list[int]:
    """Return the ids of the processes on this host that are ranks of an mpirun; none on other systems than Linux."""
    lists = _texts(Path('/proc').glob('%d/task/*/children' % mpirun))
    children = [int(child) for children in lists for child in children.split()]
    return [child for child in children
            if any(b'\0OMPI_COMM_WORLD_RANK=' in text for text in _texts([Path('/proc/%d/environ' % child)]))]


def _texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the contents of files under /proc, but for processes that have ended."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.read_bytes()
