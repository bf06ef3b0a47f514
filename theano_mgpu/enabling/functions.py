"""`mgpu.enable`: each new `theano.function` runs over the contexts, where that is exact and faster."""
import functools
import os
import time

import theano

from ..batches.arguments import Arguments
from ..errors import BatchError, GraphError, LengthError, MgpuError, warn
from ..graphs.updates import as_dict, with_givens
from ..options import Options
from ..parallel_function import Packing, ParallelFunction
from ..patches import theano_functions
from ..program import CannotCut
from ..program.parallel_graph import choose_ranks, resolve_contexts
from .batch_finder import BatchFinder
from .report import FunctionReport

WARM_UP = 2        # calls before those that count
COUNTED = 3        # calls that count, on one device and over the contexts
SHORTEST = 0.5e-3  # seconds; a shorter call is not divided, since a step over contexts costs about as much

_LIBRARIES = tuple(os.path.join(os.path.dirname(os.path.dirname(theano.__file__)), name, '')
                   for name in ('theano', 'keras'))
OWN_SAMPLES = 'each process has samples of its own: use mgpu.function, which adds over processes'

_enabled = None  # the Enabled in force


def enable(contexts=None, strict=False, verify=False, always=False, tell=warn):
    """Have every `theano.function` that is made from now on run over several contexts, where that is exact and faster.

    A function whose arguments have samples, or that slices its batch from shared data sets, is timed on its first
    calls, on one device by plain Theano and over the contexts, and continues with what is faster. Each of these calls
    computes the usual results. Everything else stays plain Theano: functions without a batch, graphs that cannot be
    computed in parts, short calls. ``theano-mgpu run`` enables it for a whole script.

    Parameters
    ----------
    contexts : list of (str or Context), or callable, optional
        As for `mgpu.function`; all by default. A callable returns them, and is called with the first function.
    strict : bool
        Raise a GraphError for a function that has a batch and cannot be computed in parts.
    verify : bool
        Compare the first batch of each function over the contexts with plain Theano, and print the certificate to
        stderr; with `strict` a difference is an error.
    always : bool
        Divide each function that can be divided, without timing: every run of a script then gives the same rounding.
    tell : callable
        Called with each message for the user; by default it issues an MgpuWarning.

    Returns
    -------
    FunctionReport
        Where each function ran, and why. Print it.

    Examples
    --------
    >>> import numpy as np
    >>> import theano_mgpu, theano.tensor as T
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> report = enable(always=True)
    >>> x = T.dmatrix('x')
    >>> f = theano.function([x], x.sum(), mode='FAST_COMPILE', name='total')
    >>> f(np.ones((7, 2)))
    array(14.)
    >>> report.usages[0].samples, [context.name for context in report.usages[0].contexts]
    (7, ['dev0', 'dev1'])
    >>> disable()
    """
    global _enabled
    if not callable(contexts):
        resolve_contexts(contexts)  # an error now, not with the first function
        contexts = functools.partial(resolve_contexts, contexts)
    _attach_once()
    _enabled = Enabled(functools.lru_cache(None)(contexts), strict, verify, always, tell)
    return _enabled.report


def disable():
    """Leave functions that are made from now on to plain Theano; those that were made before stay as they are."""
    global _enabled
    _enabled = None


@functools.lru_cache(None)
def _attach_once():
    theano_functions.after_each_function(lambda function, given: _enabled and _enabled.attach(function, given))


class Enabled:
    """The arguments of an `enable`, and its report.

    Attributes
    ----------
    report : FunctionReport
    """

    def __init__(self, contexts, strict, verify, always, tell):
        self.contexts, self.strict, self.verifies, self.always, self.tell = contexts, strict, verify, always, tell
        self.report = FunctionReport()

    def attach(self, function, given):
        """Have a new function run over the contexts, if it may have a batch."""
        if (given['name'] or '').startswith(_LIBRARIES):
            return  # Theano or Keras made it for its own use
        usage = self.report.usage(_shown(given['name']))
        obstacle = _obstacle(given)
        if obstacle == OWN_SAMPLES:
            self.tell('with --sharded (mgpu.data=sharded) each process has samples of its own: Theano functions are '
                      'not divided, and each process computes its own results. Use mgpu.function, or leave out '
                      '--sharded')
        if obstacle:
            usage.run_on([], obstacle)
        else:
            # A device that cannot be opened is an error, whether or not this function uses it.
            if [context.kind for context in self.contexts()] == ['cpu'] and choose_ranks(None).size == 1:
                self.tell('there is one context, on the CPU: no function is divided. Map several, e.g. '
                          'theano-mgpu run --gpus 2, or mgpu.init(2)')
            function.mgpu_divided = EnabledFunction(self, function, given, usage)


