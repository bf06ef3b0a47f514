"""A `theano.function` of `enable`, and what runs in its place."""
import threading
import time

import theano
from theano.compile.sharedvalue import SharedVariable

from ..errors import GraphError, LengthError, MgpuError, RankError, in_one_line, noting
from ..graphs.graph import substitute
from ..graphs.updates import with_givens
from ..options import Options
from ..parallel_function import ParallelFunction
from ..patches.theano_functions import shown
from ..placement.layout import mesh_for
from ..program import CannotCut
from ..program.parallel_graph import choose_ranks
from .batch_finder import BatchFinder
from .function_call import FunctionCall, LeftToPlain, explicit_inputs

WARM_UP = 2        # calls before those that count
COUNTED = 3        # calls that count, on one device and over the contexts
SHORTEST = 0.5e-3  # seconds; a shorter call is not divided, since a step over contexts costs about as much

NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class Definition:
    """The graph of a `theano.function`, with givens and default updates, before Theano's optimiser.

    Parameters
    ----------
    function : theano.compile.function_module.Function

    Attributes
    ----------
    inputs : list of theano.In
        Those that a call may be given.
    outputs : list of theano.Variable
    states : list of theano.Variable
        New values of the inputs that have an update, see `theano.In`.
    updates : dict of SharedVariable to theano.Variable
    """

    def __init__(self, function):
        maker = function.maker
        self.inputs = [given for given, _ in explicit_inputs(function)]
        self.outputs = [output.variable for output in maker.outputs]
        self.states = [given.update for given in self.inputs if given.update is not None]
        self.updates = {given.variable: given.update for given in maker.inputs
                        if given.shared and given.update is not None}

    def copied(self, swap, delete_updates):
        """Return the Definition of a copy, see `Function.copy`."""
        new, swap = object.__new__(Definition), swap or {}
        updates = {} if delete_updates else self.updates
        graph = substitute(self.outputs + self.states + list(updates.values()), swap)
        n = len(self.outputs), len(self.outputs) + len(self.states)
        new.inputs, new.outputs = self.inputs, graph[:n[0]]
        new.states = [] if delete_updates else graph[n[0]:n[1]]
        new.updates = dict(zip([swap.get(variable, variable) for variable in updates], graph[n[1]:]))
        return new

    def on_host(self, subset=None):
        """Return all outputs, or those of a list of numbers, with new states; and updates; of host variables."""
        outputs = self.outputs if subset is None else [self.outputs[i] for i in subset]
        return with_givens(outputs + self.states, self.updates, None, no_default_updates=True)


class Refusal(GraphError):
    """Why a function is not divided."""


FOR_PLAIN = LeftToPlain, LengthError, Refusal  # what every rank has for a call that plain Theano is to compute


