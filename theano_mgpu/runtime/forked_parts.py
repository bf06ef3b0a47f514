"""The parts of a step that processes of the CPU's contexts compute, and the choice whether they do."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import theano

from ..comm.rank_errors import unpacked
from ..devices.arena import ArenaFull, Place, is_large
from ..devices.context_map import HOST, Context, describe
from ..devices.contexts import are_cores
from ..devices.processes import CannotFork, ProcessDied, add_function, arena, may_fork, turn, worker_of
from ..errors import ReplicaError, warn
from ..graph.repeatable import unrepeatable_in
from ..options import EQUAL, Flags
from ..plan import Choice, Part, StepPlan
from ..plan.instructions import PartOnContext
from ..utils import blas, processor
from .batch import Crew
from .replicas.replicated import Replicated

SHORTEST = 2e-3   # seconds; a step that takes less in one process stays there
COUNTED = 4       # steps of which the fastest counts, of each crew, at least: the first one compiles, or forks
MOST = 20         # and at most, while steps get faster: a fork's memory is mapped as it is touched
TRIAL = 1.        # seconds of steps after which a crew that is slower has lost
ATTEMPTS = 2      # to compute a part, if its process is killed


class ForkedPart:
    """The functions of a part on contexts of the CPU, which their processes compute.

    Processes inherit the functions, and the places of the values of shared variables.
    """

    def __init__(self, functions: Mapping[Context, Any], variables: Sequence[Replicated]) -> None:
        self._functions, self._variables, self.number = functions, variables, add_function(self)
        self.facts: dict[Context, list[Any]] = {}  # shapes and dtypes of the last results; None for a small one

    def shared_values(self) -> list[Any]:
        """Return the values of shared variables as a message has them, for all contexts."""
        return [_placed(variable.in_arena()) for variable in self._variables]

    def computed_here(self, context: Context, values: Iterable[Any]) -> list[Any]:
        """Return the results of values in this process, in memory that processes share if it has room."""
        there: list[Any] = []
        with contextlib.suppress(ArenaFull):
            there = _allocated(self.facts.get(context, ()))
        results = self._functions[context].mgpu_call(*values, into=there)
        self.facts[context] = _facts_of(results)
        return results

    def compute(self, message: Any, ask: Callable[[Any], Any]) -> list[Any]:
        """Compute a message, in the process: return small results, and None for those that it has put in their places.
        """
        context, values, shared, places = message
        for variable, value in zip(self._variables, shared):
            variable.variable.container.storage[0] = _taken(value)
        there = list(map(_taken, places))
        results = self._functions[context].mgpu_call(*map(_taken, values), into=there)
        facts = _facts_of(results)
        if facts != _facts_of(there):
            there = list(map(_taken, ask(facts)))
        for value, array in zip(results, there):
            if array is not None and array is not value:
                array[...] = value
        return [value if array is None else None for value, array in zip(results, there)]


class Call:
    """A call of a ForkedPart in the process of a context: it returns the results when it is called."""

    def __init__(self, part: ForkedPart, context: Context, shared: Sequence[Any], values: Sequence[Any]) -> None:
        self._part, self.context, self.worker = part, context, worker_of(context)
        self._values = list(map(arena().with_array, values))
        self._results = _allocated(part.facts.get(context, ()))
        self._message = context, list(map(_placed, self._values)), shared, list(map(_placed, self._results))
        self._is_begun = False

    def begin(self) -> None:
        """Send the message to the process, which computes from now on."""
        self.worker.begin(self._part.number, self._message, (self._values, self._results))
        self._is_begun = True

    def __call__(self) -> list[Any]:
        """Wait for the results; compute them once more if the process is killed."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if not self._is_begun:
                    self.begin()
                return self._received()
            except CannotFork:
                return self._part.computed_here(self.context, self._values)
            except ProcessDied as error:
                self._is_begun = False
                if attempt == ATTEMPTS:
                    raise ReplicaError('the process of context %s has ended %s, %d times in one step, maybe for lack '
                                       'of memory' % (describe([self.context]), error, ATTEMPTS),
                                       context=self.context) from error
        raise AssertionError

    def _received(self):
        what, reply = self.worker.receive()
        if what == 'asks':
            self._part.facts[self.context] = reply
            self._results = _allocated(reply)
            self.worker.answer(list(map(_placed, self._results)), self._results)
            what, reply = self.worker.receive()
        if what == 'failed':
            raise unpacked(reply, 'in the process of context %s' % describe([self.context]))
        return [value if there is None else there for value, there in zip(reply, self._results)]


