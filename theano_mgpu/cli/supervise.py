"""Runs of mpirun or srun, which start again after errors, and end with this process."""
from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, Collection, Iterable, Iterator, Mapping, NamedTuple, Tuple

from ..comm.notice import NUMBERS
from ..utils import mpi_environment, rank_process
from ..utils.mpi_environment import CHECKPOINT, END, READY, STARTED, STEP, TOGETHER
from .job_command import Start
from .job_folders import job_folders
from .launcher_output import OWN_DESCRIPTOR, JobOutput
from .output import note

PATIENCE = 120  # seconds in which ranks may end by themselves after SIGTERM, once they have written a checkpoint
GRACE = 3  # seconds in which mpirun may end by itself after a signal that a terminal may have sent to it, too
LOOK = 0.02  # seconds from one look at the processes of a job to the next
SOONEST, LATEST = 30, 3600  # seconds until spare processes that have failed beside a job of fewer are tried again
GROW = getattr(signal, 'SIGRTMIN', 0)  # this signal asks a job of fewer processes to grow; Linux only
THREADS = 16  # of the fields of /proc/PID/stat after the state, the one with the number of threads
GROWS = 'the job of fewer processes was ended'


class Next(enum.Enum):
    """The choices after a job has ended: all of its processes again, fewer of them, or none."""

    RESTART, SMALLER, END = range(3)


class History(NamedTuple):
    """The restarts and smaller numbers of processes that are allowed, and how many of each were tried.

    `stuck` counts the jobs in a row that have ended before their first step.
    """

    restarts: int
    fewer: Tuple[int, ...] = ()
    restart: int = 0
    stuck: int = 0


def decide(history: History, end: str, stepped: bool, grows: bool = False, has_spare: bool = False
           ) -> tuple[Next, str, History]:
    """Return what follows the end of a job, a note about it, and the history from then on.

    `end` tells of the end in words; further, the job has done a step, it is to grow, a spare one continues. Jobs that
    come to no step are tried with fewer processes each time, if that is allowed, else once more.
    """
    history = history._replace(stuck=0 if stepped else history.stuck + 1)
    if 0 < history.stuck <= len(history.fewer):
        return Next.SMALLER, '%s, before the first step was done: it is tried with -n %d' % (
            end, history.fewer[history.stuck - 1]), history
    if grows:
        return Next.RESTART, '%s: it continues with all of them%s' % (end, ', the spare ones' * has_spare), history
    if history.restart == history.restarts:
        return Next.END, end, history
    if history.stuck > 1:
        return Next.END, end + ', again before the first step was done: it is not started once more', history
    history = history._replace(restart=history.restart + 1)
    return Next.RESTART, '%s: restart %d of %d%s' % (end, history.restart, history.restarts,
                                                     ', by the spare processes' * has_spare), history


def run_with_restarts(start: Start, environment: dict[str, str], program: list[str], restarts: int, spares: int = 0,
                      fewer: Mapping[int, tuple[Start, dict[str, str]]] = {}) -> int:
    """Run a job until it succeeds, or is given up, see `decide`; return the last exit code.

    The program has Python's arguments in each rank. So many spare jobs are kept ready to continue from the last
    checkpoint. `fewer` has starts and environments with fewer processes, by their number, the highest one first.
    """
    seed = {mpi_environment.SEED: str(int.from_bytes(os.urandom(4), 'big'))}

    def make(start=start, environment=environment, **kind):
        return Job(start, {**environment, **seed}, program, **kind)
    with Signals(may_grow=bool(fewer)) as signals, contextlib.closing(Reserve(make, spares)) as reserve:
        job, history = make(), History(restarts, tuple(fewer))
        while True:
            killed = watch(job, reserve, signals, may_restart=history.restart < restarts)
            stepped, has_checkpoint, has_ended_itself = job.stepped, job.has(CHECKPOINT), job.has(END)
            if killed:
                job.output.messages.job = 'the job that was ended'
                threading.Thread(target=job.close).start()  # mpirun needs two seconds, and then names the signal
            else:
                code = job.close(signals.received)
                # A signal to end may come from the scheduler to the ranks alone, see comm/notice.py.
                is_ended = code - 128 in NUMBERS and (has_ended_itself or code - 128 in signals.passed)
                if code == 0 or signals.received or job.output.failures or is_ended:
                    return code
            text = '%s after %.0f s' % (killed or 'the job ended with exit code %d' % code, job.seconds)
            following, text, history = decide(history, text, stepped, killed == GROWS, bool(reserve.jobs))
            note(text)
            if following == Next.END:
                return code
            if following == Next.SMALLER:
                job = make(*fewer[history.fewer[history.stuck - 1]], is_small=True)
                continue
            if spares and stepped and not has_checkpoint:
                note('it has no spare processes, since the script keeps no checkpoints: see step.checkpoint and '
                     'theano_mgpu.keras.Checkpoint')
            job = reserve.take() if reserve.jobs else make()


