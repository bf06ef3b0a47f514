"""Runs of mpirun or srun, which start again after errors, and end with this process."""
from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping

from ..utils import mpi_environment, rank_process, spare
from ..utils.mpi_environment import CHECKPOINT, END, READY, REPORTS, STEP, TOGETHER
from .job_command import Start
from .job_folders import job_folders, locked_folder
from .launcher_output import JobOutput
from .output import note

GRACE = 3  # seconds in which mpirun may end by itself after a signal that a terminal may have sent to it, too
LOOK = 0.02  # seconds from one look at the processes of a job to the next
SOONEST, LATEST = 30, 3600  # seconds until spare processes that have failed beside a job of fewer are tried again
GROW = getattr(signal, 'SIGRTMIN', None)  # this signal asks a job of fewer processes to grow; Linux only
ENDED, LOST, GROWS = 'ended', 'lost', 'grows'  # why the watch over a job ends


def run_with_restarts(start: Start, environment: dict[str, str], program: list[str], restarts: int, spares: int = 0,
                      fewer: Mapping[int, tuple[Start, dict[str, str]]] = {}) -> int:
    """Run a job until it succeeds, with at most `restarts` more attempts; return the last exit code.

    It is not restarted after a signal to this process, nor if it has failed twice in a row before its first step.

    Parameters
    ----------
    start : Start
    environment : dict of str to str
    program : list of str
        Python's arguments in each rank.
    restarts : int
    spares : int
        Number of jobs that are kept ready to continue from the last checkpoint.
    fewer : dict of int to (Start, dict of str to str)
        Starts and environments with fewer processes, by their number, the highest one first. They are tried where a
        job has failed before its first step. A restart after a step has all processes again; so has the job once it is
        asked to grow by the signal `GROW`, or the spare processes, which are as many as all, are ready.
    """
    seed = {mpi_environment.SEED: str(int.from_bytes(os.urandom(4), 'big'))}
    with Signals(may_grow=bool(fewer)) as signals:
        def make(start=start, environment=environment, is_spare=False):
            return Job(start, {**environment, **seed}, program, lambda: signals.end(signal.SIGPIPE), is_spare)
        with contextlib.closing(Reserve(make, spares)) as reserve:
            job, restart, untried, was_stuck, is_small = make(), 0, list(fewer), bool(fewer), False
            while True:
                may_restart = restart < restarts
                with signals.sent_on_to(job.process):
                    reason = job.watch(functools.partial(reserve.look, is_small=is_small, is_last=not may_restart),
                                       may_restart, signals, functools.partial(grows, job, reserve, signals, is_small))
                if reason != ENDED:
                    job.output.name_job('the job that was ended')
                    threading.Thread(target=job.close).start()  # mpirun needs two seconds, and then names the signal
                if reason == GROWS:
                    taken = reserve.take()
                    note('the job of fewer processes was ended after %.0f s: it continues with all of them%s'
                         % (job.seconds, ', the spare ones' if taken else ''))
                    job, untried, was_stuck, is_small = taken or make(), list(fewer), True, False
                    continue
                event = '%s ended early, and the others were ended, after %.0f s' % (job.lost, job.seconds)
                if reason == ENDED:
                    code = job.close(signals)
                    if code == 0 or signals.received:
                        return code
                    event = 'the job ended with exit code %d after %.0f s' % (code, job.seconds)
                stepped = job.output.has(STEP)
                if not stepped and untried:
                    ranks = untried.pop(0)
                    note('%s, before the first step was done: it is tried with -n %d' % (event, ranks))
                    job, is_small = make(*fewer[ranks]), True
                    continue
                if restart == restarts or not stepped and was_stuck:
                    if restart < restarts:
                        event += ', again before the first step was done: it is not started once more'
                    note(event)
                    return code
                restart, untried, was_stuck, is_small = restart + 1, list(fewer), not stepped or bool(fewer), False
                taken = reserve.take()
                note('%s: restart %d of %d%s' % (event, restart, restarts, ', by the spare processes' if taken else ''))
                if spares and stepped and not job.output.has(CHECKPOINT):
                    note('it has no spare processes, since the script keeps no checkpoints: see step.checkpoint and '
                         'theano_mgpu.keras.Checkpoint')
                job = taken or make()


def grows(job: Job, reserve: Reserve, signals: Signals, is_small: bool) -> bool:
    """Return whether a job is to continue with more processes: it was asked to, or all are ready as spare ones."""
    asked, signals.asked_to_grow = signals.asked_to_grow, False
    if asked and not (is_small and job.output.has(STEP, CHECKPOINT)):
        note('the job does not grow: %s' % ('it has no step, or no checkpoint, to continue from' if is_small else
                                            'it has all of its processes'))
        return False
    return is_small and (asked or reserve.is_ready)


