"""A `theano.function` of `enable`, and what runs in its place."""
import time

from ..batches.arguments import Arguments
from ..errors import BatchError, GraphError, LengthError, MgpuError
from ..graphs.own_flags import builds_graphs
from ..graphs.updates import as_dict, with_givens
from ..options import Options
from ..parallel_function import Packing, ParallelFunction
from ..placement.layout import mesh_for
from ..program import CannotCut
from ..program.parallel_graph import choose_ranks
from .batch_finder import BatchFinder

WARM_UP = 2        # calls before those that count
COUNTED = 3        # calls that count, on one device and over the contexts
SHORTEST = 0.5e-3  # seconds; a shorter call is not divided, since a step over contexts costs about as much

NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


def definition(given):
    """The graph of a `theano.function`.

    Parameters
    ----------
    given : dict
        The arguments of `theano.function`.

    Returns
    -------
    Packing, list of theano.Variable, dict of SharedVariable to theano.Variable
        What a call returns, the outputs, and the updates, default updates included.
    """
    outputs, keys = given['outputs'], given['output_keys']
    pack = Packing(dict(zip(keys, outputs)) if keys is not None else outputs)
    return (pack,) + with_givens(pack.variables, as_dict(given['updates']), given['givens'],
                                 given['no_default_updates'])


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
            return self._of_another_length(args, kwargs)
        except Exception as error:
            if self._ranks.size > 1 or self._enabled.strict:
                raise
            failure = str(error)
        results = self._plain(args, kwargs)  # raises plain Theano's error if the arguments are wrong
        if failure is not None:
            self._stay('it failed over the contexts: %s' % failure)
            self._enabled.tell('%s continues on one device: %s' % (self._usage.name, failure))
        return results

    def _of_another_length(self, args, kwargs):
        """Compute for arguments that are not such a batch as the first ones; or raise plain Theano's error."""
        return self._plain(args, kwargs)

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

    @builds_graphs
    def _made(self, args, kwargs):
        """The ParallelFunction for arguments like these; a GraphError if there is none."""
        self._has_batch = False
        given = self._given
        self._pack, variables, updates = definition(given)
        arguments = Arguments(given['params'], {}, given['allow_input_downcast'])
        finder = BatchFinder(arguments.inputs, variables + list(updates.values()), updates)
        values = arguments.bind(args, kwargs)
        refusal = None
        for axes, length in finder.candidates(values) if finder else ():
            self._has_batch = True
            try:
                return self._compiled(variables, updates, samples=axes, length=length, example=values,
                                      must_divide=True)
            except MgpuError as error:
                refusal = refusal or error
        if refusal is None:
            raise GraphError('no batch enters it')
        cut = isinstance(refusal.__cause__, CannotCut)
        # The text says all that the errors before this one do.
        raise GraphError('it cannot be computed in parts: %s' % refusal.__cause__ if cut else str(refusal)) from None

    def _compiled(self, variables, updates, **options):
        given = self._given
        return ParallelFunction(given['params'], variables, updates, no_default_updates=True,
                                contexts=self._enabled.contexts(), mode=given['mode'], name=given['name'],
                                allow_input_downcast=given['allow_input_downcast'], **options)


class PlacedFunction(EnabledFunction):
    """Runs in place of a `theano.function` whose graph is placed on devices, from its first call on.

    A batch is divided if there are several replicas, or micro-batches; what has no batch, or cannot be divided, runs
    as it is on the first replica.
    """

    _whole = None

    def __init__(self, enabled, function, given, usage):
        super().__init__(enabled, function, given, usage)
        self._run = self._place

    def _place(self, args, kwargs):
        """Make the first call over the devices; or stay with plain Theano, and say why."""
        try:
            self.step = self._divided_or_whole(args, kwargs)
        except MgpuError as error:
            if self._enabled.strict:
                raise GraphError(NOT_PLACED % (self._usage.name, error)) from error
            self._stay(str(error))
            self._enabled.tell(NOT_PLACED % (self._usage.name, error))
            return self._plain(args, kwargs)
        if self._enabled.verifies:
            self.step.verify(*args, **kwargs).show(self._usage.name, self._enabled.strict)
        self._usage.run_on(self.step.contexts, 'placed')
        self._run = self._over_contexts
        return self._run(args, kwargs)

    @builds_graphs
    def _divided_or_whole(self, args, kwargs):
        self._pack, outputs, updates = definition(self._given)
        mesh = mesh_for(outputs + list(updates.values()) + list(updates), self._enabled.contexts())
        if len(mesh.replicas) > 1 or self._ranks.size > 1 or Options().micro_batches > 1:
            try:
                return self._made(args, kwargs)
            except GraphError as error:
                if self._has_batch:
                    self._enabled.tell('%s runs on one replica of its devices: %s' % (self._usage.name, error))
        return self._as_it_is()

    @builds_graphs
    def _as_it_is(self):
        if self._whole is None:
            self._pack, *graph = definition(self._given)
            self._whole = self._compiled(*graph, samples={}, whole=True)
        return self._whole

    def _of_another_length(self, args, kwargs):
        """This call alone: the next one may have the usual length again."""
        step = self._as_it_is()
        results = self._pack(step.step(args, kwargs))
        self._usage.add(step.samples)
        return results