def _facts_of(values):
    return [(value.shape, value.dtype.str) if is_large(value) else None for value in values]


def _allocated(every_facts):
    return [facts and arena().empty(*facts) for facts in every_facts]


def _placed(value):
    return arena().place_of(value) if is_large(value) else value


def _taken(value):
    return arena().array_at(value) if isinstance(value, Place) else value


class ForkedParts:
    """The parts of a function whose contexts of the CPU can be processes, and the choice of a crew for each step.

    The first steps are timed in this process, and the next ones with a process for each context but the first; if that
    is slower, for half of them, and so on. The fastest crew goes on, for each length of batches, to a power of two.

    Attributes
    ----------
    cores : bool
        Whether the contexts are cores, which no one has mapped: steps in this process are whole on the first one.
    updates : bool
        Whether processes compute shares of the update, too.
    """

    def __init__(self, parts: Mapping[Part, ForkedPart], contexts: Sequence[Context], name: str, cores: bool) -> None:
        self._parts, self._first, self._name, self.cores, self._n = parts, contexts[0], name, cores, len(contexts)
        halvings = self._n.bit_length() - 1 if cores else 1
        self._forked = [Crew(self._n >> i, True) for i in range(halvings)] if parts else []
        self.updates = any(part.is_share for part in parts)
        self._seconds: dict[int, list[list[float]]] = {}  # of the steps of each crew that was tried
        self._is_full = False

    @property
    def _crews(self):
        """The crews, in the order in which they are tried."""
        return [Crew(1 if self.cores else self._n, False), *self._forked]

    def crew(self, samples: int) -> Crew:
        """Return the contexts that compute the next step, of a number of samples."""
        tried = self._seconds.get(samples.bit_length(), [[]])
        if not self._may_fork():
            return self._crews[0]
        return self._crews[len(tried) - 1] if self._is_timed(tried) else min(zip(map(min, tried), self._crews))[1]

    def is_settled(self, samples: int) -> bool:
        """Return whether the fastest crew is known for a number of samples."""
        return not (self._may_fork() and self._is_timed(self._seconds.get(samples.bit_length(), [[]])))

    def why_whole(self, samples: int) -> str:
        """Return the times that keep steps of cores in this process; '' where processes compute."""
        if not self.cores or not self.is_settled(samples) or self.crew(samples).are_forked:
            return ''
        times = self._times(self._seconds.get(samples.bit_length(), []))
        return 'processes at best: ' + times if times else 'processes: none can be forked'

    def note(self, samples: int, seconds: float, crew: Crew) -> None:
        """Note the seconds that a step of a crew has taken."""
        tried = self._seconds.setdefault(samples.bit_length(), [[]])
        if self._is_timed(tried) and crew == self.crew(samples):
            tried[-1].append(seconds)
            loses = min(tried[-1]) >= min(tried[0]) if len(tried) > 1 else min(tried[0]) >= SHORTEST
            if not self._is_timed(tried) and loses and len(tried) < len(self._crews):
                tried.append([])

    def _may_fork(self):
        return self._forked and not self._is_full and may_fork()

    def _is_timed(self, tried):
        """Return whether more steps of the last crew are timed: while they still get faster, or may yet win."""
        if not COUNTED <= len(tried[-1]) < MOST:
            return len(tried[-1]) < COUNTED
        *before, last = tried[-1]
        fastest = min(map(min, tried[:-1]), default=0.)
        may_win = fastest <= min(tried[-1]) < 2 * fastest and sum(tried[-1]) < TRIAL
        return may_win or last < .98 * min(before)

    def changes(self) -> list[Choice]:
        """Return the crews that were chosen, for the plan."""
        chosen = []
        for digits, tried in sorted(self._seconds.items()):
            if not self._is_timed(tried) and (self.cores or len(tried) > 1):
                chosen.append(Choice('processes', _processes(self.crew((1 << digits) - 1)),
                                     '%s, for batches of %d to %d samples'
                                     % (self._times(tried), 1 << max(digits - 1, 0), (1 << digits) - 1)))
        return chosen

    def _times(self, tried):
        return ', '.join('%.3g ms in %s' % (1e3 * min(seconds), _processes(crew))
                         for seconds, crew in zip(tried, self._crews) if seconds)

    @contextlib.contextmanager
    def computing(self, works: Sequence[PartOnContext], slots: Sequence[Any]) -> Iterator[dict[int, Any]]:
        """Have processes compute parts in the block; give callables for the results, by the `id` of each work.

        A process that has not replied at the end of the block, as after Ctrl-C, is given up.
        """
        calls: list[Call] = []
        n_threads = max(1, processor.threads() // len({work.context for work in works}))
        with turn() as are_free, blas.limited_threads(n_threads):
            try:
                yield self._begin(works, slots, calls) if are_free else {}
            finally:
                for call in calls:
                    call.worker.give_up()  # if it has not replied

    def _begin(self, works, slots, calls):
        """Begin the calls of processes; return callables for the results, by the `id` of each work of a part."""
        compute: dict[int, Callable[[], list[Any]]] = {}
        try:
            ours = [work for work in works if work.part in self._parts and work.context != HOST]
            shared = {part: self._parts[part].shared_values()
                      for part in {work.part for work in ours if work.context != self._first}}
            for work in ours:
                part, values = self._parts[work.part], [slots[slot] for slot in work.given]
                if work.context != self._first:
                    calls.append(Call(part, work.context, shared[work.part], values))
                    compute[id(work)] = calls[-1]
                elif work.part.is_share:  # its new values are what processes take in the next step
                    compute[id(work)] = functools.partial(part.computed_here, work.context, values)
            begun = {call.context: call for call in reversed(calls)}  # a process computes one call at a time
            for call in begun.values():
                with contextlib.suppress(CannotFork):  # this process computes it later
                    call.begin()
        except ArenaFull as error:
            self._is_full = True
            for call in calls:
                call.worker.give_up()  # if it has not replied
            compute.clear()
            warn('%s is computed in one process from now on: %s' % (self._name, error))
        return compute


def _processes(crew):
    return '%d' % crew.n if crew.are_forked else 'one'


def forked_parts(parts: Mapping[Part, Any], plan: StepPlan, executor: str) -> ForkedParts | None:
    """Return the parts of a plan that processes can compute; None where its contexts compute in this process.

    Parts with ops of a script stay in this process, since what these do there would be lost. So do all parts where the
    order of work is fixed, which a choice by time is not.
    """
    first, *others = plan.mesh.contexts
    if plan.mesh.on_devices or not others or executor not in ('auto', 'mpi'):
        return None
    found: dict[Part, ForkedPart] = {}
    cores = are_cores(plan.mesh.contexts)
    is_fixed = Flags.now().shares == EQUAL or theano.config.deterministic == 'more'
    for part, compiled in parts.items():
        # Of the update, the shares of contexts: what all compute is small.
        is_wanted = found and part.is_share if part in plan.update else set(part.contexts).difference([first, HOST])
        graphs = [*part.graphs, *part.updates.values()]
        if is_wanted and not is_fixed and compiled.is_plain and unrepeatable_in(graphs, of_elements=True) is None:
            found[part] = ForkedPart(dict(zip(part.contexts, compiled.functions)), compiled.variables)
    return ForkedParts(found, plan.mesh.contexts, plan.name or 'a function', cores) if found or cores else None