class Job:
    """A run of mpirun or srun, with the ranks, their output and their folders.

    Parameters
    ----------
    start : Start
    environment : dict of str to str
    program : list of str
    failed : callable
        Called if the output cannot be written any more.
    is_spare : bool
        Whether the ranks wait, at their first checkpoint, until `release` is called.

    Attributes
    ----------
    process : subprocess.Popen
    output : JobOutput
    is_ready : bool
        Whether the user was told that the spare ranks wait.
    lost : str
        The ranks that ended early.
    """

    def __init__(self, start: Start, environment: dict[str, str], program: list[str], failed: Callable[[], object],
                 is_spare: bool = False) -> None:
        self._is_watched = start.by_mpirun and start.on_this_host
        self._began, self.is_ready, self.lost = time.monotonic(), False, ''
        self._gate: Any = None
        with contextlib.ExitStack() as folders:
            environment = dict(environment)
            locks: list[int] = []
            if start.on_this_host:  # on other hosts the folders would have to be there, too
                environment, locks = folders.enter_context(job_folders(environment))
            if is_spare:
                folder, _ = folders.enter_context(locked_folder(tempfile.gettempdir()))
                environment[mpi_environment.SPARE] = os.path.join(folder, 'spare')
                self._gate = folders.enter_context(open(environment[mpi_environment.SPARE], 'wb', buffering=0))
                fcntl.flock(self._gate, fcntl.LOCK_EX)
            # A number that no script prints by chance: the reports of rank 0 are taken out of the output.
            environment[mpi_environment.QUIET] = secrets.token_hex(8)
            self.output = JobOutput({what: mpi_environment.report_of(what, environment) for what in REPORTS},
                                    start.by_mpirun, is_spare, failed)
            self.process = subprocess.Popen(
                start.command(environment, program), env=dict(environment, **self.output.environment),
                stdin=subprocess.DEVNULL if is_spare else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=locks + self.output.descriptors,
                preexec_fn=functools.partial(rank_process.end_with, os.getpid(), signal.SIGTERM))
            self._folders = folders.pop_all()
        self.output.copy(self.process)

    @property
    def seconds(self) -> float:
        """Return the seconds since it was started, or released."""
        return time.monotonic() - self._began

    def watch(self, look: Callable[[Job], object], may_restart: bool, signals: Signals,
              grows: Callable[[], bool]) -> str:
        """Watch the ranks until the job ends, or has to be replaced.

        mpirun gives the others two seconds to end by SIGTERM. But they cannot go on without the lost one, unless each
        works by itself.

        Parameters
        ----------
        look : callable
            Called with this Job now and then.
        may_restart : bool
        signals : Signals
            A signal ends the watch, since it may end the ranks.
        grows : callable
            Returns whether the job is to be replaced by one of more processes.

        Returns
        -------
        str
            `LOST` once a rank has ended early, and `GROWS`: the ranks were killed then. Else `ENDED`.
        """
        ranks: dict[int, int] = {}  # their numbers, by process
        while self.process.poll() is None and not signals.received:
            time.sleep(LOOK)
            look(self)
            if grows():
                self._kill_all()
                return GROWS
            if may_restart and self._is_watched and self.output.has(TOGETHER, STEP):
                ranks = ranks or ranks_of(self.process.pid)
                ended = list(filter(has_ended, ranks))
                if ended:
                    time.sleep(LOOK)  # a report of rank 0 from before may be on its way, or a signal
                    if not self.output.has(END) and not signals.received:
                        self.lost = ' and '.join('rank %d (process %d)' % (ranks[each], each) for each in ended)
                        end_all(ranks)
                        return LOST
        self.process.wait()
        return ENDED

    def release(self) -> None:
        """Let the ranks of a spare job continue, in place of those that have ended."""
        self._began = time.monotonic()
        self._gate.write(spare.NEEDED)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        self.output.release()

    def kill(self) -> None:
        """End it at once."""
        self._kill_all()
        self.close()

    def _kill_all(self):
        """End mpirun and the ranks."""
        ranks = ranks_of(self.process.pid)
        self.process.kill()
        end_all(ranks)

    def close(self, signals: Signals | None = None) -> int:
        """Wait for its end, and remove its folders; return its exit code.

        Parameters
        ----------
        signals : Signals, optional
            One of them may have ended the job.

        Raises
        ------
        OutputError
            If its output cannot be written, as on a full disk. Where only the reader of a pipe has ended, as `head`
            does, the job ends as by SIGPIPE.
        """
        with self._folders, self.process:
            status = self.process.wait()
            received = signals.received if signals else 0
            self.output.finish(status, GRACE if received else None)
        ended_by = received or -status
        return 128 + ended_by if ended_by > 0 else status


