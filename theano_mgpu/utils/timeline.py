"""The time of a step: seconds in each phase, and a timeline with a span for each action."""
from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import json
import os
import threading
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

from ..errors import MgpuError
from . import mpi_environment
from .files import check_writable, whole_text

PHASES = ('scatter', 'host_to_device', 'launch', 'run', 'device_to_host', 'all_reduce', 'exchange', 'update',
          'broadcast')
RANK_PHASES = PHASES[:1] + ('wait',) + PHASES[1:]  # with several processes, each waits for the others
HOST = 'host'               # the track of actions for all contexts together
STEP = 'step'               # the track of instructions
LOCK = 'interpreter lock'   # the span in which a context waits because another one has the interpreter
LONGEST = 1000000           # spans of one timeline: a file of about 200 MB

_recorder: Optional[Recorder] = None


class TimelineError(MgpuError, OSError):
    """The file of a timeline cannot be written."""


class Timings:
    """Accumulated wall-clock seconds of each phase of a function's calls.

    Parameters
    ----------
    phases : tuple of str

    Attributes
    ----------
    calls : int
    seconds : dict of str to float
    exact : bool
        If it is True, each phase ends when the devices have finished it, as while a timeline is recorded. If it is
        False, updates are only launched, and their time is part of the next step's `run`; the update of a single device
        is launched while its step still runs.

    Examples
    --------
    >>> timings = Timings()
    >>> with timings.span('scatter'):
    ...     pass
    >>> list(timings.seconds)
    ['scatter']
    """

    def __init__(self, phases: Sequence[str] = PHASES):
        self.phases = phases
        self.exact = False
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.calls = 0
        self.seconds: Dict[str, float] = {}

    def span(self, phase: str) -> ContextManager[None]:
        """Add the time spent inside the ``with`` block to a phase."""
        return _Span(self.seconds, phase, HOST)

    def move(self, seconds: float, phase: str, other: str) -> None:
        """Count some seconds of a phase, which may still last, as seconds of another one."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[other] = self.seconds.get(other, 0.0) + seconds

    def waits(self) -> bool:
        """Return whether phases wait for devices for the sake of the timings."""
        return self.exact or _recorder is not None

    def per_call(self) -> dict[str, float]:
        """Return the mean duration of each phase.

        Returns
        -------
        dict of str to float
            Seconds a call, by phase, in the order of a step.
        """
        return {phase: self.seconds.get(phase, 0.0) / max(self.calls, 1) for phase in self.phases}


class _Span:
    """A ``with`` block of an action; a class, since contextlib's generators take twice as long, ten times a step."""

    __slots__ = ('_seconds', '_name', '_track', '_start')

    def __init__(self, seconds, name, track):
        self._seconds, self._name, self._track = seconds, name, track

    def __enter__(self):
        self._start = time.perf_counter()

    def __exit__(self, *error):
        note(self._seconds, self._name, self._track, self._start)


def note(seconds: Dict[str, float], name: str, track: str, start: float) -> None:
    """Add the seconds since the start of an action, and show it in the timeline."""
    stop = time.perf_counter()
    seconds[name] = seconds.get(name, 0.0) + stop - start
    if _recorder is not None:
        _recorder.add(name, track, start, stop)


class Recorder:
    """The spans of one process, and the file for them; each rank writes its own, see `timeline`.

    A process that process `parent` has started adds a line for each span to a file of its own, since it may be killed.
    """

    def __init__(self, path: str, rank: int = 0, parent: int = 0):
        root, extension = os.path.splitext(path)
        self.given, self.rank, self.parent = path, rank, parent
        self.path = '%s.%d.%d' % (path, parent, os.getpid()) if parent else \
            '%s.rank%d%s' % (root, rank, extension) if rank else path
        self._spans: List[Tuple[str, str, float, float]] = []
        self._left_out = 0

    def add(self, name: str, track: str, start: float, stop: float) -> None:
        """Add a span between two times of `time.perf_counter` to a track: a context's name, or `HOST`."""
        thread = threading.current_thread()
        if track in (HOST, STEP) and thread is not threading.main_thread():
            track = '%s of %s' % (track, thread.name)
        if self.parent:
            with open(self.path, 'a') as file:
                file.write(json.dumps([name, track, start, stop]) + '\n')
        elif len(self._spans) < LONGEST:
            self._spans.append((name, track, start, stop))
        else:
            self._left_out += 1

    def write(self) -> None:
        """Write the file, in Chrome's trace event format, with the spans of the processes that this one has started."""
        if self.parent:
            return
        events = _events(self.rank, 'rank %d' % self.rank, self._spans)
        for path in glob.glob('%s.%d.*' % (glob.escape(self.given), os.getpid())):
            number = path.rpartition('.')[2]
            with open(path) as file:
                events += _events(int(number), 'process ' + number, [json.loads(line) for line in file])
            os.remove(path)
        with whole_text(self.path) as file:
            json.dump(dict(traceEvents=events, displayTimeUnit='ms', otherData=dict(left_out=self._left_out)), file)


