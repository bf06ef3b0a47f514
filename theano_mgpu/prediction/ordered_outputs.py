"""The outputs of batches in their order, whichever replica computes them, and however long each takes."""
import collections
from concurrent.futures import Future

from ..errors import PredictionError


def ordered_outputs(pool, batches, make_job, on_error):
    """Have batches computed.

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
    pending, failure = collections.deque(), None
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
            pending.append(submitted(pool, make_job, index, batch))
            while pending and (len(pending) >= pool.capacity or pool.is_done(pending[0])):
                yield outcome(pool, pending.popleft(), on_error)
        while pending:
            yield outcome(pool, pending.popleft(), on_error)
        if failure is not None:
            raise failure
    finally:
        pool.end(pending)


def submitted(pool, make_job, index, batch):
    """The Future of a batch; if no job can be made of it, the Future has the error."""
    try:
        job = make_job(index, batch)
    except Exception as cause:
        error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
        error.__cause__ = cause
        failed = Future()
        failed.set_exception(error)
        return failed
    return pool.submit(job)


def outcome(pool, future, on_error):
    """The outputs of a batch, or its error."""
    try:
        return pool.result(future)
    except PredictionError as error:
        if on_error == 'raise':
            raise
        return error