class Reserve:
    """The spare jobs: each has run the script up to its first checkpoint, or is about to.

    Parameters
    ----------
    make : callable
        ``make(is_spare=True)`` returns a Job.
    size : int
        Number of jobs that are kept ready.
    """

    def __init__(self, make: Callable[..., Job], size: int) -> None:
        self._make, self._size = make, size
        self._jobs: list[Job] = []  # the oldest first
        self._not_before, self._pause = 0.0, SOONEST

    @property
    def is_ready(self) -> bool:
        """Return whether a spare job could continue at once."""
        return any(each.is_ready for each in self._jobs)

    def look(self, job: Job, is_small: bool, is_last: bool) -> None:
        """Start a spare job if there are too few, once a running one keeps checkpoints; one after the other.

        Beside a job of fewer processes, whose lost device all of them may need, a spare one is tried again and again.
        A job of all processes that is not restarted any more, `is_last`, needs none.
        """
        if is_last and not is_small:
            return
        for each in self._jobs[:]:
            if each.process.poll() is not None:
                (self._postpone if is_small else self._drop)(each)
            elif not each.is_ready and each.output.has(READY):
                each.is_ready = True
                note('the spare processes are ready, after %.0f s' % each.seconds)
        if len(self._jobs) < self._size and all(each.is_ready for each in self._jobs) \
                and job.output.has(STEP, CHECKPOINT) and time.monotonic() >= self._not_before:
            try:
                self._jobs.append(self._make(is_spare=True))
            except OSError as error:  # such as for lack of memory: the job itself goes on
                self._size = 0
                note('spare processes cannot be started: %s; a restart begins anew' % error)

    def take(self) -> Job | None:
        """Return a spare job, which continues from now on, or as soon as it is ready; None if there is none."""
        if not self._jobs:
            return None
        job = self._jobs.pop(0)
        job.release()
        return job

    def close(self) -> None:
        """End the spare jobs."""
        for job in self._jobs:
            job.kill()

    def _postpone(self, job):
        """Forget a spare job that has failed, and wait for longer than before until the next one."""
        self._jobs.remove(job)
        note('spare processes, as many as all, have ended with exit code %d: the job goes on with fewer, and the next '
             'ones are started in %d s' % (job.close(), self._pause))
        self._not_before, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LATEST)

    def _drop(self, job):
        """Show why a spare job has ended, and start no more."""
        self._size = 0
        self._jobs.remove(job)
        job.output.name_job('the spare job')
        job.output.release()
        note('the spare processes have ended with exit code %d before they were needed; there will be no others: a '
             'restart begins anew' % job.close())


class Signals:
    """A redirection to mpirun of the signals that would end this process, and that the ranks are to get.

    Parameters
    ----------
    may_grow : bool
        Whether the signal `GROW` is one for this process.

    Attributes
    ----------
    received : int
        Number of the first signal; 0 if there was none.
    asked_to_grow : bool
        Whether the signal `GROW` has come.
    """

    FROM_A_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ENDING = FROM_A_TERMINAL + (signal.SIGTERM, signal.SIGABRT)
    PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # mpirun and srun send these to the ranks

    def __init__(self, may_grow: bool) -> None:
        self.received, self.asked_to_grow = 0, False
        self._may_grow = may_grow
        self._process: subprocess.Popen | None = None
        self._early: list[int] = []  # to be passed on once there is a process

    def __enter__(self) -> Signals:
        # Ignored signals stay ignored: SIGHUP under nohup, SIGINT of a background process. Handlers of C code (None)
        # stay, too, such as PYTHONFAULTHANDLER installs one for SIGABRT: Python cannot put them back.
        handlers: dict[int, Any] = {**dict.fromkeys(self.ENDING, self._receive),
                                    **dict.fromkeys(self.PASSED_ON, self._pass_on)}
        if self._may_grow and GROW is not None:
            handlers[GROW] = self._note_growth
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()
                        if signal.getsignal(number) not in (signal.SIG_IGN, None)}
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

    def _note_growth(self, number, frame):
        self.asked_to_grow = True

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


def end_all(ranks: Collection[int]) -> None:
    """End processes by SIGKILL, and wait until none of them has a file or a device open."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    while not all(map(has_ended, ranks)):
        time.sleep(LOOK / 10)


def has_ended(process: int) -> bool:
    """Return whether a process has ended, with all of its threads, even if its parent does not know yet. Linux only.

    Files stay locked until the last thread has ended, which may be later than the first one.
    """
    try:
        state = Path('/proc/%d/stat' % process).read_bytes().rpartition(b')')[2].split()[0]
        return state in (b'Z', b'X') and len(os.listdir('/proc/%d/task' % process)) < 2
    except (FileNotFoundError, ProcessLookupError):
        return True


def ranks_of(mpirun: int) -> dict[int, int]:
    """Return the processes on this host that are ranks of an mpirun, and the number of each; none but on Linux."""
    lists = _texts(Path('/proc').glob('%d/task/*/children' % mpirun))
    children = [int(child) for children in lists for child in children.split()]
    found = {child: re.search(br'\0OMPI_COMM_WORLD_RANK=(\d+)', text)
             for child in children for text in _texts([Path('/proc/%d/environ' % child)])}
    return {child: int(rank[1]) for child, rank in found.items() if rank}


def _texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the contents of files under /proc, but for processes that have ended."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.read_bytes()
