"""Checks that the processes of a job do the same: that they have the same batch, variables and results."""
from __future__ import annotations

import zlib
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..comm.activities import CALL, COMPARE, FEED
from ..comm.collectives import all_gather_object, broadcast_object
from ..comm.communicator import Communicator
from ..comm.rank_errors import raise_common
from ..errors import RankBatchError, RankError, named
from ..utils import rank_process
from ..utils.values import checksum, is_due, sampled_checksum, sides

COMPARED = 256  # calls of a function that each rank computes whole, after which the ranks compare its results


class BatchCheck:
    """A check that the ranks are given the same batch, and have the same variables, in each call of a function.

    Parameters
    ----------
    ranks : Communicator
    number, name
        Of the function; the number is the same on all ranks.
    has_rows : bool
        Whether an output has a row a sample: the rows of rank 0's samples are no answer for fewer, or more, samples.
    of_rank_0 : bool
        Whether all ranks take the arguments of rank 0 where others differ; else a difference is an error.
    inputs : list of theano.Variable
        For messages.
    own : collection of int, optional
        The positions of inputs with samples, if each rank is given samples of its own.
    variables : list of Replicated
        The variables that are the same on each rank.
    activity, calls : int
        For the handshake, see `comm.activities`.

    Attributes
    ----------
    differ : bool
        Whether the ranks have been given different inputs, or have computed different results.
    """

    def __init__(self, ranks: Communicator, number: int, name: str | None, has_rows: bool, of_rank_0: bool = True,
                 inputs: Sequence[Any] = (), own: Sequence[int] | None = None, variables: Sequence[Any] = (),
                 activity: int = CALL, calls: int = 0) -> None:
        self._ranks, self._number, self._name = ranks, number, name or 'a function'
        self._of_rank_0, self._inputs, self._own, self._variables = of_rank_0, inputs, own, variables
        self._has_one_length = own is None and (has_rows or not of_rank_0)
        self._activity, self._calls, self.differ = activity, calls, False
        self._changes = Changes(ranks, variables)

    def __call__(self, length: int, values: Sequence[Any] | None) -> tuple[list[int], Sequence[Any] | None]:
        """Compare a call with the calls of the others; return the samples of each rank, and the arguments to compute.

        Every rank has to make the call. A difference is a RankBatchError or, in variables, a RankError.

        Parameters
        ----------
        length : int
            Samples that this rank was given; 0 if its data has ended. The few elements that are compared do not tell
            the length of large arrays.
        values : list of ndarray or None
            The arguments.
        """
        ranks = self._ranks
        if ranks.size == 1:
            return [length], values
        touched = [variable for variable in self._variables if variable.touched]
        alike = [value for i, value in enumerate(values or ()) if i not in (self._own or ())]
        ours = [length, checksum([checksum(variable.peek()) for variable in touched]), sampled_checksum(alike)]
        lengths, of_variables, of_values = ranks.handshake((self._activity, self._number, self._calls), ours).T
        if self._changes.take():
            return self(length, values)  # what was compared has changed
        if self._has_one_length:
            check_lengths(ranks, self._name, lengths)
        if self._own is not None:
            _check_equal(ranks, np.where(lengths, of_values, of_values[np.argmax(lengths)]),
                         'the ranks were given different values of inputs that have no samples', 'checksum %d',
                         'Call with the same values on every rank, such as the index of a slice; a rank whose data has '
                         'ended calls join() of the function')
        elif (lengths != lengths[0]).any() or (of_values != of_values[0]).any():
            if not self._of_rank_0:
                _check_equal(ranks, of_values, 'the ranks were given different batches of %d samples, which differ in '
                             '%s' % (length, self._differing(values)), 'checksum %d', 'Give each rank the same arrays, '
                             'drawn by one seed; a number that one rank alone draws makes all later ones differ. Or '
                             'set mgpu.data=sharded if each has its own data')
            self.differ = True
            note_difference(self._name)
            values, lengths = broadcast_object(ranks, values, activity=FEED), np.full_like(lengths, lengths[0])
        if (of_variables != of_variables[0]).any():
            raise RankError('ranks have set variables to different values since the last step: %s. Set the same values '
                            'on every rank' % self._differing_variables())
        for variable in touched:
            variable.touched = False
        self._calls += 1
        return lengths.tolist(), values

    def _differing_variables(self):
        """Return in words which ranks have set which variables that others have not set, or to another value."""
        ranks, texts = self._ranks, []
        ours = [{ranks.name(ranks.rank): checksum(variable.value())} if variable.touched else {}
                for variable in self._variables]
        for variable, values in zip(self._variables, gathered(ranks, ours)):
            if 0 < len(values) < ranks.size:
                texts.append('%s on %s alone' % (named(variable.variable), ' and '.join(values)))
            elif len(set(values.values())) > 1:
                usual, others, _ = sides(values)
                texts.append('%s on %s, to another value than on %s' % (
                    named(variable.variable), ' and '.join(others), usual[0]))
        return '; '.join(texts)

    def _differing(self, values):
        """Return the names of the inputs that have other values on other ranks."""
        columns = zip(*all_gather_object(self._ranks, list(map(sampled_checksum, values))))
        return ', '.join(named(variable) for variable, column in zip(self._inputs, columns) if len(set(column)) > 1)


