"""Leases: which processes of this user compute on which devices of this host, so that each new one takes a free one.

Each process has a file, which it has locked: the kernel frees the lock when the process ends, however it ends. A file
without a lock is removed by the next reader, unless the run that has started its process lives: the summary of the run
counts the batches of such processes, too. A process reads and changes files while it has locked the folder.
"""
from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import struct
import tempfile
import time
from typing import Any, Collection, Dict, Iterator, List, NamedTuple, Optional, Sequence

from ..utils import command_line, mpi_environment, owned, progress, rank_process, timeline
from ..utils.files import check_own
from ..utils.mpi_environment import RUN
from . import cards, nvml
from .context_map import Context

NAME = re.compile(r'(lease-\w+)(\.\w+)?')  # a file; of a process that a run has started, its name begins as the run's
NUMBERS = struct.Struct('<qqq')
PAUSE = 0.1             # seconds between two looks for a free device

_own: Optional[Lease] = None   # of this process
_waits = False                 # whether `take` waits for a free device in any case


class Held(NamedTuple):
    """A context of a process: its name, its device, and the place for which processes are counted.

    The place is a `Card`'s, or else the device; on the CPU, it is the name.
    """

    name: str
    device: str
    place: str


class Lease:
    """The file of a process: locked by this process, or as this process has read it.

    Attributes
    ----------
    name, run : str
        Of the file, and of the file of the run.
    pid, rank, size : int
        The process, and its rank.
    contexts : list of Held
    numbers : list of int
        Processes that have had the file, one after the other, their batches, and the samples of these.
    is_alive : bool
    is_first : bool
        Whether no other process of the run has had these contexts.
    """

    def __init__(self, name: str, file: int, content: bytes = b'', is_alive: bool = True) -> None:
        self.name, self.file, self.is_alive, self.is_first = name, file, is_alive, True
        self.run = name.partition('.')[0]
        self.pid, self.rank, self.size = os.getpid(), mpi_environment.rank(), mpi_environment.size()
        self.contexts: List[Held] = []
        self.numbers = [0, 0, 0]
        if content:
            with contextlib.suppress(ValueError, TypeError, struct.error):  # the disk was full
                self.numbers = list(NUMBERS.unpack_from(content))
                self.pid, self.rank, self.size, contexts = json.loads(content[NUMBERS.size:])
                self.contexts = [Held(*each) for each in contexts]

    def write(self, contexts: Sequence[Held]) -> None:
        """Write which contexts this process has."""
        self.contexts = list(contexts)
        text = NUMBERS.pack(*self.numbers) + json.dumps([self.pid, self.rank, self.size, self.contexts]).encode()
        os.pwrite(self.file, text, 0)
        os.ftruncate(self.file, len(text))


def folder() -> str:
    """Return the folder of the files of this user."""
    return os.path.join(tempfile.gettempdir(), 'theano_mgpu-%d' % os.getuid())


def options() -> Dict[str, Any]:
    """Return the options of the run that this process is part of; none outside of one."""
    return json.loads(os.environ.get(RUN, '{}'))


def is_child() -> bool:
    """Return whether this process takes one device: a run or a rank has started it, or it is ``run --one``."""
    if command_line.own_command() is not None or mpi_environment.is_rank():
        return False
    return options().get('process', os.getpid()) != os.getpid() or mpi_environment.started_by_rank()


def run() -> int:
    """Return the number of the process of the run, or of the rank, that has started this process; 0 if none has."""
    return options().get('run', os.getppid()) if is_child() else 0


def named() -> Any:
    """Return the contexts that the run was given, if this process is it or part of it: a map, or a number, or None."""
    return options().get('gpus') if is_child() or options().get('run') == os.getpid() else None


def begin_run(one: bool, wait: bool, **more: Any) -> None:
    """Have processes that this one starts take a device each; with `one`, so does this process.

    With `wait`, it waits until no process has this device. `more` are `options` of those processes.
    """
    global _waits
    os.environ[RUN] = '{}'  # where another run has started this one, its processes are its own
    announce([])
    _waits = wait
    os.environ[RUN] = json.dumps(dict(more, process=0 if one else os.getpid(), run=os.getpid(),
                                     file=_own.name if _own else None))


def announce(contexts: Sequence[Held]) -> None:
    """Write which contexts this process has, if the folder can be written."""
    with contextlib.suppress(OSError), _alone() as files:
        _hold(files, contexts)


def occupants() -> list[Lease]:
    """Return the processes of this user that have contexts now; none where that is unknown."""
    with contextlib.suppress(OSError), _alone() as files:
        return sorted((each for each in files if each.is_alive and each.contexts), key=lambda each: each.pid)
    return []


def work() -> list[Lease]:
    """Return the files of the processes that this run has started."""
    with contextlib.suppress(OSError), _alone() as files:
        return [each for each in files if _own and each.run == _own.name != each.name]
    return []


def count(samples: int, seconds: float) -> None:
    """Count a batch for the summary and the timeline of the run that has started this process, if one has.

    It is written at once, since the process may be killed.
    """
    if _own is not None and not _is_held():
        announce(_own.contexts)
    if _own is not None and _own.run != _own.name and _is_held():
        _own.numbers[1] += 1
        _own.numbers[2] += samples
        os.pwrite(_own.file, NUMBERS.pack(*_own.numbers), 0)
        timeline.note({}, 'batch', 'batches on ' + ', '.join(each.name for each in _own.contexts),
                      time.perf_counter() - seconds)


def held(contexts: Sequence[Context]) -> list[Held]:
    """Return contexts with their places; no device is opened."""
    known = {card.device: card.place for card in cards.cards()} if any(c.kind == 'cuda' for c in contexts) else {}
    return [Held(name, device, name if kind == 'cpu' else known.get('cuda0' if device == 'cuda' else device, device))
            for name, device, kind in contexts]


