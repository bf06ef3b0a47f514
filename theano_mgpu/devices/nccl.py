"""Collectives between the CUDA devices of a job by NCCL, on a stream of each device: the host does not wait."""
from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import theano

from ..comm.collectives import all_gather_int, all_gather_object, broadcast_object
from ..comm.communicator import Communicator
from ..compat import cuda_libraries
from ..errors import ExchangeError
from ..options import present_flag
from ..utils import progress, rank_process
from ..utils.pointers import pointers
from .context_map import Context
from .contexts import card_of, gpu_context, primary_context
from .cuda_contexts import keep_apart, stream_of
from .cuda_driver import FIRST, load_driver
from .exchange_operations import Collectives, Copies
from .first_exchange import CAUSE, CONNECTING, forget, keep, outcome
from .nccl_library import FUNCTIONS, Nccl, load
from .nccl_trial import Trial

SOURCE = Path(__file__).with_suffix('.cpp')
IDLE, UNDER_WAY, FAILING, FAILED = range(4)                  # states, as in nccl.cpp
BY_NCCL, BY_DEVICE, BY_TIMEOUT, BY_ANOTHER = range(4)        # failures, as in nccl.cpp
ALL = -1       # exchanges, in place of the number of one
A_WHILE = .05  # seconds of a wait: between two, Python takes Ctrl-C
ABORTING = 60  # seconds that an abort may take before it is no longer waited for

NOT_CUDA, BY_FLAG = 'not all replicas are on CUDA devices', 'mgpu.collectives=host'
# Why a process cannot use NCCL. Other processes hear the number.
REASONS = ('', BY_FLAG, NOT_CUDA, 'two replicas are on one device',
           "NCCL is not installed: for drivers from CUDA 12 on, python -m pip install 'theano_mgpu[cuda12]'",
           'gpuarray.single_stream=False', 'CUDA_LAUNCH_BLOCKING=1', 'an exchange by NCCL has failed in this process')
# By the host of each rank, and its contexts with the bus ids of their devices: a communicator, or why they cannot be
# connected. Each context computes on a stream of its own, also where another one is on the same device.
_cliques: dict[Any, Connected | Failure] = {}
_of_contexts: dict[Any, Connected] = {}  # by the contexts of this process, and the number of ranks
_has_told = False  # the user of an error


class Connected(NamedTuple):
    """A communicator that works, and the bytes of sums a second that its devices exchange; all ranks have this number.
    """

    communicator: NcclCommunicator
    rate: float


class Failure(NamedTuple):
    """The reason why devices cannot be connected, and whether NCCL `hangs`, so that it would do so again."""

    text: str
    hangs: bool = False


class Hang(ExchangeError):
    """Devices have not ended their first exchange."""


