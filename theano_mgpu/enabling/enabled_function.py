"""A `theano.function` of `enable`, and what runs in its place."""
import functools
import threading

from ..distributed.choice import choose_ranks
from ..errors import LengthError, MgpuError, in_one_line
from ..parallel_function import ParallelFunction
from ..patches.theano_functions import shown
from .chooser import Chooser, State, Way
from .definition import Definition, Refusal
from .fallback import FAILED, by_plain, is_for_plain
from .function_call import FunctionCall, LeftToPlain
from .in_place import InPlaceUpdates
from .programs import Programs

FAILURES = 3  # calls that may fail over the contexts and not in plain Theano

NO_BATCH = 'no batch enters it'
NO_BATCH_YET = 'no call has shown a batch of more than one sample'
NOT_TIMED = 'it was not called often enough to be timed'
NOT_COMPUTED = 'no call of it has succeeded'


class CannotRun(LeftToPlain):
    """A call of a function whose graph contexts cannot run."""


class NotDivided(LeftToPlain):
    """A call without a batch that can be divided."""


class OtherBatch(LeftToPlain):
    """A call whose batch is along other axes than that of the program, or of another fixed length."""

    def __init__(self, programs, values):
        super().__init__()
        self.programs, self.values = programs, values


class EnabledFunction:
    """What runs in place of a `theano.function`: plain Theano or a ParallelFunction, whichever is faster.

    Parameters
    ----------
    enabled : EnabledFunctions
    function : theano.compile.function_module.Function
    usage : FunctionUsage
    definition : Definition, optional
        That of the function by default. Of a copy, Theano has kept the optimised graph alone.
    """

    _how = 'divided'  # in the summary

    def __init__(self, enabled, function, usage, definition=None):
        self._enabled, self._function, self._usage = enabled, function, usage
        self._definition, self._in_place = definition or Definition(function), InPlaceUpdates(function)
        self._ranks, self._lock = choose_ranks(None), threading.RLock()
        self._programs = {}  # for each text of a list of outputs that was asked for, None for all
        self._refusal, self._failures, self._failed = None, 0, False
        self._chooser = Chooser(State.SEVERAL if enabled.always else State.TIMES_ONE, self._ranks)
        self._is_called = False

    @property
    def step(self):
        """The ParallelFunction of all outputs, or of some where all were never asked for; None if there is none."""
        return next((programs.step for programs in self._programs.values()), None)

    def __call__(self, args, kwargs):
        if not self._is_called:
            self._is_called = True
            self._usage.run_on([], NOT_COMPUTED)
        if self._chooser.state is State.SEVERAL:
            return self._over_contexts(args, kwargs)
        return self._by_chosen_way(args, kwargs)

    def copied(self, function, swap, delete_updates):
        """Have a copy of the function run over the contexts, too."""
        usage = self._enabled.report.usage(shown(function.name))
        function.mgpu_divided = type(self)(self._enabled, function, usage,
                                           self._definition.copied(swap, delete_updates))

    # ------------------------------------------------------------------------------- one device or several contexts

    def _by_chosen_way(self, args, kwargs):
        chooser, before = self._chooser, self._chooser.state
        results = chooser.run(functools.partial(self._in_way, args, kwargs))
        if chooser.state is before:
            if before is State.TIMES_ONE:
                self._usage.run_on([], NOT_TIMED)
        elif chooser.state is State.SEVERAL:
            self._usage.run_on(self.step.contexts, chooser.reason())
        elif chooser.state is State.ONE:
            self._stay(chooser.reason(), may_grow=True)
        return results

    def _in_way(self, args, kwargs, way):
        """Compute a call; return the results, and whether its time counts.

        The time of a call of some outputs does not count, nor that of a call over the contexts that plain Theano
        computes in their place.
        """
        before = self._usage.calls
        results = self._plain(args, kwargs) if way is Way.ONE else self._over_contexts(args, kwargs)
        return results, kwargs.get('output_subset') is None and (way is Way.ONE or self._usage.calls > before)

    def _plain(self, args, kwargs):
        return self._function.plain_call(*args, **kwargs)

    def _stay(self, why, may_grow=False):
        """Run on one device from now on; if calls may take longer later, time some of them now and then."""
        self._usage.run_on([], why)
        # Ranks time together, which a function of one device need not do.
        may_grow = may_grow and self._ranks.size == 1 and self._may_divide()
        self._programs = {}
        if may_grow:
            self._chooser.rest()
        else:
            self._chooser = Chooser(State.ONE, self._ranks)
            del self._function.mgpu_divided

    def _may_divide(self):
        try:
            return self._programs_of(None, None).may_divide
        except CannotRun:
            return False

    # --------------------------------------------------------------------------------------------- over the contexts

    def _over_contexts(self, args, kwargs):
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self._lock: return self._call(args, kwargs)  # noqa: E701

    def _call(self, args, kwargs):
        subset = kwargs.get('output_subset')
        key = None if subset is None else str(subset)
        programs = self._programs.get(key)
        news = programs is None or programs.is_news(args, kwargs)
        if programs is not None and self._is_plain(programs, news):
            return self._plain(args, kwargs)
        call = FunctionCall(self._function, functools.partial(self._compute, key, news))
        try:
            return call.run(args, kwargs)
        except Exception:
            failure = call.failure
            if failure is None or not self._is_for_plain(failure):
                raise
        call.undo()
        compute = functools.partial(self._plain, args, kwargs)
        results = compute() if isinstance(failure, LeftToPlain) else by_plain(compute, failure, self._ranks)
        self._go_on_after(failure, self._programs.get(key))
        return results

    def _programs_of(self, key, subset):
        if key not in self._programs:
            try:
                self._programs[key] = Programs(*self._definition.on_host(subset), self._compiled)
            except MgpuError as error:
                raise self._unable(error) from error
        return self._programs[key]

    def _unable(self, error):
        """Return the exception for a graph that contexts cannot run."""
        return CannotRun(str(error))

    def _is_plain(self, programs, news):
        """Return whether plain Theano is to compute a call: the lengths show no batch that may be divided."""
        return programs.step is None and not news

    def _is_for_plain(self, failure):
        """Return whether plain Theano is to compute a call that has failed over the contexts."""
        return isinstance(failure, LeftToPlain) or not self._enabled.strict and is_for_plain(failure)

    def _go_on_after(self, failure, programs):
        """Note why plain Theano has computed a call, and decide how to go on."""
        if isinstance(failure, CannotRun):
            self._stay(str(failure))
        elif isinstance(failure, OtherBatch):
            self._change_step(failure.programs, failure.values)
        elif isinstance(failure, NotDivided):
            if programs.may_divide:
                self._usage.run_on([], self._refusal or NO_BATCH_YET)
            else:
                self._stay(self._refusal or NO_BATCH)
        elif not isinstance(failure, LeftToPlain):
            self._note_failure(in_one_line(failure))

    def _note_failure(self, text):
        """Go on with one device where calls fail over the contexts again and again; one alone may do so by its data."""
        self._failures += 1
        if self._failures == 1:
            self._enabled.tell('%s continues on one device: %s' % (self._usage.name, text))
        if self._failures < FAILURES:
            self._usage.run_on([], FAILED % text)
            self._failed = True
        else:
            self._stay(FAILED % text)

    def _compute(self, key, news, values, subset):
        """Compute the outputs, and the new values of inputs that have an update, over the contexts."""
        programs = self._programs_of(key, subset)
        if programs.step is None:
            self._choose_first(programs, values)
        elif news:
            self._choose(programs.choose, programs, values)
        try:
            return self._by(programs.step, values)
        except LengthError:
            if not programs.choose_made(values):
                raise OtherBatch(programs, values) from None
        return self._by(programs.step, values)

    def _by(self, step, values):
        lent = self._in_place.lent()
        results = step.step(values, {})
        self._in_place.write(lent)
        self._usage.add(step.samples)
        if self._failed:
            self._failed = False
            self._usage.run_on(step.contexts, self._how)
        return results

    def _choose_first(self, programs, values):
        try:
            programs.choose(values)
        except Refusal as refusal:
            self._refuse(programs, refusal)
        if programs.step is None:
            raise NotDivided
        self._verify(programs.step, values)
        self._usage.run_on(programs.step.contexts, self._how)

    def _refuse(self, programs, refusal):
        """Say why no batch was divided so far; with `strict`, raise the refusal in each call."""
        if self._enabled.strict:
            programs.forget_refusals()
            raise refusal
        self._tell_refusal('%s stays on one device: %s', refusal)

    def _change_step(self, programs, values):
        """Make a step for a batch such as this one, or keep the one in use."""
        self._choose(programs.change, programs, values)

    def _choose(self, choose, programs, values):
        try:
            if choose(values):
                self._verify(programs.step, values)
        except Refusal as refusal:
            self._tell_refusal('%s computes some batches on one device: %s', refusal)

    def _tell_refusal(self, text, refusal):
        if self._refusal is None:
            self._enabled.tell(text % (self._usage.name, refusal))
        self._refusal = str(refusal)

    def _verify(self, step, values):
        """Show a certificate of the first call, if it is asked for."""
        if self._enabled.verifies:
            self._enabled.show_certificate(self._usage.name, functools.partial(step.verify, *values))

    def _compiled(self, inputs, outputs, updates, **options):
        return ParallelFunction(inputs, outputs, updates, no_default_updates=True, contexts=self._enabled.contexts(),
                                mode=self._function.maker.mode, name=self._function.name, led_by_first=True,
                                **options)
