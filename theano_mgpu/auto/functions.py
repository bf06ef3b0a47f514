"""Functions of Theano under `enable`: each new one runs over the contexts, where that is exact and faster."""
from __future__ import annotations

import functools
from typing import Any, Sequence

import theano
from theano.tensor.basic import discrete_dtypes

from ..comm.mpi import choose_ranks
from ..devices import leases
from ..devices.contexts import known_as_cpu
from ..graph import theano_functions
from ..graph.graph import n_axes
from ..graph.placement.propagation import is_placed
from ..graph.updates import first_of_each
from ..options import Flags
from ..utils import mpi_environment, rank_process
from .data_sets import chains, has_data, note_updates
from .enabled import Enabled
from .found import NO_BATCH, NOT_PLACED, PROFILED, FoundBatch
from .function_call import explicit_inputs
from .function_hooks import count_calls, record
from .rank_0_function import keep_alike

LENT = 'an output is memory of a shared variable (borrow=True), which the script may edit'
OWN_SAMPLES = 'each process has samples of its own: use mgpu.function, which adds over processes'
ONE_CPU = 'there is one context, on the CPU'


@functools.lru_cache(None)
def divide_functions() -> None:
    """Have each new `theano.function` divided while an `enable` is in force."""
    theano_functions.after_each_function(_attach, first=True)
    theano_functions.divide_copies()


def _attach(function, arguments):
    if Enabled.in_force is not None:
        attach(Enabled.in_force, function, arguments)
    elif arguments['updates'] and theano_functions.is_of_user(arguments):
        rank_process.note_alone(function.mgpu_name)
    return Enabled.in_force is not None


def attach(enabled: Enabled, function: Any, arguments: dict[str, Any]) -> None:
    """Run a new function, with its arguments of `theano.function`, over the contexts, if it may have a batch."""
    note_updates(function)
    if not theano_functions.is_of_user(arguments):
        return
    usage = enabled.report.usage(function.mgpu_name)
    graph = theano_functions.graph_of(function)
    keep_alike(function, usage.name)
    placed, has_samples = is_placed(graph), may_have_samples(function, arguments, graph)
    obstacle = _obstacle(function, arguments, placed, has_samples)
    if obstacle == OWN_SAMPLES:
        enabled.tell_once('with --sharded (mgpu.data=sharded) each process has samples of its own: Theano functions '
                          'are not divided, and each process computes its own results. Use mgpu.function, or leave '
                          'out --sharded')
    if not obstacle and not placed:
        # Where a batch may enter, a device that cannot be opened is an error, whether or not this function uses it.
        if has_samples and has_one_cpu(enabled.contexts()) and not enabled.always:
            obstacle = ONE_CPU
        elif not has_samples and known_as_cpu():
            obstacle = NO_BATCH
    if obstacle:
        usage.run_on([], obstacle)
        if placed:
            enabled.tell(NOT_PLACED % (usage.name, obstacle))
    else:
        FoundBatch(enabled, function, usage, has_samples, placed=placed)
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
    return any(n_axes(v) or getattr(v, 'dtype', None) in discrete_dtypes for v in given) or \
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
    divide_functions()  # for the note of a function that the ranks do not divide
