"""The batch of a `theano.function`, as its calls and data sets show it, and its programs over contexts."""
from __future__ import annotations

import functools
import time
from typing import Any, Iterator

import theano

from ..comm.alone import is_alone
from ..comm.communicator import Communicator
from ..comm.mpi import choose_ranks
from ..devices.contexts import are_cores, known_as_cpu
from ..devices.shared_variables import watcher_of
from ..errors import GraphError, LengthError, MgpuError, in_one_line, named
from ..graph.audit import host_obstacle
from ..graph.graph import n_axes
from ..options import Flags
from ..parallel_function import ParallelFunction
from ..plan.context_layout import mesh_for
from ..runtime.call_hooks import Computed
from .choice import Chooser, Treatment, Way
from .definition import Definition, Refusal
from .dispatched import BatchSource, Dispatched, LeaveToPlain, leave_to_plain
from .enabled import Enabled
from .fallback import FAILED, is_for_plain
from .function_call import FunctionCall
from .in_place import InPlaceUpdates
from .programs import Programs
from .report import NEVER_CALLED, NO_SUCCESS, Usage

FAILURES = 3  # calls that may fail over the contexts and not in plain Theano

NO_BATCH = 'no batch enters it'
PICKED = 'it picks rows of %s in a way that is not divided'
NO_BATCH_YET = 'no call has shown a batch of more than one sample'
FOR_BATCHES = 'one process calls it alone, to make batches'
NOT_TIMED = 'it ran too briefly to be tried on several contexts'
PROFILED = 'it is profiled'
NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class FoundBatch(BatchSource):
    """The batch of a `theano.function`: its arguments with samples, slices of data sets, or whole data sets.

    A function whose graph is placed on devices runs on them from its first call on. Its batch is divided if there are
    several replicas, or micro-batches. A call without a batch, or with one that cannot be divided, runs as it is on the
    first replica. A copy of a function gets its definition: Theano has kept the optimised graph alone.
    """

    def __init__(self, enabled: Enabled, function: Any, usage: Usage, has_samples: bool,
                 definition: Definition | None = None, placed: bool = False) -> None:
        super().__init__(function.plain_call)
        self._enabled, self._function, self._usage = enabled, function, usage
        usage.counts_all = False
        self._definition, self._in_place = definition or Definition(function), InPlaceUpdates(function)
        self.has_samples, self._placed = has_samples, placed
        # Without a batch, processes need not make the same calls.
        self.ranks = choose_ranks(None) if has_samples or placed else Communicator()
        self._is_apart = self.ranks.size < choose_ranks(None).size
        self._how = {way: 'placed' if placed else way.value for way in Way}  # for the summary
        self._programs: Programs | None = None
        self._whole: ParallelFunction | None = None  # the function that divides no batch
        self._divides = True  # set with the programs of a placed graph: it may have one replica, and no micro-batches
        self._refusal: str | None = None
        self._n_failures = 0
        self._is_chosen = False  # whether the summary says which way is the fastest
        self.dispatched = Dispatched(self, enabled.always or placed or self._is_apart)
        function.mgpu_divided = self.dispatched
        if not has_samples and not placed:
            self.dispatched.closed[Way.SEVERAL] = NO_BATCH
            self._how[Way.DEVICE] = '%s (%s)' % (Way.DEVICE.value, NO_BATCH)

    @property
    def step(self) -> ParallelFunction | None:
        """The ParallelFunction that was chosen last; None if there is none."""
        return self._programs and self._programs.step or self._whole

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function over the contexts, too, unless it is profiled."""
        usage = self._enabled.report.usage(function.mgpu_name)
        if function.profile:
            usage.run_on([], PROFILED)
            if self._placed:
                self._enabled.tell(NOT_PLACED % (function.mgpu_name, PROFILED))
            return
        FoundBatch(self._enabled, function, usage, self.has_samples, self._definition.copied(swap, delete_updates),
              self._placed)

    # ------------------------------------------------------------------------------------------------------ its ways

    def ways(self) -> Iterator[Way]:
        yield Way.HOST
        if not self._placed and self._may_run_on_device():
            yield Way.DEVICE
        if self._placed or self.has_samples:
            yield Way.SEVERAL

    def _may_run_on_device(self):
        """Return whether the first context may compute whole calls, which Theano's flag ``device`` does not give it.

        Where several processes train together, each would do so by itself, and a device may round differently each
        time: so none that change variables.
        """
        if choose_ranks(None).size > 1 and not (self._is_apart and self._reads_only()):
            return False
        return theano.config.device == 'cpu' and not known_as_cpu() and self._first()[0].kind != 'cpu'

    def _reads_only(self):
        """Return whether the function reads variables of a step over contexts, and changes none."""
        inputs = self._function.maker.expanded_inputs
        return all(spec.update is None for spec in inputs) and any(
            spec.shared and n_axes(spec.variable) and watcher_of(spec.variable) is not None for spec in inputs)

    def _first(self):
        contexts = self._enabled.contexts()
        return contexts[0] if isinstance(contexts[0], list) else contexts[:1]

    def length(self, call: Any) -> int:
        # Processes choose alike, and rank 0's batch, which counts, may have another length: one choice for all lengths.
        return longest(call) if self.has_samples and self.ranks.size == 1 else 0

    def counts(self, call: Any) -> bool:
        return call[1].get('output_subset') is None

    def patience(self) -> float:
        is_made = self._programs is not None or self.ranks.size > 1
        return 0 if is_made or not are_cores(self._enabled.contexts()) else self._function.mgpu_seconds

    def may_grow(self) -> bool:
        # Ranks time together, which a function of one device need not do.
        if self.ranks.size > 1 or self._is_apart:
            return False
        if not self.has_samples:
            return not known_as_cpu()
        try:
            return self._made_programs().may_divide
        except MgpuError:
            return False

    def chosen(self, chooser: Chooser) -> None:
        self._is_chosen = True
        step = {Way.HOST: None, Way.DEVICE: self._whole, Way.SEVERAL: self.step}[chooser.way]
        self._how[chooser.way] = self.dispatched.reason(chooser, self.dispatched.why_closed())
        self._usage.run_on(step.contexts if step else [], self._how[chooser.way])
        if chooser.way is Way.HOST:
            if self.dispatched.choice.is_all_on_host():
                self._programs = self._whole = None  # their copies take memory
            if chooser.state is Treatment.SETTLED and not self.has_samples:
                leave_to_plain(self._function)

    def closed(self, why: str, last: Way) -> None:
        self._is_chosen = False
        self._how[last] = '%s (%s)' % (last.value, why)
        if last is Way.HOST:
            self._usage.run_on([], self.dispatched.why_closed())
            self._programs = self._whole = None
            leave_to_plain(self._function)

    # ------------------------------------------------------------------------------------------------------- a call

    def plain(self, call: Any) -> Computed:
        if self._usage.why == NEVER_CALLED:
            self._usage.run_on([], FOR_BATCHES if is_alone() else NO_SUCCESS)  # until it has one
        computed = super().plain(call)
        if self._usage.why == NO_SUCCESS:
            self._usage.run_on([], NOT_TIMED if self.has_samples or self._placed else '%s; %s' % (NO_BATCH, NOT_TIMED))
        return computed

    def over_contexts(self, call: Any, way: Way) -> Computed | LeaveToPlain:
        args, kwargs = call
        programs = self._programs
        self._usage.begin()
        if self._is_apart:
            getattr(self.plain_call, 'take_changes', bool)()  # none with data of their own
        news = way is Way.SEVERAL and (programs is None or programs.is_news(args, kwargs))
        if way is Way.SEVERAL and programs is not None and not news and programs.step is None and not self._placed:
            return LeaveToPlain(lambda: None)
        bound, of_some = FunctionCall(self._function, functools.partial(self._compute, way, news)), \
            'output_subset' in kwargs
        try:
            results = bound.run(args, kwargs)
        except Exception:
            if bound.failure is None or self._enabled.strict and not of_some or not is_for_plain(bound.failure):
                raise
        if bound.failure is not None:
            bound.undo()
            note = functools.partial(self._note_failure, way, bound.failure)
            return LeaveToPlain((lambda: None) if of_some else note, bound.failure)  # another output may have failed
        if bound.afterwards is not None:
            bound.undo()
            return LeaveToPlain(bound.afterwards)
        return Computed(results, step=self.step)

    def _compute(self, way, news, values):
        try:
            programs = self._made_programs()
        except MgpuError as error:
            return self._cannot_run(error)
        if way is Way.DEVICE:
            return self._as_it_is(programs, values)
        if self._divides and (programs.step is None or news):
            self._choose(programs.choose, programs, values)
        if programs.step is None:
            return self._as_it_is(programs, values) if self._placed else \
                functools.partial(self._note_undivided, programs)
        try:
            return self._by(programs.step, values, way)
        except LengthError:
            if not programs.choose_made(values):
                change = functools.partial(self._choose, programs.change, programs, values)
                return self._as_it_is(programs, values, change) if self._placed else change
        return self._by(programs.step, values, way)

    def _made_programs(self):
        """Return the Programs, made if there are none; an MgpuError if contexts cannot run the graph."""
        if self._programs is None:
            inputs, outputs, updates = self._definition.on_host()
            if self._placed:
                mesh = mesh_for([*outputs, *updates.values(), *updates], self._enabled.contexts())
                self._divides = len(mesh.replicas) > 1 or self.ranks.size > 1 or Flags.now().in_rounds
            self._programs = Programs(inputs, outputs, updates, self._compiled, self.has_samples and not self._placed)
        return self._programs

    def _as_it_is(self, programs, values, afterwards=None):
        """Compute a call as it is: on the first context, or of a placed graph on the first replica."""
        if self._whole is None:
            try:
                self._whole = programs.whole(**{} if self._placed else dict(
                    contexts=self._first(), executor='serial' if self._is_apart else None))
                obstacle = not self._placed and host_obstacle(self._whole)
                if obstacle:
                    raise Refusal(obstacle)
            except MgpuError as error:
                self._whole = None
                return self._cannot_run(error, Way.DEVICE)
            self._verify(self._whole, values)
        results = self._by(self._whole, values, Way.DEVICE)
        if afterwards is not None:
            afterwards()
        return results

    def _by(self, step, values, way):
        lent, began = self._in_place.lent(), time.perf_counter()
        results = step.hooks.compute((values, {})).outputs
        self._in_place.write(lent)
        samples = step.samples if way is Way.SEVERAL or self._placed else self.length((values, {}))
        self._usage.add(samples, time.perf_counter() - began)
        if not self._is_chosen:
            self._usage.run_on(step.contexts, self.dispatched.so_far(self._how[way]))
        return results

    def _cannot_run(self, error, way=None):
        """Return a callable that closes a way, or all over contexts; of a placed function it is an error with `strict`.
        """
        text = NOT_PLACED % (self._usage.name, error)
        if self._placed and self._enabled.strict:
            raise GraphError(text) from error

        def leave():
            for each in [way] if way else [Way.SEVERAL, Way.DEVICE]:
                self.dispatched.close(each, str(error))
            if self._placed:
                self._enabled.tell(text)
        return leave

    def _note_failure(self, way, failure):
        """Go on in another way where calls fail over the contexts again and again; one alone may do so by its data."""
        text = in_one_line(failure)
        self._n_failures += 1
        if self._n_failures == 1:
            self._enabled.tell('%s continues on %s: %s' % (
                self._usage.name, 'the host' if way is Way.DEVICE else 'one device', text))
        if way is Way.DEVICE or self._n_failures == FAILURES:
            self.dispatched.close(way, FAILED % text)
        else:
            self._usage.run_on([], FAILED % text)

    def _note_undivided(self, programs):
        """Note why a call has no batch that can be divided."""
        if programs.may_divide:
            why = self._refusal or NO_BATCH_YET
            self._how[Way.DEVICE] = '%s (%s)' % (Way.DEVICE.value, why)
            if self._whole is not None and self.dispatched.always:
                self._usage.run_on(self._whole.contexts, self._how[Way.DEVICE])
            else:
                self._usage.run_on([], why)
        else:
            picked = ', '.join(map(named, programs.data.picked))
            self.dispatched.close(Way.SEVERAL, self._refusal or (PICKED % picked if picked else NO_BATCH))

    def _choose(self, choose, programs, values):
        """Choose the step of a batch, or keep the present one and say why; with `strict`, raise a first refusal."""
        is_first = programs.step is None
        try:
            if choose(values):
                self._verify(programs.step, values)
        except Refusal as refusal:
            if is_first and self._enabled.strict and not self._placed and not programs.guesses:
                programs.forget_refusals()
                raise
            if self._refusal is None and not programs.guesses:
                text = '%s computes some batches on one device: %s' if not is_first else \
                    '%s runs on one replica of its devices: %s' if self._placed else '%s stays on one device: %s'
                self._enabled.tell(text % (self._usage.name, refusal))
            self._refusal = str(refusal)

    def _verify(self, step, values):
        if self._enabled.verifies:
            self._enabled.show_report(self._usage.name, functools.partial(step.verify, *values))

    def _compiled(self, inputs, outputs, updates, **options):
        return ParallelFunction(inputs, outputs, updates, **{**dict(
            no_default_updates=True, contexts=self._enabled.contexts(), mode=self._function.maker.mode,
            name=self._usage.name, batch_of_rank_0=True), **options})


def longest(call: Any) -> int:
    """Return the length of the longest argument of a call, along its first axis."""
    return max([0, *[_length(value) for value in (*call[0], *call[1].values())]])


def _length(value):
    shape = getattr(value, 'shape', None)
    if shape is not None:
        return shape[0] if shape else 0
    return len(value) if isinstance(value, (list, tuple)) else 0