class EnabledFunction:
    """Runs in place of a `theano.function`: plain Theano or a ParallelFunction, whichever is faster.

    Parameters
    ----------
    enabled : Enabled
    function : theano.compile.function_module.Function
    usage : FunctionUsage
    definition : Definition, optional
        That of the function by default. Of a copy, Theano has kept the optimised graph alone.
    """

    def __init__(self, enabled, function, usage, definition=None):
        self._enabled, self._function, self._usage = enabled, function, usage
        self._definition = definition or Definition(function)
        self._ranks, self._lock = choose_ranks(None), threading.RLock()
        self._steps = {}  # for each subset of the outputs that was asked for, None for all, its ParallelFunction
        self._seconds, self._has_batch = [], False
        self._run = self._over_contexts if enabled.always else self._measure_plain

    @property
    def step(self):
        """The ParallelFunction of all outputs, or of some where all were never asked for."""
        return next(iter(self._steps.values()), None)

    def __call__(self, args, kwargs):
        return self._run(args, kwargs)

    def copied(self, function, swap, delete_updates):
        """Have a copy of the function run over the contexts, too."""
        usage = self._enabled.report.usage(shown(function.name))
        function.mgpu_divided = type(self)(self._enabled, function, usage,
                                           self._definition.copied(swap, delete_updates))

    def _measure_plain(self, args, kwargs):
        results, seconds = self._timed(self._plain, args, kwargs)
        if seconds is not None:
            if seconds < SHORTEST:
                self._stay('a call takes %.2g ms, too short to divide' % (seconds * 1e3))
            else:
                self._run, self._one = self._measure_several, seconds
        return results

    def _measure_several(self, args, kwargs):
        results, seconds = self._timed(self._over_contexts, args, kwargs)
        if seconds is not None and self._run == self._measure_several:
            text = '%.3g ms a call on one device, %.3g ms divided' % (self._one * 1e3, seconds * 1e3)
            if seconds < self._one:
                self._usage.run_on(self.step.contexts, text)
                self._run = self._over_contexts
            else:
                self._stay(text)
        return results

    def _plain(self, args, kwargs):
        return self._function.plain_call(*args, **kwargs)

    def _over_contexts(self, args, kwargs):
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self._lock: return self._call(args, kwargs)  # noqa: E701

    def _call(self, args, kwargs):
        call = FunctionCall(self._function, self._compute)
        try:
            return call.run(args, kwargs)
        except Exception:
            failure = call.failure
            if not self._is_for_plain(failure):
                raise
        call.undo()
        if isinstance(failure, FOR_PLAIN):
            results = self._plain(args, kwargs)
        else:  # plain Theano raises its own error if the values are at fault
            # A step that has failed on one rank has failed on all.
            with self._ranks.failing_together(), noting(getattr(failure, '__notes__', ())):
                results = self._plain(args, kwargs)
                self._ranks.agree()
        self._note_failure(failure)
        return results

    def _is_for_plain(self, failure):
        """Return whether plain Theano is to compute what has failed; None if the arguments are at fault."""
        if failure is None:
            return False
        if isinstance(failure, Refusal):
            return not (self._enabled.strict and self._has_batch)
        return isinstance(failure, FOR_PLAIN) or not (isinstance(failure, RankError) or self._enabled.strict)

    def _note_failure(self, failure):
        """Stay with plain Theano from now on, unless the failure was that of one call."""
        if isinstance(failure, (LeftToPlain, LengthError)):
            return
        refused, text = isinstance(failure, Refusal), in_one_line(failure)
        self._stay(text if refused else 'it failed over the contexts: %s' % text)
        if self._has_batch:
            verb = 'stays' if refused else 'continues'
            self._enabled.tell('%s %s on one device: %s' % (self._usage.name, verb, text))

    def _compute(self, values, subset):
        """Compute some outputs, and the new values of inputs that have an update, over the contexts."""
        key = None if subset is None else tuple(subset)
        if key not in self._steps:
            self._steps[key] = self._first_step(values, subset)
        step = self._steps[key]
        results = step.step(values, {})
        self._usage.add(step.samples)
        return results

    def _first_step(self, values, subset):
        """Make the function over the contexts for arguments like these; a Refusal if there is none."""
        step = self._divided(values, subset)
        if self._enabled.verifies:
            step.verify(*values).show(self._usage.name, self._enabled.strict)
        self._usage.run_on(step.contexts, 'divided')
        return step

    def _stay(self, why):
        self._usage.run_on([], why)
        self._steps, self._run = {}, None
        del self._function.mgpu_divided

    def _timed(self, run, args, kwargs):
        """Results, and after enough calls the seconds that one takes, the same number on every rank; None before."""
        if kwargs.get('output_subset') is not None:
            return run(args, kwargs), None  # it takes less time than the others
        began = time.perf_counter()
        results = run(args, kwargs)
        self._seconds.append(time.perf_counter() - began)
        if len(self._seconds) < WARM_UP + COUNTED:
            return results, None
        seconds, self._seconds = min(self._seconds[WARM_UP:]), []
        return results, max(self._ranks.everyones(int(seconds * 1e9))) / 1e9

    def _divided(self, values, subset):
        """The ParallelFunction that divides arguments like these; a Refusal if there is none."""
        outputs, updates = self._definition.on_host(subset)
        inputs = self._inputs()
        finder = BatchFinder(inputs, outputs + list(updates.values()), updates)
        refusal = None
        for axes, length in finder.candidates(values) if finder else ():
            self._has_batch = True
            try:
                return self._compiled(inputs, outputs, updates, samples=axes, length=length, example=values,
                                      must_divide=True)
            except MgpuError as error:
                refusal = refusal or error
        if refusal is None:
            raise Refusal('no batch enters it')
        cut = isinstance(refusal.__cause__, CannotCut)
        # The text says all that the errors before this one do.
        raise Refusal('it cannot be computed in parts: %s' % refusal.__cause__ if cut else str(refusal)) from None

    def _inputs(self):
        """The variables of the explicit inputs."""
        for given in self._function.maker.expanded_inputs:
            if isinstance(given.value, theano.gof.Container) != isinstance(given.variable, SharedVariable):
                raise Refusal('theano.In(%s) has the value of a container' % given.variable)
        return [given.variable for given in self._definition.inputs]

    def _compiled(self, inputs, outputs, updates, **options):
        return ParallelFunction(inputs, outputs, updates, no_default_updates=True, contexts=self._enabled.contexts(),
                                mode=self._function.maker.mode, name=self._function.name, **options)