def _shown(name):
    """A function's name for messages. If it has none, Theano gives the place of its making; its folder is left out."""
    place, colon, line = (name or 'a function').rpartition(':')
    return os.path.basename(place) + colon + line if colon else line


def _obstacle(given):
    """Why the arguments of a `theano.function` exclude several contexts; None if they do not."""
    if not given['params']:
        return 'no batch enters it'
    if given['profile'] or theano.config.profile:
        return 'it is profiled'
    if type(theano.compile.get_mode(given['mode'])) is not theano.Mode:
        return 'its mode checks each op'
    if Options().is_sharded(choose_ranks(None)):
        return OWN_SAMPLES
    return None


class EnabledFunction:
    """Runs in place of a `theano.function`: plain Theano or a ParallelFunction, whichever is faster.

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

    def __init__(self, enabled, function, given, usage):
        self._enabled, self._function, self._given, self._usage = enabled, function, given, usage
        self._ranks = choose_ranks(None)
        self.step = None
        self._seconds = []
        self._run = self._divide if enabled.always else self._measure_plain

    def __call__(self, args, kwargs):
        return self._run(args, kwargs)

    def _measure_plain(self, args, kwargs):
        results, seconds = self._timed(self._plain, args, kwargs)
        if seconds is not None:
            if seconds < SHORTEST:
                self._stay('a call takes %.2g ms, too short to divide' % (seconds * 1e3))
            else:
                self._run, self._one = self._divide, seconds
        return results

    def _divide(self, args, kwargs):
        """Make the first call over the contexts; or stay with plain Theano."""
        refusal = None
        try:
            self.step = self._made(args, kwargs)
        except BatchError:  # wrong arguments: plain Theano raises the error
            pass
        except GraphError as error:
            if self._enabled.strict and self._has_batch:
                raise
            refusal = str(error)
        if refusal is not None:
            self._stay(refusal)
            if self._has_batch:
                self._enabled.tell('%s stays on one device: %s' % (self._usage.name, refusal))
        if self.step is None:
            return self._plain(args, kwargs)
        if self._enabled.verifies:
            self.step.verify(*args, **kwargs).show(self._usage.name, self._enabled.strict)
        self._usage.run_on(self.step.contexts, 'divided')
        self._run = self._over_contexts if self._enabled.always else self._measure_several
        return self._run(args, kwargs)

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
        failure = None
        try:
            results = self._pack(self.step.step(args, kwargs))
            self._usage.add(self.step.samples)
            return results
        except LengthError:
            pass  # the arguments are not such a batch: plain Theano computes, or raises its error
        except Exception as error:
            if self._ranks.size > 1 or self._enabled.strict:
                raise
            failure = str(error)
        results = self._plain(args, kwargs)  # raises plain Theano's error if the arguments are wrong
        if failure is not None:
            self._stay('it failed over the contexts: %s' % failure)
            self._enabled.tell('%s continues on one device: %s' % (self._usage.name, failure))
        return results

    def _stay(self, why):
        self._usage.run_on([], why)
        self.step = self._run = None
        del self._function.mgpu_divided

    def _timed(self, run, args, kwargs):
        """Results, and after enough calls the seconds that one takes, the same number on every rank; None before."""
        began = time.perf_counter()
        results = run(args, kwargs)
        self._seconds.append(time.perf_counter() - began)
        if len(self._seconds) < WARM_UP + COUNTED:
            return results, None
        seconds, self._seconds = min(self._seconds[WARM_UP:]), []
        return results, max(self._ranks.everyones(int(seconds * 1e9))) / 1e9

    def _made(self, args, kwargs):
        """The ParallelFunction for arguments like these; a GraphError if there is none."""
        self._has_batch = False
        given = self._given
        outputs = given['outputs']
        keys = given['output_keys']
        self._pack = Packing(dict(zip(keys, outputs)) if keys is not None else outputs)
        variables, updates = with_givens(self._pack.variables, as_dict(given['updates']), given['givens'],
                                         given['no_default_updates'])
        arguments = Arguments(given['params'], {}, given['allow_input_downcast'])
        finder = BatchFinder(arguments.inputs, variables + list(updates.values()), updates)
        values = arguments.bind(args, kwargs)
        refusal = None
        for axes, length in finder.candidates(values) if finder else ():
            self._has_batch = True
            try:
                return ParallelFunction(
                    given['params'], variables, updates, samples=axes, no_default_updates=True, length=length,
                    example=values, must_divide=True, contexts=self._enabled.contexts(), mode=given['mode'],
                    name=given['name'], allow_input_downcast=given['allow_input_downcast'])
            except MgpuError as error:
                refusal = refusal or error
        if refusal is None:
            raise GraphError('no batch enters it')
        cut = isinstance(refusal.__cause__, CannotCut)
        # The text says all that the errors before this one do.
        raise GraphError('it cannot be computed in parts: %s' % refusal.__cause__ if cut else str(refusal)) from None
