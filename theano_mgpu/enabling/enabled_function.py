"""A `theano.function` of `enable`, and what runs in its place."""
import time

from ..errors import BatchError, GraphError, LengthError
from ..program.parallel_graph import choose_ranks
from .programs import REFUSALS, Programs

WARM_UP = 2        # calls before those that count
COUNTED = 3        # calls that count, on one device and over the contexts
SHORTEST = 0.5e-3  # seconds; a shorter call is not divided, since a step over contexts costs about as much
GROWN = 4          # times the seconds of a call, after which it is timed anew
FAILURES = 3       # calls that may fail over the contexts and not in plain Theano

NO_BATCH = 'no batch enters it'
NO_BATCH_YET = 'no call has shown a batch of more than one sample'


class EnabledFunction:
    """Runs in place of a `theano.function`: plain Theano or a ParallelFunction, whichever is faster.

    What the first calls show is not held for ever. Where a batch is along other axes than before, or where there is a
    batch for the first time, another program is made for it. Where calls take much longer than those that were timed,
    they are timed anew.

    Parameters
    ----------
    enabled : Enabled
    function : theano.compile.function_module.Function
    given : dict
        The arguments of `theano.function`.
    usage : FunctionUsage

    Attributes
    ----------
    step : ParallelFunction or None
    """

    _how = 'divided'  # in the summary

    def __init__(self, enabled, function, given, usage):
        self._enabled, self._function, self._given, self._usage = enabled, function, given, usage
        self._ranks = choose_ranks(None)
        self.step = self._programs = self._refusal = None
        self._failures = 0
        self._seconds, self._one = [], 0
        self._calls, self._timed_next = 0, None
        self._run = self._first = self._divide if enabled.always else self._measure_plain

    def __call__(self, args, kwargs):
        return self._run(args, kwargs)

    # ------------------------------------------------------------------------------------------- on one device

    def _measure_plain(self, args, kwargs):
        results, seconds = self._timed(self._plain, args, kwargs)
        if seconds is not None:
            self._one = seconds
            if seconds < SHORTEST:
                self._stay('a call takes %.2g ms, too short to divide' % (seconds * 1e3), may_grow=True)
            else:
                self._run = self._divide
        return results

    def _plain(self, args, kwargs):
        return self._function.plain_call(*args, **kwargs)

    def _undivided(self, args, kwargs):
        """Compute a call that has no batch which can be divided."""
        return self._plain(args, kwargs)

    def _wait(self, args, kwargs):
        """Compute on one device, until a call shows another batch."""
        if not self._programs.finder.is_news(args, kwargs):
            return self._undivided(args, kwargs)
        self._run = self._first
        return self._run(args, kwargs)

    def _stay(self, why, may_grow=False):
        """Run on one device from now on; if calls may take longer later, time some of them now and then."""
        self._usage.run_on([], why)
        self.step = None
        if self._programs:
            self._programs.forget()
        # Ranks time together, which a function of one device need not do.
        if may_grow and self._ranks.size == 1 and self._prepared() and self._programs.finder:
            self._calls, self._timed_next = 0, 2 * (WARM_UP + COUNTED)
            self._run = self._time_now_and_then
        else:
            self._run = None
            del self._function.mgpu_divided

    def _time_now_and_then(self, args, kwargs):
        self._calls += 1
        if self._calls < self._timed_next:
            return self._plain(args, kwargs)
        results, seconds = self._timed(self._plain, args, kwargs)
        if seconds is not None:
            self._timed_next *= 2
            if seconds > max(SHORTEST, GROWN * self._one):
                self._one, self._run = seconds, self._divide
        return results

    def _timed(self, run, args, kwargs):
        """Results, and after enough calls the seconds that one takes, the same number on every rank; None before."""
        began = time.perf_counter()
        results = run(args, kwargs)
        self._seconds.append(time.perf_counter() - began)
        if len(self._seconds) < WARM_UP + COUNTED:
            return results, None
        seconds, self._seconds = min(self._seconds[WARM_UP:]), []
        return results, max(self._ranks.everyones(int(seconds * 1e9))) / 1e9

    # --------------------------------------------------------------------------------------- over the contexts

    def _divide(self, args, kwargs):
        """Make the first call over the contexts; or go on without them, until a call shows another batch."""
        try:
            self.step = self._programs.step_for(args, kwargs) if self._prepared() else None
        except BatchError:  # wrong arguments: plain Theano raises the error
            return self._plain(args, kwargs)
        except GraphError as error:
            self._refuse(error)
        if self.step is None:
            return self._go_on_undivided(args, kwargs)
        self._verify(self.step, args, kwargs)
        self._usage.run_on(self.step.contexts, self._how)
        self._run = self._over_contexts if self._enabled.always else self._measure_several
        return self._run(args, kwargs)

    def _refuse(self, error):
        """Say why a batch is computed on one device; with `strict`, raise the error, in each call."""
        if self._enabled.strict:
            self._programs.refused.clear()
            raise error
        self._tell_refusal('%s stays on one device: %s', error)

    def _tell_refusal(self, text, error):
        if self._refusal is None:
            self._enabled.tell(text % (self._usage.name, error))
        self._refusal = str(error)

    def _go_on_undivided(self, args, kwargs):
        if not self._programs or not self._programs.finder:
            self._stay_undivided(self._refusal or NO_BATCH)
        elif len(self._programs.refused) >= REFUSALS:
            self._stay_undivided(self._refusal)
        else:
            self._usage.run_on([], self._refusal or NO_BATCH_YET)
            self._run = self._wait
        return self._undivided(args, kwargs)

    def _stay_undivided(self, why):
        self._stay(why)

    def _measure_several(self, args, kwargs):
        results, seconds = self._timed(self._over_contexts, args, kwargs)
        if seconds is not None and self._run == self._measure_several:
            text = '%.3g ms a call on one device, %.3g ms divided' % (self._one * 1e3, seconds * 1e3)
            if seconds < self._one:
                self._usage.run_on(self.step.contexts, text)
                self._run = self._over_contexts
            else:
                self._stay(text, may_grow=True)
        return results

    def _over_contexts(self, args, kwargs):
        if self._programs.finder.is_news(args, kwargs, of_slices=False):
            try:
                if self._programs.likelier_than(self.step, args, kwargs):
                    self._change_step(args, kwargs)
            except BatchError:  # wrong arguments: plain Theano raises the error
                pass
        return self._by(self.step, args, kwargs)

    def _by(self, step, args, kwargs):
        """Compute a call by a step; or by plain Theano, whose results or error are those of the call."""
        failure = None
        try:
            results = self._pack(step.step(args, kwargs))
            self._usage.add(step.samples)
            return results
        except LengthError:
            return self._of_another_length(args, kwargs)
        except Exception as error:
            if self._ranks.size > 1 or self._enabled.strict:
                raise
            failure = str(error)
        results = self._plain(args, kwargs)  # raises plain Theano's error if the arguments are wrong
        if failure is not None:
            self._note_failure(failure)
        return results

    def _note_failure(self, failure):
        """Go on with one device where calls fail over the contexts again and again; one alone may do so by its data."""
        self._failures += 1
        why = 'it failed over the contexts: %s' % failure
        if self._failures == 1:
            self._enabled.tell('%s continues on one device: %s' % (self._usage.name, failure))
        if self._failures < FAILURES:
            self._usage.run_on([], why)
            self._run = self._try_again
        else:
            self._stay(why)

    def _try_again(self, args, kwargs):
        calls = self._usage.calls
        results = self._over_contexts(args, kwargs)
        if self._usage.calls > calls:
            self._usage.run_on(self.step.contexts, self._how)
            self._run = self._over_contexts
        return results

    def _of_another_length(self, args, kwargs):
        """Compute for arguments that are not such a batch as before; later ones of their kind are divided.

        Or raise plain Theano's error.
        """
        step = self.step
        self.step = self._programs.made_before(args, kwargs) or step
        if self.step is not step:
            return self._over_contexts(args, kwargs)
        results = self._undivided(args, kwargs)
        self._change_step(args, kwargs)
        return results

    def _change_step(self, args, kwargs):
        """Make a step for a batch such as this one, or take the one that there is; or keep the one in use."""
        before = self.step
        try:
            self.step = self._programs.step_for(args, kwargs) or before
        except GraphError as error:
            self._tell_refusal('%s computes some batches on one device: %s', error)
        if self.step is not before:
            self._verify(self.step, args, kwargs)

    def _verify(self, step, args, kwargs):
        if self._enabled.verifies:
            step.verify(*args, **kwargs).show(self._usage.name, self._enabled.strict)

    def _prepared(self):
        """Read the definition with the first call that needs it; returns whether that was possible."""
        if self._programs is None and self._refusal is None:
            try:
                self._programs = Programs(self._given, self._enabled.contexts)
                self._pack = self._programs.pack
            except GraphError as error:
                self._refusal = str(error)
        return self._programs is not None
