"""The parts of a step that processes of the CPU's contexts compute, and the choice whether they do."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import theano

from ..comm.failures import unpacked
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
COUNTED = 4       # steps of which the fastest counts, of each crew: the first one compiles, or forks
ATTEMPTS = 2      # to compute a part, if its process is killed


class ForkedPart:
    """The functions of a part on contexts of the CPU, which their processes compute.

    Processes inherit the functions, and the places of the values of shared variables.
    """

    def __init__(self, functions: Mapping[Context, Any], variables: Sequence[Replicated],
                 are_new: Sequence[bool]) -> None:
        self._functions, self._variables = functions, variables
        self.facts: dict[Context, list[Any]] = {}         # shapes and dtypes of the last results
        self.are_new, self.number = are_new, add_function(self)  # which results are new values of variables

    def shared_values(self) -> list[Any]:
        """Return the values of shared variables as a message has them, for all contexts."""
        return [_placed(variable.in_arena()) for variable in self._variables]

    def computed_here(self, context: Context, values: Iterable[Any]) -> list[Any]:
        """Return the results of values in this process."""
        return self._functions[context].mgpu_call(*values)

    def compute(self, message: Any, ask: Callable[[Any], Any]) -> list[Any]:
        """Compute a message, in the process: return small results, and None for those that it has put in their places.
        """
        context, values, shared, places = message
        for variable, value in zip(self._variables, shared):
            variable.variable.container.storage[0] = _taken(value)
        results = self.computed_here(context, map(_taken, values))
        facts = [(each.shape, each.dtype.str) if is_large(each) else None for each in results]
        if facts != [place and (place.shape, place.dtype) for place in places]:
            places = ask(facts)
        for value, place in zip(results, places):
            if place is not None:
                arena().array_at(place)[...] = value
        return [value if place is None else None for value, place in zip(results, places)]


class Call:
    """A call of a ForkedPart in the process of a context: it returns the results when it is called."""

    def __init__(self, part: ForkedPart, context: Context, shared: Sequence[Any], values: Sequence[Any]) -> None:
        self._part, self._context, self._worker = part, context, worker_of(context)
        self._values = list(map(arena().with_array, values))
        self._results = self._allocated(part.facts.get(context, ()))
        self._message = context, list(map(_placed, self._values)), shared, list(map(_placed, self._results))
        self._is_begun = False

    def begin(self) -> None:
        """Send the message to the process, which computes from now on."""
        self._worker.begin(self._part.number, self._message, (self._values, self._results))
        self._is_begun = True

    def give_up(self) -> None:
        """End the process, if it has not replied."""
        self._worker.give_up()

    def __call__(self) -> list[Any]:
        """Wait for the results; compute them once more if the process is killed."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if not self._is_begun:
                    self.begin()
                return self._received()
            except CannotFork:
                return self._part.computed_here(self._context, self._values)
            except ProcessDied as error:
                self._is_begun = False
                if attempt == ATTEMPTS:
                    raise ReplicaError('the process of context %s has ended %s, %d times in one step, maybe for lack '
                                       'of memory' % (describe([self._context]), error, ATTEMPTS),
                                       context=self._context) from error
        raise AssertionError

    def _received(self):
        what, reply = self._worker.receive()
        if what == 'asks':
            self._part.facts[self._context] = reply
            self._results = self._allocated(reply)
            self._worker.answer(list(map(_placed, self._results)), self._results)
            what, reply = self._worker.receive()
        if what == 'failed':
            raise unpacked(reply, 'in the process of context %s' % describe([self._context]))
        results = [value if there is None else there for value, there in zip(reply, self._results)]
        # New values stay: a fork of the script must not see them change.
        return [np.array(each) if is_new and is_large(each) else each
                for each, is_new in zip(results, self._part.are_new)]

    def _allocated(self, facts):
        return [facts and arena().empty(*facts) for facts in facts]


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
    """

    def __init__(self, parts: Mapping[Part, ForkedPart], contexts: Sequence[Context], name: str, cores: bool) -> None:
        self._parts, self._first, self._name, self.cores, self._n = parts, contexts[0], name, cores, len(contexts)
        halvings = self._n.bit_length() - 1 if cores else 1
        self._forked = [Crew(self._n >> i, True) for i in range(halvings)] if parts else []
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

    def note(self, samples: int, seconds: float, crew: Crew) -> None:
        """Note the seconds that a step of a crew has taken."""
        tried = self._seconds.setdefault(samples.bit_length(), [[]])
        if self._is_timed(tried) and crew == self.crew(samples):
            tried[-1].append(seconds)
            loses = min(tried[-1]) >= min(tried[0]) if len(tried) > 1 else min(tried[0]) >= SHORTEST
            if len(tried[-1]) == COUNTED and loses and len(tried) < len(self._crews):
                tried.append([])

    def _may_fork(self):
        return self._forked and not self._is_full and may_fork()

    def _is_timed(self, tried):
        return len(tried[-1]) < COUNTED

    def changes(self) -> list[Choice]:
        """Return the crews that were chosen, for the plan."""
        chosen = []
        for digits, tried in sorted(self._seconds.items()):
            if not self._is_timed(tried) and (self.cores or len(tried) > 1):
                times = ', '.join('%.3g ms in %s' % (1e3 * min(seconds), _processes(crew))
                                  for seconds, crew in zip(tried, self._crews))
                chosen.append(Choice('processes', _processes(self.crew((1 << digits) - 1)),
                                     '%s, for batches of %d to %d samples'
                                     % (times, 1 << max(digits - 1, 0), (1 << digits) - 1)))
        return chosen

    @contextlib.contextmanager
    def computing(self, works: Sequence[PartOnContext], slots: Sequence[Any]) -> Iterator[dict[int, Any]]:
        """Have processes compute parts in the block; give callables for the results, by the `id` of each work.

        A process that has not replied at the end of the block, as after Ctrl-C, is given up.
        """
        begun: dict[int, Call] = {}
        n_threads = max(1, processor.threads() // len({work.context for work in works}))
        with turn() as are_free, blas.limited_threads(n_threads):
            try:
                if are_free:
                    self._begin(works, slots, begun)
                yield begun
            finally:
                for call in begun.values():
                    call.give_up()

    def _begin(self, works, slots, begun):
        forked = [work for work in works if work.part in self._parts and work.context not in (self._first, HOST)]
        try:
            shared = {part: self._parts[part].shared_values() for part in {work.part for work in forked}}
            for work in forked:
                begun[id(work)] = Call(self._parts[work.part], work.context, shared[work.part],
                                       [slots[slot] for slot in work.given])
            taken = set()
            for work in forked:  # a process computes one call at a time
                if work.context not in taken:
                    taken.add(work.context)
                    with contextlib.suppress(CannotFork):  # this process computes it later
                        begun[id(work)].begin()
        except ArenaFull as error:
            self._is_full = True
            for call in begun.values():
                call.give_up()
            begun.clear()
            warn('%s is computed in one process from now on: %s' % (self._name, error))


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
    found, cores = {}, are_cores(plan.mesh.contexts)
    is_fixed = Flags.now().shares == EQUAL or theano.config.deterministic == 'more'
    for part, compiled in parts.items():
        contexts = [context for context in part.contexts if context not in (first, HOST)]
        graphs = [*part.graphs, *part.updates.values()]
        if contexts and not is_fixed and compiled.is_plain and unrepeatable_in(graphs, of_elements=True) is None:
            found[part] = ForkedPart(dict(zip(part.contexts, compiled.functions)), compiled.variables,
                                     [i >= len(part.outputs) for i in compiled.functions[0].mgpu_order])
    return ForkedParts(found, plan.mesh.contexts, plan.name or 'a function', cores) if found or cores else None