def watch(job: Job, reserve: Reserve, signals: Signals, may_restart: bool) -> str:
    """Watch the ranks until the job ends, or has to be replaced; return why its ranks were killed, '' if it has ended.

    They are killed once one has ended early: mpirun would give the others two seconds to end by SIGTERM, and they
    cannot go on without the lost one, unless each works by itself. So they are when the job can grow (`GROWS`).
    """
    while job.process.poll() is None:
        time.sleep(LOOK)
        if job.output.failures and not signals.received:
            signals.receive(signal.SIGPIPE)
        is_asked = signals.pass_on(job.process)
        if signals.received:  # it may end the ranks
            continue
        if can_grow(job, is_asked, reserve.look(job, may_restart)):
            job.kill()
            return GROWS
        lost = job.lost() if may_restart else ''
        if lost:
            time.sleep(LOOK)  # rank 0 may be about to report the end, or a signal may be on its way
            if not job.has(END) and not signals.received:
                end_all(job.ranks)
                return lost + ' ended early, and the others were ended,'
    return ''


def can_grow(job: Job, is_asked: bool, is_ready: bool) -> bool:
    """Return whether a job is to continue with more processes: it is asked to, or all are ready as spare ones."""
    if is_asked and not (job.is_small and job.has(STEP, CHECKPOINT)):
        note('the job does not grow: %s' % ('it has no step, or no checkpoint, to continue from' if job.is_small else
                                            'it has all of its processes'))
        return False
    return job.is_small and (is_asked or is_ready)


class Job:
    """A run of mpirun or srun, with the ranks, their output and their folders.

    A small one has fewer processes than were asked for. The ranks of a spare one wait at their first checkpoint for
    `release`; `is_ready` is set once the user was told so. `ranks` has the numbers of the ranks by process, once
    `lost` has found them.
    """

    def __init__(self, start: Start, environment: dict[str, str], program: list[str], is_small: bool = False,
                 is_spare: bool = False) -> None:
        self.is_small, self.is_ready = is_small, False
        self.ranks: dict[int, int] = {}
        self.output = JobOutput(is_spare)
        self._start, self._began = start, time.monotonic()
        with contextlib.ExitStack() as folders:
            environment, locks = folders.enter_context(job_folders(environment, start.on_this_host))
            self._reports = environment[mpi_environment.REPORTS]
            if is_spare:
                environment[mpi_environment.SPARE] = os.path.join(self._reports, 'needed')
            if start.by_mpirun:
                environment[OWN_DESCRIPTOR] = str(self.output.descriptor)
            launcher = os.getpid()
            self.process = subprocess.Popen(
                start.command(environment, program), env=environment,
                stdin=subprocess.DEVNULL if is_spare else None, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=[*locks, self.output.descriptor],
                preexec_fn=lambda: rank_process.end_with(launcher, signal.SIGTERM))
            self._folders = folders.pop_all()
        self.output.copy(self.process)

    @property
    def seconds(self) -> float:
        """Return the seconds since it was started, or released."""
        return time.monotonic() - self._began

    def has(self, *reports: str) -> bool:
        """Return whether rank 0 has made all these reports; False once the job is closed."""
        return all(os.path.exists(os.path.join(self._reports, report)) for report in reports)

    @property
    def stepped(self) -> bool:
        """Return whether it has done a step, or may have: the reports of rank 0 do not arrive from another host."""
        return self.has(STEP) or not (self._start.on_this_host or self.has(STARTED))

    def lost(self) -> str:
        """Return which ranks have ended while mpirun runs; '' if none has, or they do not work together."""
        if not (self._start.by_mpirun and self._start.on_this_host and self.has(TOGETHER, STEP)):
            return ''
        self.ranks = self.ranks or ranks_of(self.process.pid)
        ended = [process for process in self.ranks if has_ended(process)]
        return ' and '.join('rank %d (process %d)' % (self.ranks[process], process) for process in ended)

    def release(self) -> None:
        """Let the ranks of a spare job continue, in place of those that have ended."""
        self._began = time.monotonic()
        Path(self._reports, 'needed').touch()
        self.output.is_held = False

    def kill(self) -> None:
        """End mpirun and the ranks at once."""
        end_all([self.process.pid, *ranks_of(self.process.pid)])

    def close(self, received: int = 0) -> int:
        """Wait for its end, which the signal `received` may have brought, and remove its folders; return its exit code.

        Raises an OutputError as `JobOutput.finish` does.
        """
        with self._folders, self.process:
            status = self.process.wait()
            self.output.finish(status, GRACE if received else None)
        ended_by = received or -status
        return 128 + ended_by if ended_by > 0 else status


