"""`mgpu.Predictor`: inference with one graph on several devices, batch after batch."""
from __future__ import annotations

import contextlib
import copy
import pickle
import time
import warnings
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
import theano

from ..checks.ranks import check_lengths, take_values_of_first
from ..comm.activities import CALL, FEED
from ..comm.collectives import all_gather_object, broadcast_object
from ..comm.communicator import Communicator
from ..comm.compilation import first_compiler
from ..comm.mpi import choose_ranks
from ..comm.rank_errors import failing_together
from ..devices.context_map import Context, describe
from ..devices.contexts import contexts as active_contexts
from ..devices.discovery import reason
from ..errors import BatchError, MgpuError, PredictionError, named, warn
from ..graph.random_streams import is_random_state
from ..options import Flags
from ..runtime.batches.arguments import converted
from ..runtime.batches.prefetch import PeekableBatches
from ..runtime.batches.sub_batches import JoinedOutputs, batch_length
from ..runtime.consensus import check_same_graph
from ..runtime.replicas.replicated import replicated
from ..utils import mpi_environment, progress
from .groups import Group, grouped, groups_of, read_ahead, split_rows
from .inference import InferenceFunction

BATCH_SIZE = 32
ROUND = 0.05  # seconds of a round of all ranks, where batches are small: the exchanges take some, too


