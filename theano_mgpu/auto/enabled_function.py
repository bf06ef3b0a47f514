"""A `theano.function` of `enable`: plain Theano or a ParallelFunction runs in its place."""
from __future__ import annotations

import functools
import threading
from typing import Any

from ..comm.alone import is_alone
from ..comm.mpi import choose_ranks
from ..errors import GraphError, LengthError, MgpuError, in_one_line, named
from ..options import Flags
from ..parallel_function import ParallelFunction
from ..plan.layout import mesh_for
from .chooser import Chooser, State, Way
from .definition import Definition, Refusal
from .enabled import Enabled
from .fallback import FAILED, by_plain, is_for_plain
from .function_call import FunctionCall
from .in_place import InPlaceUpdates
from .programs import Programs
from .report import NEVER_CALLED, FunctionUsage
from .surrounded_function import leave_to_plain

FAILURES = 3  # calls that may fail over the contexts and not in plain Theano

NO_BATCH = 'no batch enters it'
PICKED = 'it picks rows of %s in a way that is not divided'
NO_BATCH_YET = 'no call has shown a batch of more than one sample'
FOR_BATCHES = 'one process calls it alone, to make batches'
NO_SUCCESS = 'no call of it has succeeded'
NOT_TIMED = 'it was not called often enough to be timed'
PROFILED = 'it is profiled'
NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class EnabledFunction:
    """A callable in place of a `theano.function`: plain Theano or a ParallelFunction, whichever is faster.

    A function whose graph is placed on devices runs on them from its first call on. Its batch is divided if there are
    several replicas, or micro-batches. A call without a batch, or with one that cannot be divided, runs as it is on the
    first replica. A copy of a function gets its definition: Theano has kept the optimised graph alone.
    """

    def __init__(self, enabled: Enabled, function: Any, usage: FunctionUsage,
                 definition: Definition | None = None, placed: bool = False) -> None:
        self._enabled, self._function, self._usage = enabled, function, usage
        self._definition, self._in_place = definition or Definition(function), InPlaceUpdates(function)
        self._ranks, self._lock = choose_ranks(None), threading.RLock()
        self._programs: Programs | None = None
        self._refusal: str | None = None
        self._n_failures = 0
        self._placed, self._how = placed, 'placed' if placed else 'divided'  # the latter is for the summary
        self._whole: ParallelFunction | None = None  # of a placed graph: the function that divides no batch
        self._divides = True  # set with the programs of a placed graph: it may have one replica, and no micro-batches
        self._chooser = Chooser(State.SEVERAL if enabled.always or placed else State.TIMES_ONE, self._ranks)

    @property
    def step(self) -> ParallelFunction | None:
        """The ParallelFunction that was chosen last; None if there is none."""
        return self._programs and self._programs.step or self._whole

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if self._usage.why == NEVER_CALLED:
            self._usage.run_on([], FOR_BATCHES if is_alone() else NO_SUCCESS)  # until it has one
        if is_alone():
            return self._plain(args, kwargs)
        if self._chooser.state is State.SEVERAL:
            return self._over_contexts(args, kwargs)
        return self._by_chosen_way(args, kwargs)

    def divide_always(self) -> None:
        """Compute each call over the contexts from now on, if it can be divided, without timing."""
        self._chooser = Chooser(State.SEVERAL, self._ranks)

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function over the contexts, too, unless it is profiled."""
        usage = self._enabled.report.usage(function.mgpu_name)
        if function.profile:
            usage.run_on([], PROFILED)
            if self._placed:
                self._enabled.tell(NOT_PLACED % (function.mgpu_name, PROFILED))
            return
        function.mgpu_divided = EnabledFunction(self._enabled, function, usage,
                                                self._definition.copied(swap, delete_updates), self._placed)

    # ------------------------------------------------------------------------------- one device or several contexts

    def _by_chosen_way(self, args, kwargs):
        chooser, before = self._chooser, self._chooser.state
        results = chooser.run(functools.partial(self._in_way, args, kwargs))
        if chooser.state is before:
            if before is State.TIMES_ONE:
                self._usage.run_on([], NOT_TIMED)
            return results
        if chooser.state is State.SEVERAL:
            self._how = chooser.reason()
            self._usage.run_on(self.step.contexts, self._how)
        elif chooser.state is State.ONE:
            self._stay(chooser.reason(), may_grow=True)
        return results

    def _in_way(self, args, kwargs, way):
        """Compute a call; return the results, and whether its time counts.

        A call of some outputs does not count, nor does a call over the contexts that plain Theano computes in their
        place, or one before their shares have settled.
        """
        before = self._usage.calls
        results = self._plain(args, kwargs) if way is Way.ONE else self._over_contexts(args, kwargs)
        ran_over_contexts, step = self._usage.calls > before, self.step
        return results, kwargs.get('output_subset') is None and (
            way is Way.ONE or ran_over_contexts and (step is None or step.is_settled))

    def _plain(self, args, kwargs):
        return self._function.plain_call(*args, **kwargs)

    def _stay(self, why, may_grow=False):
        """Run on one device from now on; if calls may take longer later, time some of them now and then."""
        self._usage.run_on([], why)
        # Ranks time together, which a function of one device need not do.
        may_grow = may_grow and self._ranks.size == 1 and self._may_divide()
        self._programs = None
        if may_grow:
            self._chooser.rest()
        else:
            self._chooser = Chooser(State.ONE, self._ranks)
            leave_to_plain(self._function)

    def _may_divide(self):
        try:
            return self._made_programs().may_divide
        except MgpuError:
            return False

    # --------------------------------------------------------------------------------------------- over the contexts

    def _over_contexts(self, args, kwargs):
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self._lock: return self._call(args, kwargs)  # noqa: E701

    def _call(self, args, kwargs):
        programs = self._programs
        news = programs is None or programs.is_news(args, kwargs)
        if programs is not None and not news and programs.step is None and not self._placed:
            return self._plain(args, kwargs)
        call, of_some = FunctionCall(self._function, functools.partial(self._compute, news)), 'output_subset' in kwargs
        try:
            results = call.run(args, kwargs)
        except Exception:
            if call.failure is None or self._enabled.strict and not of_some or not is_for_plain(call.failure):
                raise
        if call.failure is not None:
            call.undo()
            results = by_plain(functools.partial(self._plain, args, kwargs), call.failure, self._ranks)
            if not of_some:  # another output may have failed
                self._note_failure(call.failure)
        elif call.afterwards is not None:
            call.undo()
            results = self._plain(args, kwargs)
            call.afterwards()
        return results

    def _made_programs(self):
        """Return the Programs, made if there are none; an MgpuError if contexts cannot run the graph."""
        if self._programs is None:
            inputs, outputs, updates = self._definition.on_host()
            if self._placed:
                mesh = mesh_for([*outputs, *updates.values(), *updates], self._enabled.contexts())
                self._divides = len(mesh.replicas) > 1 or self._ranks.size > 1 or Flags.now().in_rounds
            self._programs = Programs(inputs, outputs, updates, self._compiled, not self._placed)
        return self._programs

    def _note_failure(self, failure):
        """Go on with one device where calls fail over the contexts again and again; one alone may do so by its data."""
        text = in_one_line(failure)
        self._n_failures += 1
        if self._n_failures == 1:
            self._enabled.tell('%s continues on one device: %s' % (self._usage.name, text))
        if self._n_failures < FAILURES:
            self._usage.run_on([], FAILED % text)
        else:
            self._stay(FAILED % text)

    def _note_undivided(self, programs):
        """Note why plain Theano has computed a call without a batch that can be divided."""
        if programs.may_divide:
            self._usage.run_on([], self._refusal or NO_BATCH_YET)
        else:
            picked = ', '.join(map(named, programs.data.picked))
            self._stay(self._refusal or (PICKED % picked if picked else NO_BATCH))

    def _compute(self, news, values):
        try:
            programs = self._made_programs()
        except MgpuError as error:
            return self._cannot_run(error)
        if self._divides and (programs.step is None or news):
            self._choose(programs.choose, programs, values)
        if programs.step is None:
            return self._as_it_is(programs, values) if self._placed else \
                functools.partial(self._note_undivided, programs)
        try:
            return self._by(programs.step, values)
        except LengthError:
            if not programs.choose_made(values):
                change = functools.partial(self._choose, programs.change, programs, values)
                return self._as_it_is(programs, values, change) if self._placed else change
        return self._by(programs.step, values)

    def _as_it_is(self, programs, values, afterwards=None):
        """Compute a call of a placed graph as it is on the first replica."""
        if self._whole is None:
            try:
                self._whole = programs.whole()
            except MgpuError as error:
                return self._cannot_run(error)
            self._verify(self._whole, values)
        results = self._by(self._whole, values)
        if afterwards is not None:
            afterwards()
        return results

    def _cannot_run(self, error):
        """Return a callable that leaves the function to plain Theano; a placed one is an error with `strict`."""
        text = NOT_PLACED % (self._usage.name, error)
        if self._placed and self._enabled.strict:
            raise GraphError(text) from error

        def leave():
            self._stay(str(error))
            if self._placed:
                self._enabled.tell(text)
        return leave

    def _by(self, step, values):
        lent = self._in_place.lent()
        results = step.steps.compute((values, {})).outputs
        self._in_place.write(lent)
        self._usage.add(step.samples)
        self._usage.run_on(self.step.contexts, self._how)
        return results

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
        return ParallelFunction(inputs, outputs, updates, no_default_updates=True, contexts=self._enabled.contexts(),
                                mode=self._function.maker.mode, name=self._usage.name, batch_of_rank_0=True,
                                **options)