class PlacedFunction(EnabledFunction):
    """Runs in place of a `theano.function` whose graph is placed on devices, from its first call on.

    A batch is divided if there are several replicas, or micro-batches; what has no batch, or cannot be divided, runs
    as it is on the first replica.
    """

    def __init__(self, enabled, function, usage, definition=None):
        super().__init__(enabled, function, usage, definition)
        self._whole = {}  # as `_steps`
        self._run = self._over_contexts

    def _is_for_plain(self, failure):
        return super()._is_for_plain(failure) and not (isinstance(failure, Refusal) and self._enabled.strict)

    def _note_failure(self, failure):
        if isinstance(failure, Refusal):
            self._stay(failure.why)
            self._enabled.tell(str(failure))
        else:
            super()._note_failure(failure)

    def _compute(self, values, subset):
        try:
            return super()._compute(values, subset)
        except LengthError:  # this call alone: the next one may have the usual length again
            step = self._as_it_is(subset)
            results = step.step(values, {})
            self._usage.add(step.samples)
            return results

    def _first_step(self, values, subset):
        """Make the function over the devices; or a Refusal, which says why."""
        try:
            step = self._divided_or_whole(values, subset)
        except MgpuError as error:
            refusal = Refusal(NOT_PLACED % (self._usage.name, error))
            refusal.why = str(error)
            raise refusal from error
        if self._enabled.verifies:
            step.verify(*values).show(self._usage.name, self._enabled.strict)
        self._usage.run_on(step.contexts, 'placed')
        return step

    def _divided_or_whole(self, values, subset):
        outputs, updates = self._definition.on_host(subset)
        mesh = mesh_for(outputs + list(updates.values()) + list(updates), self._enabled.contexts())
        if len(mesh.replicas) > 1 or self._ranks.size > 1 or Options().micro_batches > 1:
            try:
                return self._divided(values, subset)
            except GraphError as error:
                if self._has_batch:
                    self._enabled.tell('%s runs on one replica of its devices: %s' % (self._usage.name, error))
        return self._as_it_is(subset)

    def _as_it_is(self, subset):
        key = None if subset is None else tuple(subset)
        if key not in self._whole:
            self._whole[key] = self._compiled(self._inputs(), *self._definition.on_host(subset), samples={}, whole=True)
        return self._whole[key]
