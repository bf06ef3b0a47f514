"""`mgpu.Predictor`: inference with one graph on several devices, each with a replica of it."""
from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any, Iterable, Iterator, Sequence

import numpy as np
import theano

from ..checks.ranks import check_lengths
from ..comm.activities import CALL
from ..comm.collectives import all_gather_int, broadcast_object
from ..comm.compilation import first_compiler
from ..comm.failures import failing_together
from ..comm.mpi import choose_ranks
from ..devices.choice import resolve_contexts
from ..devices.context_map import Context
from ..devices.contexts import borrow, check_process, give_back
from ..errors import MgpuError, PredictionError, named, warn
from ..graph.random_streams import jumped
from ..options import Options
from ..runtime.batches.sub_batches import Rows, batch_length
from ..runtime.consensus import check_same_graph
from ..runtime.replicas.replicated import replicated
from ..utils import mpi_environment, progress, rank_process
from .inference_replica import InferenceGraph, InferenceReplica, Job
from .pools import InlinePool, RankPool, ReplicaPool, ordered_outputs, serve

BATCH_SIZE = 32


class Predictor:
    """A graph that computes whole batches on several devices at a time, each on the replica that is free first.

    Its replicas hold the values that the graph's shared variables have when it is made; `refresh` takes over later
    ones. Use it in a ``with`` block, or `close` it, to free its memory.

    With several processes that mpirun started, rank 0 reads the batches, dispatches them to all ranks, and has the
    outputs in order; every rank makes the same calls. With ``mgpu.data=sharded`` each process works by itself.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, except scalars and those named in `broadcast`.
    outputs : theano.Variable or list of theano.Variable
    contexts : list of str, or list of lists of str, optional
        Names of the contexts to run on; all by default. A replica of a graph that `device` places on several contexts
        takes as many of them; which ones, lists say, as for `mgpu.function`.
    replicas_per_context : int
        More than one may keep a large GPU busier if batches are small.
    prefetch : int
        Batches that are read ahead, besides one for each replica. Memory holds no more.
    broadcast, givens, mode, name, allow_input_downcast
        As for `mgpu.function`.
    executor : {'auto', 'serial', 'threads', 'mpi'}, optional
        With several processes, 'serial' and 'threads' keep this process to itself. Within a process each replica
        always has a thread. By default the flag ``mgpu.executor``.

    Attributes
    ----------
    contexts : list of Context
    replicas : list of object

    Raises
    ------
    GraphError, ContextError, ValueError
        If the graph cannot be run on the contexts; if each call changes what the next one computes; if a number is too
        small.

    Notes
    -----
    Each batch draws its own random numbers, the same for any number of replicas. The random streams of the graph do
    not advance.

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
        self._pool: Any = None
        self._is_active, self._calls = False, 0
        self.contexts: list[Context] = []
        self.replicas: list[InferenceReplica] = []
        self._resources = contextlib.ExitStack()
        self._release = weakref.finalize(self, self._resources.close)
        check_numbers(replicas_per_context=replicas_per_context, prefetch=prefetch)
        self._single = not isinstance(outputs, (list, tuple))
        options = Options(broadcast=broadcast, givens=givens, mode=mode, name=name,
                          allow_input_downcast=allow_input_downcast)
        self._graph: Any = InferenceGraph(inputs, [outputs] if self._single else outputs, options)
        self.inputs, self._name = self._graph.inputs, name or 'a Predictor'
        sharded = theano.config.mgpu.data == 'sharded'
        self._ranks = choose_ranks('threads' if sharded and mpi_environment.size() > 1 else executor)
        self._number = self._ranks.add_function(name or 'predict')
        self._variables = list(map(replicated, self._graph.variables))
        self._states = [getattr(stream.tag, 'stands_for', stream).get_value() for stream in self._graph.streams]
        self.refresh()
        self._make_replicas(self._graph.lay_out(resolve_contexts(contexts)), replicas_per_context, prefetch)

    def _make_replicas(self, mesh, replicas_per_context, prefetch):
        graph, wanted = self._graph, mesh.replicas * replicas_per_context
        check_same_graph(self._ranks, graph.inputs, graph.outputs, graph.shared)
        n_replicas = all_gather_int(self._ranks, len(wanted))
        try:
            own = [tuple(map(self._own, row)) for row in wanted]
            with first_compiler(self._ranks):
                graph.compile(mesh._replace(replicas=own), self._weights)
        except BaseException:
            self.close()
            raise
        self.replicas, self._draws = graph.replicas, graph.draws()
        self._pool = ReplicaPool(self.replicas, prefetch)
        self._resources.callback(self._pool.close)
        if self._ranks.size > 1 and self._ranks.rank == 0:
            self._pool = RankPool(self._pool, self._ranks, n_replicas, prefetch)

    def _own(self, context):
        """Return a context like another one, which this Predictor alone uses."""
        self.contexts.append(borrow(context))
        self._resources.callback(give_back, self.contexts[-1])
        return self.contexts[-1]

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its threads, and free its memory and contexts."""
        self._release()
        self._pool = self._graph = None
        self.contexts, self.replicas = [], []

    def refresh(self) -> None:
        """Take over the values that the shared variables have now, for batches that are read from now on."""
        self._versions = [variable.version for variable in self._variables]
        self._weights = [variable.value() for variable in self._variables]
        self._has_warned = False

    def predict(self, *arrays: Any, batch_size: int | None = None, verbose: int = 0) -> Any:
        """Compute the outputs of all samples.

        Parameters
        ----------
        *arrays : array_like
            One for each input, all of the same length; arrays on disk (`numpy.memmap`, h5py) are read batch by batch.
        batch_size : int, optional
            Samples that a replica works on at a time, 32 by default.
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
        values = self._graph.by_input(arrays)
        sampled = [(len(value), named(v)) for value, v, split in zip(values, self.inputs, self._graph.split) if split]
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
        return self._map(batches, on_error, self._pool)

    def _map(self, batches, on_error, pool):
        self._begin()
        try:
            if self._ranks.rank:
                self._weights = serve(self._pool, self._ranks, self._weights)
                return
            with contextlib.closing(ordered_outputs(pool, batches, self._job, on_error)) as in_order:
                for outputs in in_order:
                    rank_process.report(mpi_environment.STEP)
                    yield outputs if isinstance(outputs, PredictionError) or not self._single else outputs[0]
                    self._check_open()  # the caller may have closed it meanwhile: no thread would take another batch
        finally:
            self._is_active = False

    def _begin(self):
        """Begin a call; with several ranks, wait until each has made the call."""
        self._check_open()
        if self._ranks.size > 1:
            if self._is_active:
                raise MgpuError('several ranks run one map at a time: exhaust the first one, or close() it')
            self._is_active = True
            self._ranks.handshake((CALL, self._number, self._calls))
        self._calls += 1

    def _check_open(self):
        if self._pool is None:
            raise MgpuError('this Predictor is closed: use it within its with block, or make another one')
        if any(context.kind != 'cpu' for context in self.contexts):
            check_process()

    def _check_use(self):
        """Check as `_check_open`; and warn the user, once, if shared variables have changed."""
        self._check_open()
        if not self._has_warned and self._versions != [variable.version for variable in self._variables]:
            self._has_warned = True
            warn('the values of shared variables have changed since this Predictor took them over; it keeps using the '
                 'old ones until refresh() is called')

    def _job(self, index, batch):
        arrays, states = self._graph.by_input(self._members(batch)), self._states
        # Each batch draws from its own part of a random stream.
        self._states = [jumped(state) if draws else state for state, draws in zip(states, self._draws)]
        return Job(index, arrays, self._weights, states)

    def _members(self, batch):
        """Return the arrays of one batch; Keras's Predictor has a method of its own."""
        return batch if isinstance(batch, (list, tuple, dict)) else [batch]

    def _rows_of(self, arrays, length, batch_size, verbose):
        """Return the outputs for arrays with `length` samples, which may be 0."""
        if length == 0:  # BLAS and convolutions refuse an empty batch: compute one of zeros, and keep no row of it
            zeros = [np.zeros((1,) + tuple(array.shape[1:]), array.dtype) if split else array
                     for array, split in zip(arrays, self._graph.split)]
            return [rows[:0] for rows in self._rows([zeros], 1, 0)]
        # Theano's C code keeps Python's lock: on the CPU, a thread beside the only replica could only read ahead, and
        # arrays need no reading. Passing each batch from thread to thread takes up to 5 % of the time of a small one.
        inline = len(self.replicas) == 1 == self._ranks.size \
            and all(context.kind == 'cpu' for context in self.contexts) \
            and all(type(array) is np.ndarray for array in arrays)
        return self._rows(self._graph.slices(arrays, length, batch_size), length, verbose,
                          pool=InlinePool(self.replicas[0]) if inline else None)

    def _rows(self, batches, length, verbose, n_batches=None, pool=None):
        """Return the outputs of all batches together, one array for each output; the same on each rank."""
        lengths = self._ranks.handshake((CALL, self._number, self._calls), [length or 0])[:, 0]
        check_lengths(self._ranks, self._name, lengths)
        with failing_together(self._ranks):
            if self._ranks.rank:
                rows = list(self.map(()))
            else:
                rows = self._collect(batches, length, verbose, n_batches, pool or self._pool)
            return broadcast_object(self._ranks, rows)

    def _collect(self, batches, length, verbose, n_batches, pool):
        rows = Rows(length)
        with progress.bar(length, verbose) as bar:
            for outputs in self._map(batches, 'raise', pool):
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
