"""`mgpu.enable`: each new `theano.function` runs over the contexts, where that is exact and faster."""
from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import theano
from theano.tensor.basic import discrete_dtypes

from ..comm.mpi import choose_ranks
from ..devices import leases
from ..devices.choice import resolve_contexts
from ..devices.context_map import Context
from ..devices.contexts import known_as_cpu
from ..errors import warn
from ..graph import theano_functions
from ..graph.placement.propagation import is_placed
from ..graph.updates import first_of_each
from ..options import Flags
from ..utils import mpi_environment, rank_process
from .data_sets import chains, has_data, note_updates
from .enabled import Enabled
from .found import NO_BATCH, NOT_PLACED, PROFILED, Found
from .function_call import explicit_inputs
from .function_steps import count_calls, record
from .rank_0_function import keep_alike
from .report import FunctionReport

LENT = 'an output is memory of a shared variable (borrow=True), which the script may edit'
OWN_SAMPLES = 'each process has samples of its own: use mgpu.function, which adds over processes'
ONE_CPU = 'there is one context, on the CPU'
NOTHING_DIVIDED = ONE_CPU + (': nothing is divided. To use several cores, start processes: theano-mgpu launch -n 2 run '
                             'SCRIPT. To use other devices, map contexts to them; theano-mgpu devices lists them')


def enable(contexts: Any = None, strict: bool = False, verify: bool = False, always: bool = False,
           tell: Callable[[str], object] = warn) -> FunctionReport:
    """Run every `theano.function` of the future over several contexts, where that is exact and faster.

    A function whose arguments have samples, that slices its batch from shared data sets, or whose batch is a whole data
    set in a shared variable or a constant, is timed on its first calls, on one device by plain Theano and over the
    contexts, and continues in the faster way. Each of these calls computes the usual results. A function whose graph is
    placed (see `device`) runs on its devices from the first call on, with or without a batch. Everything else stays
    plain Theano: functions without a batch, graphs that cannot be computed in parts, short calls. ``theano-mgpu run``
    enables it for a whole script.

    Parameters
    ----------
    contexts : list of str or Context, or callable, optional
        As for `mgpu.function`; all by default. A callable returns them, and is called with each function.
    strict : bool
        Raise a GraphError for a function that has a batch and cannot be computed in parts.
    verify : bool
        Compare the first batch of each function over the contexts with plain Theano, and print the report to stderr;
        with `strict` a difference is an error.
    always : bool
        Divide each function that can be divided, without timing: every run of a script then gives the same rounding.
    tell : callable
        Called with each message for the user; by default it issues an MgpuWarning.

    Returns
    -------
    FunctionReport
        Where each function ran, and why. Print it.

    Raises
    ------
    ContextError
        If one of the contexts is not mapped, or its device cannot be opened.

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
    if not callable(contexts):
        resolved = resolve_contexts(contexts)  # an error now, not with the first function
        if contexts is None and has_one_cpu(resolved) and not (always or mpi_environment.started_by_rank()):
            tell(NOTHING_DIVIDED)
        contexts = functools.partial(resolve_contexts, contexts)
    report = FunctionReport()
    _attach_once()
    EnabledFunctions.in_force = EnabledFunctions(contexts, report, strict, verify, always, tell)
    return report


def disable() -> None:
    """Leave functions that are made from now on to plain Theano; those that were made before stay as they are."""
    EnabledFunctions.in_force = None


@functools.lru_cache(None)
def _attach_once():
    theano_functions.after_each_function(_attach, first=True)
    theano_functions.divide_copies()


def _attach(function, arguments):
    if EnabledFunctions.in_force is not None:
        EnabledFunctions.in_force.attach(function, arguments)
    elif arguments['updates'] and theano_functions.is_of_user(arguments):
        rank_process.note_alone(function.mgpu_name)
    return EnabledFunctions.in_force is not None


class EnabledFunctions(Enabled):
    """The arguments of an `enable` of Theano functions; ``contexts()`` returns the list of Context to run over."""

    in_force: EnabledFunctions | None = None  # the one that takes part in the making of functions at present

    def __init__(self, contexts: Callable[[], Sequence[Context]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.contexts, self._tell_once = contexts, functools.lru_cache(None)(self.tell)

    def attach(self, function: Any, arguments: dict[str, Any]) -> None:
        """Run a new function, with its arguments of `theano.function`, over the contexts, if it may have a batch.
        """
        note_updates(function)
        if not theano_functions.is_of_user(arguments):
            return
        usage = self.report.usage(function.mgpu_name)
        graph = theano_functions.graph_of(function)
        keep_alike(function, usage.name)
        placed, has_samples = is_placed(graph), may_have_samples(function, arguments, graph)
        obstacle = _obstacle(function, arguments, placed, has_samples)
        if obstacle == OWN_SAMPLES:
            self._tell_once('with --sharded (mgpu.data=sharded) each process has samples of its own: Theano functions '
                            'are not divided, and each process computes its own results. Use mgpu.function, or leave '
                            'out --sharded')
        if not obstacle and not placed:
            # Where a batch may enter, a device that cannot be opened is an error, whether or not this function uses it.
            if has_samples and has_one_cpu(self.contexts()) and not self.always:
                obstacle = ONE_CPU
            elif not has_samples and known_as_cpu():
                obstacle = NO_BATCH
        if obstacle:
            usage.run_on([], obstacle)
            if placed:
                self.tell(NOT_PLACED % (usage.name, obstacle))
        else:
            Found(self, function, usage, has_samples, placed=placed)
        record(function, arguments, usage.name, choose_ranks(None))
        if leases.is_child() and arguments['params']:
            count_calls(function)


def has_one_cpu(contexts: Sequence[Any]) -> bool:
    """Return whether there is nothing to divide among."""
    kinds = [getattr(context, 'kind', None) for context in contexts]  # none for a list of contexts
    return kinds == ['cpu'] and choose_ranks(None).size == 1 and not Flags.now().divides_always


def may_have_samples(function: Any, arguments: dict[str, Any], graph: Sequence[theano.Variable]) -> bool:
    """Return whether a batch may enter a function: as an argument, by the number of a slice, or as a data set."""
    given = [spec.variable for spec, _ in explicit_inputs(function)]
    return any(getattr(v, 'ndim', 0) or getattr(v, 'dtype', None) in discrete_dtypes for v in given) or \
        has_data(graph) or bool(chains(first_of_each(arguments['updates'])))


def _obstacle(function, arguments, placed, has_samples):
    """Return why the arguments of a `theano.function` exclude contexts; None if they do not."""
    if arguments['profile'] or theano.config.profile:
        return PROFILED
    if type(theano.compile.get_mode(arguments['mode'])) is not theano.Mode:
        return 'its mode checks each op'
    if theano_functions.lends_memory(function):
        return LENT
    if (has_samples or placed) and Flags.now().is_sharded(choose_ranks(None).size):
        return OWN_SAMPLES
    return None


if mpi_environment.trains_together():
    _attach_once()  # for the note of a function that the ranks do not divide
