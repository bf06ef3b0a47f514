"""Failures of replicas as errors that name the replica, with advice where a device lacks memory, or is lost."""
from __future__ import annotations

import re
from typing import Sequence

from ..errors import NOT_DIVISIBLE, BatchError, ReplicaError, noted
from .context_map import Context, describe
from .contexts import contexts as active_contexts
from .contexts import gpu_context, is_lost
from .discovery import reason

# The texts of drivers, and of Theano's own ops, for too little memory on a device.
OUT_OF_MEMORY = re.compile('CUDA_ERROR_OUT_OF_MEMORY|CL_MEM_OBJECT_ALLOCATION_FAILURE|CL_OUT_OF_RESOURCES|'
                           'Invalid buffer size|out of memory|(fail|could not|can ?not|unable)[a-z ]* alloc', re.I)


def error_of(cause: BaseException, replica: int, context: Context, task: str,
             contexts: Sequence[Context] = (), samples: tuple[int, int] | None = None) -> BaseException:
    """Return the error to raise for an exception of a replica.

    An error of the graph (an Assert, a wrong shape, an op of the user's) is raised as it is, as plain Theano does, with
    a note that names the replica. An error of the device becomes a ReplicaError, with advice. A check of the analysis,
    that the batch can be divided, becomes a BatchError.
    """
    if isinstance(cause, ReplicaError):  # it has the name of a replica, maybe of another one
        return cause
    where = 'samples %d to %d' % (samples[0], samples[1] - 1) if samples else task
    failed = 'replica %d (context %s, %s) failed, nothing was changed' % (replica, describe([context]), where)
    error: BaseException
    if isinstance(cause, AssertionError) and str(cause).startswith(NOT_DIVISIBLE):
        error = BatchError('%s: %s' % (failed, str(cause).partition('\n')[0]))
    elif context.kind != 'cpu' and (type(cause).__module__.partition('.')[0] == 'pygpu' or is_lost(context) or
                                    type(cause) in (MemoryError, RuntimeError) or is_out_of_memory(cause, context)):
        error = ReplicaError('%s: %s: %s%s' % (failed, type(cause).__name__, reason(cause).strip().partition('\n')[0],
                                               advice(cause, context, contexts)), replica, context, samples,
                             is_out_of_memory(cause, context))
    else:
        return noted(cause, failed)
    error.__cause__ = cause
    return error


class FailureExplained:
    """A ``with`` block in which the error of a device that lacks memory, or is lost, becomes a ReplicaError.

    It is a class, since contextlib's generators take twice as long, several times a step.
    """

    __slots__ = '_arguments',

    def __init__(self, replica: int, context: Context, task: str, contexts: Sequence[Context] = ()):
        self._arguments = replica, context, task, contexts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, cause, trace) -> None:
        context = self._arguments[1]
        if isinstance(cause, Exception) and (is_out_of_memory(cause, context) or is_lost(context)):
            raise error_of(cause, *self._arguments) from cause


def is_out_of_memory(cause: BaseException, context: Context) -> bool:
    """Return whether a device has failed because it has too little free memory."""
    return context.kind != 'cpu' and bool(OUT_OF_MEMORY.search(reason(cause)))


def advice(cause: BaseException, context: Context, contexts: Sequence[Context] = ()) -> str:
    """Return advice for a device that is lost, or out of memory: the end of a message, or nothing."""
    if is_lost(context):
        others = describe([other for other in contexts if other is not context])
        return ('. %s has failed for good in this process%s. Start again from a checkpoint%s'
                % (context.device,
                   '; the values on %s are those before this step, and can be saved' % others if others else '',
                   ', without it if it fails again: contexts=' + others if others else ''))
    if not is_out_of_memory(cause, context):
        return ''
    other = next((each.name for each in active_contexts() if each.name != context.name), 'dev1')
    device = gpu_context(context)
    return ('. %s has %d MiB of memory, of which %d MiB are free now. To need less: give smaller batches; or have them '
            "computed in slices, by micro_batches=2 or more; or divide the state of the updates among the devices, by "
            "update_on='sharded' (flag mgpu.update_on), or keep it on the host, by update_on='host'; or build a part "
            'of the model in a block of "with mgpu.device(%r):", so that it is on another device, and pass '
            'recompute=True if that is not enough'
            % (context.device, device.total_gmem >> 20, device.free_gmem >> 20, other))