@contextlib.contextmanager
def shared_by(n: int) -> Iterator[None]:
    """Have n processes of a run that are started in the ``with`` block share all devices, in place of one for each."""
    before = os.environ.get(RUN)
    if before is not None:
        os.environ[RUN] = json.dumps(dict(options(), sharing=n))
    try:
        yield
    finally:
        if before is not None:
            os.environ[RUN] = before


def take(contexts: Sequence[Context], n: int | None = None, opened: Collection[str] = (), wait: bool = False
         ) -> list[Context]:
    """Return n contexts that this process has among some, or else take those that the fewest processes have.

    By default it is one or, on GPUs, the share that `shared_by` gives a process of a run. Among equals they are ones
    that are `opened`, by their names, then those with the most free memory, if it is known.
    """
    n_gpus = sum(context.kind != 'cpu' for context in contexts)
    n = n or max(1, n_gpus // options().get('sharing', n_gpus or 1))
    choice, wait = held(contexts), wait or _waits
    if _own is not None and len(_own.contexts) == n and all(each in choice for each in _own.contexts):
        return [contexts[choice.index(each)] for each in _own.contexts]
    others = 'waiting for a free device: other processes have %s' % ', '.join('%s->%s' % each[:2] for each in choice)
    try:
        with progress.note_if_long(lambda: others) if wait else contextlib.nullcontext():
            while True:
                with _alone() as files:
                    freest = _freest(choice, files, opened)[:n]
                    if not wait or not any(n_processes for n_processes, *_ in freest):
                        chosen = sorted(number for *_, number in freest)
                        _hold(files, [choice[number] for number in chosen])
                        return [contexts[number] for number in chosen]
                time.sleep(PAUSE)
    except OSError as error:
        rank_process.note('processes cannot see which devices others have, and take them by their numbers: %s cannot '
                          'be written (%s). Set TMPDIR to a folder that can' % (error.filename or 'a file of them',
                                                                                error.strerror or error))
        return [contexts[(os.getpid() + number) % len(contexts)] for number in range(n)]


def is_first() -> bool:
    """Return whether no other process of the run has had the contexts of this one."""
    return _own is None or _own.is_first


def _freest(choice, files, opened):
    """Return for each device how many processes have it, what counts among equals, and its number in the list; sorted.
    """
    others = [each for each in files if each.is_alive and each is not _own]
    known, ranking = {os.getpid(), *(each.pid for each in others)}, []
    for number, (name, device, place) in enumerate(choice):
        processes, free = nvml.load(place) if device.startswith('cuda') else ([], 0)
        n = sum(any(held.place == place for held in each.contexts) for each in others)
        ranking.append((n + len(set(processes) - known), name not in opened, -free, number))
    return sorted(ranking)


def _is_held():
    """Return whether this process has a lease, and its file open: it may have closed all, and opened its own."""
    return _own is not None and owned.is_at(_own.file, os.path.join(folder(), _own.name))


def _hold(files, contexts):
    """Write which contexts this process has, into its file; the first time it makes one, or takes one of the run."""
    global _own
    run = options().get('file') if is_child() else None
    if _is_held():
        _own.write(contexts)
        return
    alike = [each for each in files if each.run == run != each.name and each.contexts == list(contexts)]
    left = [each for each in alike if not each.is_alive]
    name = left[0].name if left else '%s%d_%d' % (run + '.' if run else 'lease-', os.getpid(), time.time_ns())
    lease = Lease(name, os.open(os.path.join(folder(), name), os.O_RDWR | os.O_CREAT, 0o600))
    lease.numbers, lease.is_first = left[0].numbers if left else lease.numbers, not alike
    lease.numbers[0] += not left or left[0].pid != os.getpid()  # it may have closed its file
    try:
        fcntl.lockf(lease.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lease.write(contexts)
    except OSError:
        os.close(lease.file)
        os.remove(os.path.join(folder(), name))
        raise
    _own = lease
    atexit.register(_end, lease, os.getpid())


def _end(lease, process):
    """Remove the file of a process that ends, unless its run will read it, and those that a run has read."""
    if os.getpid() == process and lease is _own:
        lease.is_alive = False
        with contextlib.suppress(OSError), _alone():
            pass  # files that nobody needs any more are removed


@contextlib.contextmanager
def _alone() -> Iterator[List[Lease]]:
    """Lock the folder in the ``with`` block, and yield the files in it; those that nobody needs any more are removed.
    """
    path = folder()
    os.makedirs(path, mode=0o700, exist_ok=True)
    check_own(path)
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [each for each in map(_read, sorted(os.listdir(path))) if each]
        alive = {each.name for each in files if each.is_alive}
        for each in [each for each in files if not each.is_alive and each.run not in alive]:
            files.remove(each)
            with contextlib.suppress(OSError):
                os.remove(os.path.join(path, each.name))
        yield files
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also if a fork has the descriptor
        os.close(lock)


def _read(name):
    """Return the Lease that a file shows; None if the file is none."""
    if not NAME.fullmatch(name):
        return None
    if _is_held() and name == _own.name:  # to close it would unlock it
        return _own
    with contextlib.suppress(OSError), open(os.path.join(folder(), name), 'r+b') as file:
        is_alive = True
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alive = False
        return Lease(name, -1, file.read(), is_alive)
    return None


def _forget():
    """Have a fork begin without a lease: the lock is of its parent alone."""
    global _own, _waits
    if _is_held():
        os.close(_own.file)
    _own, _waits = None, False


os.register_at_fork(after_in_child=_forget)