def _events(process, title, spans):
    """Return the spans of a process as complete events, in microseconds, with the names of its tracks."""
    tracks = {track: number for number, track in enumerate(dict.fromkeys([HOST] + [track for _, track, _, _ in spans]))}
    events = [dict(ph='M', name='process_name', pid=process, tid=0, args=dict(name=title))]
    events += [dict(ph='M', name='thread_name', pid=process, tid=number, args=dict(name=track))
               for track, number in tracks.items()]
    return events + [dict(ph='X', name=name, cat=name, pid=process, tid=tracks[track], ts=1e6 * start,
                          dur=1e6 * (stop - start)) for name, track, start, stop in spans]


@contextlib.contextmanager
def timeline(path: str, rank: int | None = None) -> Iterator[None]:
    """Record the actions of each context while the ``with`` block runs.

    Parameters
    ----------
    path : str
        A .json file for https://ui.perfetto.dev or chrome://tracing. With several processes, rank 0 writes this file
        and each other rank writes one next to it: ``trace.json``, ``trace.rank1.json``. Processes of one host have a
        common clock.
    rank : int, optional
        The number of this process; `mgpu.rank` by default.

    Notes
    -----
    One row shows the instructions of each step, as ``print(step.plan)`` lists them, another one its phases on the host.
    Other threads have two such rows each. Each context has a row of its own: copies to its device, the launch, the run
    (until the device has the results; a ``cpu`` context has no launch), copies from it, the update, and ``interpreter
    lock``: the time in which it waits because another context has Python's lock, or the only thread.

    The flag ``mgpu.timeline=trace.json`` records a whole script, and in one call in three the layers of its functions.

    Raises
    ------
    RuntimeError
        If another timeline is being recorded.
    MgpuError
        If the file cannot be written; also an OSError.

    Examples
    --------
    >>> import json, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), 'trace.json')
    >>> with timeline(path), Timings().span('scatter'):
    ...     pass
    >>> [event['name'] for event in json.load(open(path))['traceEvents'] if event['ph'] == 'X']
    ['scatter']
    """
    recorder = start(path, rank)
    try:
        yield
    finally:
        stop(recorder)


def records() -> bool:
    """Return whether a timeline is being recorded."""
    return _recorder is not None


def start(path: str, rank: int | None = None, parent: int = 0) -> Recorder:
    """Begin a timeline; `stop` ends it, and so does the end of the process. See Recorder for `parent`."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError('a timeline is being recorded already, to %s: end it first (the flag mgpu.timeline '
                           'records the whole script)' % _recorder.path)
    # The script may change the current folder.
    recorder = Recorder(path and os.path.abspath(path), mpi_environment.rank() if rank is None else rank, parent)
    try:
        check_writable(recorder.path)  # fails now if the path cannot be written, not at the end
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = getattr(error, 'strerror', None) or error
        raise TimelineError('the timeline %s. Give timeline(path), or the flag mgpu.timeline, a path in a folder that '
                            'exists' % reason) from error
    _recorder = recorder
    atexit.register(stop, recorder)
    return recorder


def stop(recorder: Recorder) -> None:
    """End a timeline and write its file; do nothing the second time."""
    global _recorder
    if _recorder is recorder:
        _recorder = None
        atexit.unregister(stop)
        recorder.write()


def _begin_fork():
    global _recorder
    if _recorder is not None:
        _recorder = Recorder(_recorder.given, parent=_recorder.parent or os.getppid())


os.register_at_fork(after_in_child=_begin_fork)
_NOTHING = contextlib.nullcontext()


def span(name: str, track: str = HOST) -> ContextManager[None]:
    """Record a ``with`` block in the timeline, if there is one."""
    return _NOTHING if _recorder is None else _Span({}, name, track)


def on_track(tasks: Sequence[Callable[[], Any]], name: str, contexts: Sequence[Any]) -> Sequence[Callable[[], Any]]:
    """Wrap tasks so that they appear in the timeline, on the tracks of contexts; without a timeline return the same."""
    if _recorder is None:
        return tasks
    submitted = time.perf_counter()

    def run(task, track):
        started = time.perf_counter()
        if _recorder is not None:
            _recorder.add(LOCK, track, submitted, started)
        with span(name, track):
            return task()
    return [functools.partial(run, task, context.name) for task, context in zip(tasks, contexts)]