class NcclCommunicator:
    """Some CUDA devices of this process, which may be a part of a clique over several processes.

    Calls enqueue work on a stream of each device, which waits for what the device was given to compute before. All
    communicators share it, so that exchanges have one order on all devices. An exchange fails if NCCL gives an error, a
    device is lost, or the devices do not end it within the flag ``mgpu.timeout`` (half of it, if several processes wait
    for each other). Then the communicators of this process are aborted, so that no device waits for ever.

    The `first` of its devices has this place among the devices of all processes.
    """

    def __init__(self, contexts: Sequence[Context], nccl: Nccl, comms: Sequence[int], first: int,
                 size: int) -> None:
        self.contexts, self.first = list(contexts), first
        # A process that tells the others of a failure has waited for an exchange, and then they wait for it.
        self._patience = .5 if size > len(contexts) else 1.
        self._nccl, self._library = nccl, _library(nccl)
        opened = [gpu_context(context) for context in contexts]
        primary = list(map(primary_context, contexts))
        self._handle = self._library.mgpu_open(len(contexts), *map(pointers, (
            primary, map(stream_of, opened), map(_stream_of_device, primary), comms)))
        if not self._handle:
            raise ExchangeError('the CUDA driver makes no event')

    @property
    def has_failed(self) -> bool:
        """Return whether an exchange of this process has failed, so that no further one is possible."""
        return self._library.mgpu_wait(self._handle, 0.) >= FAILING

    def exchange(self, copies: Copies, collectives: Collectives, most: float = 0) -> None:
        """Enqueue copies and then collectives on each device, before what it is given to compute from now on.

        Raise an ExchangeError if that fails: a Hang if they take more than `most` seconds, which is less than the flag
        allows, and not 0.
        """
        self._enqueue(copies, collectives, None, most)

    def begin(self, copies: Copies, collectives: Collectives) -> int:
        """Enqueue an exchange as `exchange` does, beside what the devices are given to compute until `join`.

        Until then the arrays have to live: libgpuarray uses freed memory again in the order of its own streams. Return
        the number of the exchange.
        """
        number = ctypes.c_int()
        self._enqueue(copies, collectives, ctypes.byref(number), 0)
        return number.value

    def join(self, number: int = ALL) -> None:
        """Have the devices compute nothing more before an exchange has ended; raise an ExchangeError for a lost device.
        """
        if not self._library.mgpu_join(self._handle, number):
            raise self._error()

    def _enqueue(self, copies, collectives, number, most):
        given = _Exchange(copies.bytes.size, collectives.counts.size, *[
            array.ctypes.data for array in (copies.to, copies.source, copies.bytes, *collectives)])
        limit = present_flag('mgpu.timeout') * self._patience
        self._limit, self._is_first = min(limit or most, most) if most else limit, most > 0
        if self._library.mgpu_exchange(self._handle, ctypes.byref(given), self._limit, number) >= FAILING:
            raise self._error()

    def wait(self) -> None:
        """Wait until the latest exchange has ended on all devices of this process.

        Raise an ExchangeError if it has failed; if a device was lost, the error names its context.
        """
        state = UNDER_WAY
        while state == UNDER_WAY:
            state = self._library.mgpu_wait(self._handle, A_WHILE)
        if state != IDLE:
            raise self._error()

    def give_up(self) -> None:
        """Abort the communicators of this process, so that no device waits for another one."""
        self._library.mgpu_give_up()
        self._wait_for_abort()

    def _wait_for_abort(self):
        """Wait until devices that wait for each other go on: who reads from one of these would keep Python's lock."""
        end = time.monotonic() + ABORTING
        while self._library.mgpu_wait(self._handle, A_WHILE) == FAILING and time.monotonic() < end:
            pass

    def _error(self):
        self._wait_for_abort()
        numbers = (ctypes.c_int * 3)()
        self._library.mgpu_failure(self._handle, numbers)
        kind, device, code = numbers
        if kind == BY_DEVICE:
            context = self.contexts[device]
            return ExchangeError('%s failed before the devices had exchanged their values: %s'
                                 % (context.device, self._nccl.driver.text_of(code)), context)
        if kind == BY_TIMEOUT and self._is_first:
            return Hang(_hang('the first exchange of values', self._limit))
        if kind == BY_TIMEOUT:
            return ExchangeError('the devices have not exchanged their values within %g s: a device or a process does '
                                 'not answer. The flag mgpu.timeout sets %s' % (
                                     self._limit, 'the limit' if self._patience == 1 else 'twice the limit'))
        if kind == BY_ANOTHER:
            return ExchangeError('another exchange by NCCL has failed in this process')
        return ExchangeError('NCCL gives ' + self._nccl.text_of(code))


def reason_against(contexts: Sequence[Context], flag: str) -> str:
    """Return why this process cannot reduce values of these contexts by NCCL, one of `REASONS`; empty if it can."""
    _, by_flag, not_cuda, one_device, missing, two_streams, blocking, failed = REASONS
    if any(context.kind != 'cuda' for context in contexts):
        return not_cuda
    if flag == 'host':
        return by_flag
    if len({card_of(context) for context in contexts}) < len(contexts):
        return one_device
    if not theano.config.gpuarray.single_stream:
        return two_streams
    if os.environ.get('CUDA_LAUNCH_BLOCKING', '0') not in ('', '0'):  # a launch would wait for a device of a later one
        return blocking
    library = cuda_libraries.survey().libraries.get('libnccl.so')
    if not library or library.problem:
        return missing
    return failed if any(each.communicator.has_failed for each in _of_contexts.values()) else ''


def give_up(error: Any, tell: Callable[[str], None]) -> None:
    """Abort all communicators of this process, so that no device waits for another one, and none is used again.

    The user is told of the first error.
    """
    global _has_told
    for each in list(_of_contexts.values())[:1]:
        each.communicator.give_up()
    if not _has_told:
        tell('NCCL does not work here: %s. From now on, sums go through the host, which takes longer; the flag '
             'mgpu.collectives=host does so without a word' % error)
    _has_told = True


def connect(contexts: Sequence[Context], ranks: Communicator) -> str:
    """Connect the devices of all ranks by NCCL, unless they are; return why that is not possible, or an empty text.

    Every rank has to make the call; none has a `reason_against` it. A `Trial` has to give the expected results. The
    user is told of an error of NCCL. Raise a ReplicaError if a device has too little memory for the trial.
    """
    own = tuple((card_of(context), context) for context in contexts)
    key = of_ranks = tuple(all_gather_object(ranks, (ranks.hosts[ranks.rank] if ranks.size > 1 else '', own)))
    devices = [(host, card) for host, of_rank in of_ranks for card, _ in of_rank]
    if len(set(devices)) < len(devices):
        return 'two processes are on one device'
    if key not in _cliques:
        before = next(filter(None, all_gather_object(ranks, outcome(devices))), '')
        _cliques[key] = Failure(before) if before else _connected(contexts, devices, of_ranks, ranks)
        if before:
            rank_process.note('sums go through the host, which takes longer: %s' % before)
    clique = _cliques[key]
    if isinstance(clique, Failure):
        return clique.text
    _of_contexts[tuple(contexts), ranks.size] = clique
    return ''