class Changes:
    """The changes of some variables, each a Replicated, that a rank has made alone, see `comm.alone`."""

    def __init__(self, ranks: Communicator, variables: Sequence[Any]) -> None:
        self._ranks, self._variables, self._n_changes = ranks, variables, 0

    def take(self) -> bool:
        """Take rank 0's values of those that any rank has changed since the last call; return whether there are any.

        Every rank has to make the call.
        """
        if self._n_changes == self._ranks.n_changes:
            return False
        self._n_changes = self._ranks.n_changes
        own = [i for i, variable in enumerate(self._variables) if variable.ahead]
        numbers = set().union(*all_gather_object(self._ranks, own))
        take_values_of_first(self._ranks, [self._variables[i] for i in sorted(numbers)])
        return bool(numbers)


def gathered(ranks: Communicator, values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return dicts of values by place with the places of all ranks; every rank has as many dicts."""
    return [{name: value for each in of_ranks for name, value in each.items()}
            for of_ranks in zip(*all_gather_object(ranks, values))]


def note_difference(name: str) -> None:
    """Tell the user, once for each function, that the data of rank 0 count."""
    rank_process.note('%s was given other data on rank 0 than on other ranks: those of rank 0 count, as in one '
                      'process. To send them takes time: draw the same random numbers on each rank, by one seed. If '
                      'each rank has its own part of the data, pass --sharded (flag mgpu.data=sharded)' % name)


class ComparedFunction:
    """A function that each rank calls by itself with the same arguments. The ranks compare its results now and then.

    They do so when it `is_due`, and by `compare`. Where they have computed different numbers, all go on from rank 0's,
    as one process would, and take its inputs from then on: `differ` of `leading` is set.

    An error of the function on one rank is raised on all. Another one may have computed some more batches by then; the
    next call begins with the values of rank 0.

    Parameters
    ----------
    function : callable
        ``function(inputs)`` returns a list whose first item is a number, such as a loss.
    ranks, number
        As for `BatchCheck`.
    variables : callable
        ``variables()`` lists the Replicated of all variables that the function reads or updates.
    leading : BatchCheck
    """

    def __init__(self, function: Callable[[Any], Sequence[Any]], ranks: Communicator, number: int,
                 variables: Callable[[], Iterable[Any]], leading: BatchCheck) -> None:
        self._function, self._ranks, self._number, self._variables = function, ranks, number, variables
        self._leading = leading
        self._begin()

    def _begin(self):
        self._calls = self._compared = self._checksum = 0
        self._failures = self._ranks.n_failures

    def __call__(self, inputs: Any) -> Sequence[Any]:
        try:
            self._catch_up()
            self._calls += 1
            results = self._function(inputs)
            self._checksum = zlib.crc32(np.asarray(results[0]).tobytes(), self._checksum)
            return self.compare(results) if is_due(self._calls, COMPARED) else results
        except BaseException as error:
            raise_common(self._ranks, error)

    def _catch_up(self):
        """Go on from the values of rank 0 after an error: the ranks may have computed different numbers of batches."""
        if self._failures != self._ranks.n_failures:
            self._begin()
            take_values_of_first(self._ranks, self._variables())

    def compare(self, results: Any = None) -> Any:
        """Compare the results that have not been compared yet; every rank has to make the call.

        Return the `results` of the last call, on rank 0 if the ranks had computed different numbers.
        """
        self._catch_up()
        if self._compared == self._calls:
            return results
        self._compared = self._calls
        checksums = self._ranks.handshake((COMPARE, self._number, self._calls), [self._checksum])[:, 0]
        if (checksums == checksums[0]).all():
            return results
        self._begin()
        self._leading.differ = True
        note_difference('a model of short batches, which each rank computes whole,')
        take_values_of_first(self._ranks, self._variables())
        return broadcast_object(self._ranks, results, activity=FEED)


def take_values_of_first(ranks: Communicator, variables: Iterable[Any]) -> None:
    """Set variables, each a Replicated, to the values that rank 0 has."""
    variables = list(variables)
    values = [variable.value() for variable in variables]  # on each rank, since a rank may have but a part of one
    for variable, value in zip(variables, broadcast_object(ranks, values)):
        variable.take(value)


def check_lengths(ranks: Communicator, name: str, lengths: np.ndarray) -> None:
    """Raise a RankBatchError unless all ranks were given batches of one length."""
    _check_equal(ranks, lengths, '%s was given batches of different lengths on the ranks' % name,
                 '%d samples', 'Give each rank the whole batch; or set mgpu.data=sharded if each has its own part, '
                 'mgpu.executor=threads if each works by itself')


def _check_equal(ranks, numbers, text, form, remedy):
    """Raise a RankBatchError that names the number of each rank, unless all are equal."""
    if (numbers != numbers[0]).any():
        each = ', '.join('%s %s' % (ranks.name(rank), form % number) for rank, number in enumerate(numbers))
        raise RankBatchError('%s: %s. %s' % (text, each, remedy))
