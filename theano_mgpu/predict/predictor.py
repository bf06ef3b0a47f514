"""`mgpu.Predictor`: inference with one graph on several devices, batch after batch."""
from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
import theano

from ..checks.ranks import check_lengths
from ..comm.activities import BATCHES, CALL
from ..comm.collectives import broadcast_object
from ..comm.communicator import Communicator
from ..comm.failures import failing_together
from ..comm.mpi import choose_ranks
from ..devices.context_map import Context, describe
from ..devices.contexts import check_process
from ..devices.discovery import reason
from ..errors import BatchError, MgpuError, PredictionError, RankError, named, warn
from ..runtime.batches.arguments import converted
from ..runtime.batches.prefetch import PeekableBatches
from ..runtime.batches.sub_batches import Rows, batch_length
from ..runtime.replicas.replicated import replicated
from ..utils import mpi_environment, progress
from .groups import Group, grouped, groups_of, split_rows
from .inference import InferenceFunction

BATCH_SIZE = 32


class Predictor:
    """A graph for inference that computes several batches at a time, each device one of them.

    Consecutive batches, one for each device of all processes, are joined and computed by one call of a function as
    `mgpu.function` makes it, if each row of the outputs belongs to one sample. Any other batch is divided by itself, so
    that each has the outputs that one device computes. The graph has the values that its shared variables have when
    the Predictor is made; `refresh` takes over later ones. Use it in a ``with`` block, or `close` it, to free its
    memory.

    With several processes that mpirun started, rank 0 reads the batches, sends them to all ranks, and has the outputs
    in order; every rank makes the same calls. With ``mgpu.data=sharded`` each process works by itself.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, except scalars and those named in `broadcast`.
    outputs : theano.Variable or list of theano.Variable
    contexts : list of str, or list of lists of str, optional
        As for `mgpu.function`; all by default.
    replicas_per_context : int
        Deprecated; it has no effect.
    prefetch : int
        0 keeps it from reading the next batches, one for each device, and sending them while devices compute.
    broadcast, givens, executor, mode, name, allow_input_downcast
        As for `mgpu.function`.

    Attributes
    ----------
    contexts : list of Context
    replicas : list of tuple of Context
        The contexts of each replica: one, unless the graph is placed on several.

    Raises
    ------
    GraphError, ContextError, ValueError
        If the graph cannot be run on the contexts; if each call changes what the next one computes; if a number is too
        small.

    Notes
    -----
    Each batch draws the random numbers that plain Theano draws for one batch after the other. The streams of the graph
    itself do not advance.

    Examples
    --------
    >>> import numpy as np
    >>> import theano_mgpu, theano.tensor as T
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> x = T.dmatrix('x')
    >>> with Predictor([x], x.sum(axis=1), mode='FAST_COMPILE') as predictor:
    ...     predictor.predict(np.ones((3, 2)), batch_size=2)
    ...     list(predictor.map(np.ones((n, 2)) for n in (1, 2)))
    array([2., 2., 2.])
    [array([2.]), array([2., 2.])]
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: theano.Variable | Sequence[theano.Variable],
                 contexts: Sequence[Any] | None = None, replicas_per_context: int = 1, prefetch: int = 2,
                 broadcast: Sequence[theano.Variable | str] = (), givens: Any = None, executor: str | None = None,
                 mode: Any = None, name: str | None = None, allow_input_downcast: bool | None = None) -> None:
        self._is_active, self._calls = False, 0
        check_numbers(replicas_per_context=replicas_per_context, prefetch=prefetch)
        if replicas_per_context > 1:
            warn('replicas_per_context=%d (replicas_per_gpu) has no effect any more, since a device is sent the next '
                 'batch while it computes: leave it out' % replicas_per_context)
        self._single = not isinstance(outputs, (list, tuple))
        self._name, self._prefetch = name or 'a Predictor', prefetch
        if theano.config.mgpu.data == 'sharded' and mpi_environment.size() > 1:
            executor = 'threads'
        self._ranks: Communicator = choose_ranks(executor)
        self._function: Any = InferenceFunction(
            inputs, [outputs] if self._single else outputs, givens, broadcast, contexts=contexts, executor=executor,
            mode=mode, name=name or 'predict', allow_input_downcast=allow_input_downcast)
        self.inputs, self._split = self._function.arguments.inputs, self._function.arguments.split
        self.contexts: list[Context] = list(self._function.contexts)
        self.replicas = list(self._function.mesh.replicas)
        self._variables = list(map(replicated, self._function.variables))
        self._note_weights()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free its memory."""
        self._function = self._weights = None
        self.contexts, self.replicas = [], []

    def refresh(self) -> None:
        """Take over the values that the shared variables have now, for batches that are computed from now on."""
        self._note_weights()
        self._weights = [variable.value() for variable in self._variables]

    def _note_weights(self):
        self._weights: Any = None  # those that the function does not have yet
        self._versions = [variable.version for variable in self._variables]
        self._has_warned = False

    def predict(self, *arrays: Any, batch_size: int | None = None, verbose: int = 0) -> Any:
        """Compute the outputs of all samples.

        Parameters
        ----------
        *arrays : array_like
            One for each input, all of the same length; arrays on disk (`numpy.memmap`, h5py) are read batch by batch.
        batch_size : int, optional
            Samples that a device works on at a time, 32 by default.
        verbose : {0, 1}
            1 shows a progress bar.

        Returns
        -------
        ndarray, or list of ndarray
            One row for each sample, in order; a list if `outputs` is one. With several ranks, each gets all rows.

        Raises
        ------
        PredictionError
            If a batch fails; its ``index`` says which.
        BatchError, ValueError
            If the arrays have different lengths, or `batch_size` is not positive.
        """
        self._check_use()
        batch_size = chosen_batch_size(batch_size)
        values = self._by_input(arrays)
        sampled = [(len(value), named(v)) for value, v, split in zip(values, self.inputs, self._split) if split]
        length = batch_length([length for length, _ in sampled], [name for _, name in sampled], least=0)
        rows = self._rows_of(values, length, batch_size, verbose)
        return rows[0] if self._single else rows

    def map(self, batches: Iterable[Any], on_error: str = 'raise') -> Iterator[Any]:
        """Compute one batch after the other.

        Parameters
        ----------
        batches : iterable
            Arrays; for several inputs lists or tuples of arrays, or dicts by the inputs' names. May be endless. What an
            iterator yields is copied: it may fill the same arrays again.
        on_error : {'raise', 'yield'}
            What to do with the error of a batch: raise it, or yield it in place of the outputs, and continue.

        Returns
        -------
        iterator of ndarray, or of list of ndarray
            The outputs of each batch, in the order of the batches, or a PredictionError. With several ranks, rank 0
            reads `batches` and yields the outputs; the others only compute.

        Raises
        ------
        PredictionError
            If a batch fails; its ``index`` says which.
        ValueError
            If `on_error` is neither of these.
        """
        if on_error not in ('raise', 'yield'):
            raise ValueError("on_error=%r is neither 'raise' nor 'yield'" % (on_error,))
        self._check_use()
        if hasattr(batches, '__next__'):  # it may fill its arrays again, while the batches that were read ahead wait
            batches = map(copy.deepcopy, batches)
        return self._map(self._grouped(batches), on_error)

    def _grouped(self, batches: Iterable[Any]) -> Iterator[Group]:
        """Return batches in groups, as they are read."""
        return grouped(map(self._read, itertools.count(), batches), self._split, self._function.n_replicas,
                       self._function.joins)

    def _read(self, index, batch):
        """Return the arrays of a batch, or a PredictionError."""
        try:
            return self._by_input(self._members(batch))
        except Exception as cause:
            error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
            error.__cause__ = cause
            return error

    def _map(self, groups, on_error):
        """Yield the outputs of each batch of some groups; other ranks than rank 0 compute the groups that it has."""
        self._begin()
        try:
            if self._ranks.rank:
                for group in iter(self._shared, None):
                    self._computed(group)
                return
            source = PeekableBatches(groups)
            for group in source:
                for outputs in [group.error] if group.error else self._computed(self._shared(group), source.peek):
                    if isinstance(outputs, PredictionError) and on_error == 'raise':
                        raise outputs
                    yield outputs if isinstance(outputs, PredictionError) or not self._single else outputs[0]
                    self._check_open()  # the caller may have closed it meanwhile
        finally:
            self._is_active = False
            if not self._ranks.rank and not self._ranks.lost:
                self._shared(None)

    def _shared(self, group: Group | None = None) -> Group | None:
        """Return on each rank the group of rank 0, None after the last one, with rank 0's weights in the function."""
        weights, group = broadcast_object(self._ranks, (self._weights, group), activity=BATCHES)
        if weights is not None:
            self._function.take(weights)
        self._weights = None
        return group

    def _computed(self, group: Group, following: Callable[[], Group | None] | None = None) -> list[Any]:
        """Return the outputs of each batch of a group, or its PredictionError."""
        function = self._function
        try:
            if not sum(group.lengths):
                return [self._of_no_samples(group)]
            ahead = following if self._prefetch and function.executable.on_devices else None
            outputs = function.compute(group, ahead or (lambda: None))
            return [outputs] if len(group.lengths) == 1 else split_rows(outputs, group.lengths)
        except RankError:
            raise
        except Exception as error:
            if len(group.lengths) > 1:  # to know which of them fails
                return [outputs for one in group.apart(self._split) for outputs in self._computed(one)]
            failed = PredictionError('batch %d failed on context %s: %s: %s' % (
                group.first, describe(function.contexts), type(error).__name__,
                reason(error).strip().partition('\n')[0]), group.first, function.contexts[0])
            failed.__cause__ = error
            return [failed]

    def _of_no_samples(self, group):
        """Return the outputs of an empty batch, which BLAS and convolutions refuse: no row of those of zeros."""
        zeros = [np.zeros((1,) + tuple(array.shape[1:]), array.dtype) if split else array
                 for array, split in zip(group.arrays, self._split)]
        rows = Rows(1)
        rows.add(self._function.compute(group._replace(arrays=zeros, lengths=[1]), lambda: None))
        return [array[:0] for array in rows.arrays()]

    def _begin(self):
        """Begin a call; several ranks do it one after the other."""
        self._check_open()
        if self._ranks.size > 1:
            if self._is_active:
                raise MgpuError('several ranks run one map at a time: exhaust the first one, or close() it')
            self._is_active = True

    def _check_open(self):
        if self._function is None:
            raise MgpuError('this Predictor is closed: use it within its with block, or make another one')

    def _check_use(self):
        """Check as `_check_open`; and warn the user, once, if shared variables have changed."""
        self._check_open()
        if not self._has_warned and self._versions != [variable.version for variable in self._variables]:
            self._has_warned = True
            warn('the values of shared variables have changed since this Predictor took them over; it keeps using the '
                 'old ones until refresh() is called')

    def _by_input(self, arrays: Any) -> list[Any]:
        """Return arrays, a list or a dict, in the order of the inputs; a BatchError unless there is one for each."""
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            text = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: pass one for each' % (text, names))
        return [array if hasattr(array, 'shape') else
                converted(variable, array, self._function.options.allow_input_downcast)
                for array, variable in zip(arrays, self.inputs)]

    def _members(self, batch):
        """Return the arrays of one batch; Keras's Predictor has a method of its own."""
        return batch if isinstance(batch, (list, tuple, dict)) else [batch]

    def _rows_of(self, arrays, length, batch_size, verbose):
        """Return the outputs for arrays with `length` samples, which may be 0."""
        function = self._function
        return self._rows(groups_of(arrays, self._split, length, batch_size, function.n_replicas, function.joins),
                          length, verbose)

    def _rows(self, groups, length, verbose, n_batches=None):
        """Return the outputs of all groups together, one array for each output; the same on each rank."""
        lengths = self._ranks.handshake((CALL, self._function.built.number, self._calls), [length or 0])[:, 0]
        self._calls += 1
        check_lengths(self._ranks, self._name, lengths)
        with failing_together(self._ranks):
            return broadcast_object(self._ranks, self._collect(groups, length, verbose, n_batches))

    def _collect(self, groups, length, verbose, n_batches):
        rows = Rows(length)
        with progress.bar(length, verbose and not self._ranks.rank) as bar, \
                contextlib.closing(self._map(groups, 'raise')) as in_order:
            for outputs in in_order:
                added = rows.add([outputs] if self._single else outputs)
                if bar.total is None and n_batches:
                    bar.total = added * n_batches
                bar.update(added)
            bar.total = len(rows)
            bar.refresh()
        return rows.arrays() if not self._ranks.rank else None


def check_numbers(**numbers: Any) -> None:
    """Raise a ValueError for an argument that is too small, or not a whole number."""
    for name, number in numbers.items():
        least = 0 if name == 'prefetch' else 1
        if isinstance(number, bool) or not hasattr(number, '__index__') or number < least:
            raise ValueError('%s=%r: give a whole number, at least %d' % (name, number, least))


def chosen_batch_size(batch_size: int | None) -> int:
    """Return the `batch_size` of `predict`, or its default; raise a ValueError if it is not a number of samples."""
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    check_numbers(batch_size=batch_size)
    return batch_size