class Reserve:
    """The spare jobs, so many at a time: each has run the script up to its first checkpoint, or is about to."""

    def __init__(self, make: Callable[..., Job], size: int) -> None:
        self._make, self._size = make, size
        self.jobs: list[Job] = []  # the oldest first
        self._not_before, self._pause = 0.0, SOONEST

    def look(self, job: Job, may_restart: bool) -> bool:
        """Start a spare job if there are too few; return whether one could continue at once.

        They start once the running job keeps checkpoints, one after the other. A job of all processes that is not
        restarted any more needs none.
        """
        if not may_restart and not job.is_small:
            return False
        for each in self.jobs[:]:
            if each.process.poll() is not None:
                self.jobs.remove(each)
                self._report_failed(each, job.is_small)
            elif not each.is_ready and each.has(READY):
                each.is_ready = True
                note('the spare processes are ready, after %.0f s' % each.seconds)
        if len(self.jobs) < self._size and all(each.is_ready for each in self.jobs) \
                and job.has(STEP, CHECKPOINT) and time.monotonic() >= self._not_before:
            try:
                self.jobs.append(self._make(is_spare=True))
            except OSError as error:  # such as for lack of memory: the job itself goes on
                self._size = 0
                note('spare processes cannot be started: %s; a restart begins anew' % error)
        return any(each.is_ready for each in self.jobs)

    def take(self) -> Job:
        """Return the oldest spare job, which continues from now on, or as soon as it is ready."""
        job = self.jobs.pop(0)
        job.release()
        return job

    def close(self) -> None:
        """End the spare jobs."""
        for job in self.jobs:
            job.kill()
            job.close()

    def _report_failed(self, job, is_tried_again):
        """Tell of a spare job that has failed.

        Beside a job of fewer processes, whose lost device all of them may need, a spare one is tried again, after
        longer pauses each time. Else its output is shown, and there will be no others.
        """
        if is_tried_again:
            note('spare processes, as many as all, have ended with exit code %d: the job goes on with fewer, and the '
                 'next ones are started in %d s' % (job.close(), self._pause))
            self._not_before, self._pause = time.monotonic() + self._pause, min(2 * self._pause, LATEST)
        else:
            self._size = 0
            job.output.messages.job = 'the spare job'
            job.output.is_held = False
            note('the spare processes have ended with exit code %d before they were needed; there will be no others: a '
                 'restart begins anew' % job.close())


class Signals:
    """The signals to this process that would end it, or that the ranks are to get: `pass_on` sends them on to mpirun.

    `received` is the number of the first one that ends the job; 0 if there was none.
    """

    FROM_A_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    ENDING = FROM_A_TERMINAL + (signal.SIGTERM, signal.SIGABRT)
    PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # mpirun and srun send these to the ranks

    def __init__(self, may_grow: bool) -> None:
        self.received, self._is_ending = 0, False
        self.passed: set[int] = set()  # the numbers of those that the ranks got and that may end them
        self._numbers = self.ENDING + self.PASSED_ON + (GROW,) * bool(may_grow and GROW)
        self._new: list[int] = []  # those to be passed on

    def __enter__(self) -> Signals:
        # Ignored signals stay ignored: SIGHUP under nohup, SIGINT of a background process. Handlers of C code (None)
        # stay, too, such as PYTHONFAULTHANDLER installs one for SIGABRT: Python cannot put them back.
        self._before = {number: signal.signal(number, self.receive) for number in self._numbers
                        if signal.getsignal(number) not in (signal.SIG_IGN, None)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: object = None) -> None:
        """Note that a signal has come: the handler of all of them."""
        self._new.append(number)
        if number not in (*self.PASSED_ON, GROW):
            self.received = self.received or number

    def pass_on(self, process: subprocess.Popen) -> bool:
        """Send the signals that have come on to a process; return whether one of them asks the job to grow."""
        is_asked = False
        while self._new:
            number = self._new.pop(0)
            if number == GROW:
                is_asked = True
            elif number in self.PASSED_ON:
                # Open MPI 4.1's mpirun does not pass on SIGUSR1, against its manual.
                self.passed.add(number)
                send(number, ranks_of(process.pid) or [process.pid])
            elif self._is_ending:
                process.kill()  # its ranks end with it, see rank_process.install
            else:
                self._is_ending = True
                # mpirun would kill the ranks after a second or two: those that have a checkpoint write it first.
                ranks = ranks_of(process.pid) if number == signal.SIGTERM else {}
                send(number, ranks)
                # A terminal sends some to mpirun, too; at a second signal mpirun would abandon its ranks.
                timer = threading.Timer(PATIENCE if ranks else GRACE * (number in self.FROM_A_TERMINAL),
                                        process.terminate)
                timer.daemon = True
                timer.start()
        return is_asked


def send(number: int, processes: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_all(ranks: Collection[int]) -> None:
    """End processes by SIGKILL, and wait until none of them has a file or a device open."""
    send(signal.SIGKILL, ranks)
    while not all(map(has_ended, ranks)):
        time.sleep(LOOK / 10)


def has_ended(process: int) -> bool:
    """Return whether a process has ended, with all of its threads, even if its parent does not know yet. Linux only.

    Files stay locked until the last thread has ended, which may be later than the first one.
    """
    fields = [text.rpartition(b')')[2].split() for text in _texts([Path('/proc/%d/stat' % process)])]
    return all(state in (b'Z', b'X') and int(rest[THREADS]) < 2 for state, *rest in fields)


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