class Predictor:
    """A graph for inference that computes several batches at a time, each device one of them.

    Consecutive batches, one for each device, are joined and computed by one call of a function as `mgpu.function`
    makes it, if each row of the outputs belongs to one sample. Any other batch is divided by itself. So each batch has
    the outputs that one device computes. The graph has the values that its shared variables have when the Predictor is
    made; `refresh` takes over later ones. Use it in a ``with`` block, or `close` it, to free its memory.

    With several processes that mpirun started, rank 0 reads the batches, sends them to all ranks, each of which
    computes some, and has the outputs in order; every rank makes the same calls. With ``mgpu.data=sharded`` each
    process works by itself.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, except scalars and those named in `broadcast`.
    outputs : theano.Variable or list of theano.Variable
    contexts : list of str, or list of lists of str, optional
        As for `mgpu.function`; all by default.
    replicas_per_context : int
        It has no effect.

        .. deprecated:: 0.2.0
    prefetch : int
        0 keeps it from reading the next batches, one for each device, and sending them while devices compute.
    broadcast, givens, mode, name, allow_input_downcast
        As for `mgpu.function`.
    executor : {'auto', 'serial', 'threads', 'mpi'}, optional
        The flag ``mgpu.executor`` by default. With several processes, 'serial' and 'threads' keep this process to
        itself.

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
    Batches draw the random numbers that plain Theano draws for one batch after the other, from copies of the random
    streams, for any number of devices. With several processes, each computes all batches of such a graph.

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
            warnings.warn('replicas_per_context=%d (replicas_per_gpu) has no effect any more, since a device is sent '
                          'the next batch while it computes. Leave it out: 0.4.0 removes it' % replicas_per_context,
                          FutureWarning, stacklevel=1)
        self._single = not isinstance(outputs, (list, tuple))
        self._name, self._prefetch = name or 'a Predictor', prefetch
        outputs = [outputs] if self._single else outputs
        sharded = Flags.now().data == 'sharded' and mpi_environment.size() > 1
        self._ranks: Communicator = choose_ranks('threads' if sharded else executor)
        on_cpu = all(context.kind == 'cpu' for context in active_contexts())
        with first_compiler(self._ranks):  # a rank computes whole batches, so its function is its own
            function = InferenceFunction(
                inputs, outputs, givens, broadcast, contexts=contexts, mode=mode, name=name or 'predict',
                executor=executor if self._ranks.size == 1 and not sharded else 'serial' if on_cpu else 'threads',
                allow_input_downcast=allow_input_downcast)
        check_same_graph(self._ranks, inputs, function.built.definition.outputs,
                         list(function.copies.values()))
        self._number, self._in_round = self._ranks.add_function(name or 'predict'), self._ranks.size
        self._function: Any = function
        self.inputs, self._split = function.arguments.inputs, function.arguments.split
        self.contexts: list[Context] = list(function.contexts)
        self.replicas = list(function.mesh.replicas)
        self._variables = {variable: replicated(variable) for variable in function.copies
                           if not is_random_state(variable)}
        if self._ranks.size > 1:
            take_values_of_first(self._ranks, map(replicated, function.copies.values()))
        self._note_weights(None)

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
        self._note_weights([variable.value() for variable in self._variables.values()])

    def _note_weights(self, weights):
        self._weights: Any = weights  # those that the function does not have yet, or None
        self._versions = [variable.version for variable in self._variables.values()]
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
        return self._map(self._grouped(batches), on_error)

    def _grouped(self, batches: Iterable[Any]) -> Iterator[Group]:
        """Return batches in groups, as they are read."""
        is_iterator = hasattr(batches, '__next__')  # it may fill its arrays again, while batches wait for others
        return grouped((self._read(index, batch, is_iterator) for index, batch in enumerate(batches)), self._split,
                       self._function.n_replicas, self._function.joins)

    def _read(self, index, batch, is_copied):
        """Return the arrays of a batch, or copies of them, or a PredictionError."""
        try:
            arrays = self._by_input(self._members(batch))
            return [np.array(array) if type(array) is np.ndarray else copy.deepcopy(array) for array in arrays] \
                if is_copied else arrays
        except Exception as cause:
            error = PredictionError('batch %d failed: %s: %s' % (index, type(cause).__name__, cause), index)
            error.__cause__ = cause
            return error

    def _map(self, groups, on_error):
        """Yield the outcome of each batch of some groups: of rank 0, where there are several ranks."""
        self._begin()
        try:
            while self._ranks.rank:
                if self._round([]) is None:
                    return
            outcomes = self._alone(groups) if self._ranks.size == 1 else self._in_rounds(groups)
            with contextlib.closing(outcomes):
                for outputs in outcomes:
                    if isinstance(outputs, PredictionError) and on_error == 'raise':
                        raise outputs
                    yield outputs if isinstance(outputs, PredictionError) or not self._single else outputs[0]
                    self._check_open()  # the caller may have closed it meanwhile
        finally:
            self._is_active = False

    def _alone(self, groups):
        """Yield the outcomes of groups; while devices compute one, the next one is read and sent to them."""
        source: Any = PeekableBatches(groups)
        ahead = source.peek if self._prefetch and self._function.executable.on_devices else lambda: None
        for group in source:
            self._take(self._weights)
            yield from self._computed(group, ahead)

    def _in_rounds(self, groups):
        """Yield the outcomes of groups, on rank 0; every rank computes some of them."""
        error = None
        try:
            while error is None:
                read, error = read_ahead(groups, self._in_round)
                if read:
                    outcomes, seconds = self._round(read)
                    self._in_round = max(self._ranks.size, min(2 * self._in_round, int(len(read) * ROUND / seconds)))
                    yield from outcomes
            if not isinstance(error, StopIteration):
                raise error
        except KeyboardInterrupt:
            self._ranks.lost = 'a prediction was interrupted'
            raise
        finally:
            if not self._ranks.lost:
                self._round([])

    def _round(self, read):
        """Compute groups of rank 0, and return their outcomes, and the seconds of the slowest rank; None if none."""
        ranks, began = self._ranks, time.perf_counter()
        # In one message: the arrays may be many, and small.
        sent = broadcast_object(ranks, pickle.dumps((self._weights, read), 5) if read else b'', activity=FEED)
        if not sent:
            return None
        weights, read = pickle.loads(sent) if ranks.rank else (self._weights, read)
        self._take(weights)
        is_apart = not self._function.updated  # else each rank computes all groups, so that its random streams go on
        own = [self._computed(group) for group in (read[ranks.rank::ranks.size] if is_apart else read)]
        own = own, time.perf_counter() - began
        every = all_gather_object(ranks, own, (CALL, self._number, self._calls)) if is_apart else [own]
        return [outcome for i in range(len(read)) for outcome in every[i % len(every)][0][i // len(every)]], \
            max(seconds for _, seconds in every)

    def _take(self, weights):
        """Compute with these weights from now on, unless they are None."""
        if weights is not None:
            self._function.take(self._variables, weights)
        self._weights = None

    def _computed(self, group: Group, following: Callable[[], Group | None] = lambda: None) -> list[Any]:
        """Return the outputs of each batch of a group, or its PredictionError."""
        function = self._function
        try:
            if group.error or not sum(group.lengths):
                return [group.error or self._of_no_samples(group)]
            outputs = function.compute(group, following)
            return [outputs] if len(group.lengths) == 1 else split_rows(outputs, group.lengths)
        except Exception as error:
            if len(group.lengths) > 1:  # to know which of them fails
                return [outputs for one in group.apart(self._split) for outputs in self._computed(one)]
            failed = PredictionError('batch %d failed on context %s: %s: %s' % (
                group.first, describe(function.contexts), type(error).__name__,
                reason(error).strip().partition('\n')[0]), group.first, function.contexts[0])
            failed.__cause__ = error
            return [failed]

    def _of_no_samples(self, group):
        """Return the outputs of an empty batch, which BLAS and convolutions refuse, by a sample of zeros."""
        zeros = [np.zeros((1,) + tuple(array.shape[1:]), array.dtype) if split else array
                 for array, split in zip(group.arrays, self._split)]
        rows = JoinedOutputs(1)
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
        if not self._has_warned and self._versions != [variable.version for variable in self._variables.values()]:
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
        lengths = self._ranks.handshake((CALL, self._number, self._calls), [length or 0])[:, 0]
        self._calls += 1
        check_lengths(self._ranks, self._name, lengths)
        with failing_together(self._ranks):
            rows = None
            if self._ranks.rank:
                list(self.map(()))
            else:
                rows = self._collect(groups, length, verbose, n_batches)
            return broadcast_object(self._ranks, rows)

    def _collect(self, groups, length, verbose, n_batches):
        rows = JoinedOutputs(length)
        with progress.bar(length, verbose) as bar, \
                contextlib.closing(self._map(groups, 'raise')) as in_order:
            for outputs in in_order:
                added = rows.add([outputs] if self._single else outputs)
                if bar.total is None and n_batches:
                    bar.total = added * n_batches
                bar.update(added)
            bar.total = len(rows)
            bar.refresh()
        return rows.arrays()


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