def communicator_of(contexts: Sequence[Context], n_ranks: int) -> NcclCommunicator:
    """Return the communicator of contexts that `connect` has connected, in a job of so many ranks."""
    return _of_contexts[tuple(contexts), n_ranks].communicator


def rate_of(contexts: Sequence[Context], n_ranks: int) -> float:
    """Return how many bytes of sums a second these contexts have exchanged when they were connected."""
    return _of_contexts[tuple(contexts), n_ranks].rate


def _connected(contexts, devices, of_ranks, ranks):
    """Return what `_tried` does; tell the user of a failure, and keep one that later processes would wait for, too."""
    first = sum(len(own) for _, own in of_ranks[:ranks.rank])
    least = min(all_gather_int(ranks, min(gpu_context(context).total_gmem for context in contexts)))
    trial = Trial(contexts, first, len(devices), least)
    with progress.note_if_long(lambda: 'NCCL connects %d devices, which may take a minute; else sums go through the '
                               'host' % len(devices)):
        clique = _tried(trial, contexts, first, len(devices), ranks)
    if isinstance(clique, Connected):
        forget(devices)
        return clique
    if clique.hangs:
        keep(devices, clique.text)
    give_up(clique.text, rank_process.note)
    return clique


def _tried(trial, contexts, first, size, ranks):
    """Return a communicator, once a trial has given the expected results; or else the failures of the ranks."""
    nccl, error = _outcome(lambda: load(cuda_libraries.survey().libraries['libnccl.so'].path))
    errors = all_gather_object(ranks, error)
    if not any(errors):
        comms, error = _communicators(nccl, contexts, first, size, ranks)
        errors = all_gather_object(ranks, error)
    if not any(errors):
        made = NcclCommunicator(contexts, nccl, comms, first, size)
        failure, error = _outcome(lambda: trial.failure(made))
        errors = all_gather_object(ranks, error or (Failure(failure) if failure else None))
        if not any(errors):
            rates, errors = zip(*all_gather_object(ranks, _outcome(lambda: trial.rate(made))))
            if not any(errors):
                return Connected(made, min(rates))
        made.give_up()  # no device of this process waits for others any more
    failures = dict.fromkeys(filter(None, errors))
    # Where NCCL has failed on one rank, the others wait for that one: it would not hang again.
    return Failure('; '.join(each.text for each in failures), all(each.hangs for each in failures))


def _communicators(nccl, contexts, first, size, ranks):
    """Return NCCL's communicators, and a failure or None."""
    primary = list(map(primary_context, contexts))
    made = _outcome(lambda: nccl.unique_id(primary[0])) if ranks.rank == 0 else None
    unique_id, error = broadcast_object(ranks, made)
    return ([], error) if error else _in_time(lambda: nccl.connect(primary, first, size, unique_id))


def _in_time(work: Callable[[], Any]) -> tuple[Any, Failure | None]:
    """Return the result of work that may hang, and its failure or None; leave it after `CONNECTING`."""
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(_outcome(work)), name='theano_mgpu NCCL', daemon=True)
    thread.start()
    limit = min(present_flag('mgpu.timeout') or CONNECTING, CONNECTING)
    thread.join(limit)
    return outcomes[0] if outcomes else ([], Failure(_hang('the connection of devices', limit), True))


def _outcome(work):
    """Return the result of some work, and a failure or None."""
    try:
        return work(), None
    except ExchangeError as error:
        return [], Failure(str(error), isinstance(error, Hang))


def _hang(what, seconds):
    return 'NCCL has not ended %s within %g s. %s' % (what, seconds, CAUSE)


class _Exchange(ctypes.Structure):
    """The struct Exchange of nccl.cpp."""

    _fields_ = [('n_copies', ctypes.c_int), ('n_collectives', ctypes.c_int)] + [
        (name, ctypes.c_void_p) for name in ('to', 'source', 'bytes', *Collectives._fields)]


@functools.lru_cache(maxsize=None)
def _stream_of_device(primary: int) -> int:
    """Return NCCL's stream of a device, by the primary context."""
    return load_driver().stream(primary, FIRST)


@functools.lru_cache(maxsize=None)
def _library(nccl: Nccl) -> ctypes.CDLL:
    from ..utils import native
    library = ctypes.CDLL(native.build(SOURCE, ['-pthread']))
    library.mgpu_use(pointers([nccl.address(name) for name in FUNCTIONS]))
    library.mgpu_open.restype = ctypes.c_void_p
    library.mgpu_open.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 4
    library.mgpu_exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
    library.mgpu_join.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.mgpu_wait.argtypes = [ctypes.c_void_p, ctypes.c_double]
    library.mgpu_failure.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    keep_apart(library.mgpu_lock, library.mgpu_unlock)
    return library
