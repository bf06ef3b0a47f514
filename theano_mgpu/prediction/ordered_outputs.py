"""The outputs of batches in their order, whichever replica computes them, and however long each takes."""
from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any, Callable, Iterable, Iterator

from ..errors import PredictionError
from .inference_replica import Job


def ordered_outputs(pool: Any, batches: Iterable[Any], make_job: Callable[[int, Any], Job],
                    on_error: str) -> Iterator[Any]:
    """Yield the outputs of batches that a pool computes.

    Parameters
    ----------
    pool : InlinePool, ReplicaPool or RankPool
        Its capacity limits how many batches are read before the outputs of the first one are yielded.
    batches : iterable
    make_job : callable
        ``make_job(index, batch)`` returns a Job.
    on_error : {'raise', 'yield'}
        What to do with the error of a batch.

    Yields
    ------
    list of ndarray, or PredictionError
        As soon as they are there, and before further batches are read.

    Raises
    ------
    PredictionError
        The error of a batch, in place of its outputs.
    Exception
        An error in reading `batches`, after the outputs of the batches before it.
    """
    pending: deque[Any] = deque()
    failure = None

    def first_outcome():
        try:
            return pool.result(pending.popleft())
        except PredictionError as error:
            if on_error == 'raise':
                raise
            return error

    pool.begin()
    try:
        numbered = enumerate(batches)
        while True:
            try:
                index, batch = next(numbered)
            except StopIteration:
                break
            except Exception as error:  # raised below, after the outputs of the batches before it
                failure = error
                break
            pending.append(_submitted(pool, make_job, index, batch))
            while pending and (len(pending) >= pool.capacity or pool.is_done(pending[0])):
                yield first_outcome()
        while pending:
            yield first_outcome()
        if failure is not None:
            raise failure
    finally:
        pool.end(pending)


def _submitted(pool, make_job, index, batch):
    """Submit a batch; return its Future, which has the error if no job can be made of the batch."""
    try:
        job = make_job(index, batch)
    except Exception as cause:
        error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
        error.__cause__ = cause
        failed = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(job)
