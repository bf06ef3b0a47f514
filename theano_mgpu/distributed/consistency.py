"""What the processes of a job exchange so that all do the same: which batch it is, sums over it, and results."""
import zlib

import numpy as np

from ..errors import BatchError, RankBatchError, RankError
from ..replicas.transfers import FlatBuffers, describe
from ..utils.checksums import checksum, sampled_checksum
from .process_group import ADD, CALL, COMPARE

COMPARED = 256  # calls of a function that each rank computes whole, after which the ranks compare its results


def added(ranks, arrays):
    """The sums over the ranks of small arrays, in one exchange a dtype.

    Parameters
    ----------
    ranks : Ranks
    arrays : list of ndarray
        Of the same shapes and dtypes on each rank.

    Returns
    -------
    list of ndarray
    """
    if ranks.size == 1 or not arrays:
        return arrays
    buffers = FlatBuffers(describe(arrays))
    for view, array in zip(buffers.views, arrays):
        view[...] = array
    ranks.meet((ADD,))
    ranks.all_reduce(buffers.flat)
    return buffers.views


def arrays_of_first(ranks, arrays, error=None):
    """Arrays as rank 0 has them, on every rank; the others need not know how many there are.

    Parameters
    ----------
    ranks : Ranks
    arrays : list of ndarray
        On rank 0.
    error : Exception, optional
        On rank 0, that there are none: raised on every rank.
    """
    def description():
        if error is not None:
            raise error
        return describe(arrays)

    described = ranks.by_first(description)
    if ranks.rank:
        arrays = [np.empty(shape, dtype) for shape, dtype in described]
    return ranks.broadcast(arrays)


def meet_for_batch(function, length, values):
    """Make sure that every rank works on the same step, and learn how many samples each was given.

    Parameters
    ----------
    function : DataParallel
    length : int
        Samples that this rank was given; 0 if its data has ended.
    values : list of ndarray or None
        The arguments.

    Returns
    -------
    list of int
        One a rank; in a process alone, its own.

    Raises
    ------
    RankError, BatchError
        If the ranks were given different batches, or had their variables set to different values.
    """
    ranks, sharded = function.ranks, function.sharded
    if ranks.size == 1:
        return [length]
    touched = [variable for variable in function.replicated() if variable.touched]
    alike = [value for value, split in zip(values or [], function.arguments.split) if not (sharded and split)]
    ours = [length, checksum([variable.checksum() for variable in touched]), sampled_checksum(alike)]
    found = ranks.meet((CALL, function.number, function.calls), ours)
    lengths, of_variables, of_values = found.T
    if sharded:
        _check_equal(ranks, np.where(lengths, of_values, of_values[np.argmax(lengths)]), RankBatchError,
                     'the ranks were given different values of inputs that have no samples', 'checksum %d',
                     'Call with the same values on every rank, such as the index of a slice; a rank whose data has '
                     'ended calls join() of the function')
    else:
        _check_equal(ranks, lengths, RankBatchError, 'the ranks were given batches of different lengths', '%d samples',
                     "Give each rank the whole batch, or set mgpu.data=sharded if each has its own part")
        _check_equal(ranks, of_values, RankBatchError, 'the ranks were given different batches of %d samples' % length,
                     'checksum %d', 'Shuffle and augment with the same seed on every rank, or set mgpu.data=sharded if '
                     'each has its own data')
    _check_equal(ranks, of_variables, RankError, 'variables have different values on different ranks since the last '
                 'step, among those that were set (here: %s)' % (', '.join(str(v.variable) for v in touched) or 'none'),
                 'checksum %d', 'Set the same values on every rank')
    for variable in touched:
        variable.touched = False
    return lengths.tolist()


class ComparedFunction:
    """A function that each rank calls by itself with the same arguments. The ranks compare its results now and then.

    They do so after 1, 2, 4, ..., `COMPARED` calls, after each `COMPARED` further ones, and by `compare`.

    Parameters
    ----------
    function : callable
        ``function(inputs)`` returns a list whose first item is a number, such as a loss.
    ranks : Ranks
    number : int
        Of a function over these ranks, for messages.

    Raises
    ------
    BatchError
        If the ranks have computed different numbers.
    Exception
        The error of the function, also where it has failed on another rank alone. This one may have computed some more
        batches by then.
    """

    def __init__(self, function, ranks, number):
        self._function, self._ranks, self._number = function, ranks, number
        self._calls = self._compared = self._checksum = 0

    def __call__(self, inputs):
        self._calls += 1
        try:
            results = self._function(inputs)
        except BaseException as error:
            common = self._ranks.common_error(error)
            if common is error:
                raise
            raise common
        self._checksum = zlib.crc32(np.asarray(results[0]).tobytes(), self._checksum)
        if self._calls % COMPARED == 0 or self._calls < COMPARED and not self._calls & (self._calls - 1):
            self.compare()
        return results

    def compare(self):
        """Compare what has not been compared yet. Every rank has to make the call."""
        if self._compared == self._calls:
            return
        self._compared = self._calls
        found = self._ranks.meet((COMPARE, self._number, self._calls), [self._checksum])[:, 0]
        _check_equal(self._ranks, found, BatchError, 'each rank has computed whole batches by itself, and the losses '
                     'differ', 'checksum %d', 'Shuffle and augment with the same seed, and set the same values, on '
                     'every rank; or set mgpu.data=sharded if each has its own data. With always=True (run --always) '
                     'each batch is divided, and compared before')


def _check_equal(ranks, numbers, error, text, form, remedy):
    if (numbers != numbers[0]).any():
        each = ', '.join('%s %s' % (ranks.name(rank), form % number) for rank, number in enumerate(numbers))
        raise error('%s: %s. %s' % (text, each, remedy))
