"""`mgpu.Predictor`: inference with one graph on several devices, each with a replica of it."""
import contextlib
import warnings
import weakref

import numpy as np
import theano

from ..batches.arguments import check_input, converted, no_samples, sample_axes
from ..batches.sub_batches import Rows, batch_length
from ..devices.contexts import borrow, check_process, give_back
from ..distributed.consistency import arrays_of_first
from ..distributed.process_group import CALL
from ..errors import BatchError, GraphError, MgpuError, MgpuWarning, PredictionError
from ..graphs.graph import shared_variables
from ..graphs.updates import with_givens
from ..jobs import mpi_environment, rank_process
from ..program.parallel_graph import check_same_graph, choose_ranks, compiling, resolve_contexts
from ..replicas.random_streams import is_random_state, replica_state
from ..replicas.replicated import replicated
from ..utils import progress
from .inference_replica import InferenceReplica, Job
from .ordered_outputs import ordered_outputs
from .rank_pool import RankPool, serve
from .replica_pool import InlinePool, ReplicaPool

BATCH_SIZE = 32


class Predictor:
    """A graph that computes whole batches on several devices at a time, each on the replica that is free first.

    Its replicas hold the values that the graph's shared variables have when it is made: `refresh` takes over
    later ones. Use it in a ``with`` block, or `close` it, to give its memory back.

    Of several processes that mpirun started, rank 0 reads the batches and dispatches them to all, and has the outputs
    in order; every rank makes the same calls. With ``mgpu.data=sharded`` each process works by itself.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, but for scalars and those named in `broadcast`.
    outputs : theano.Variable or list of theano.Variable
    contexts : list of str, optional
        Names of the contexts to run on; all by default.
    replicas_per_context : int
        More than one may keep a large GPU busier where a batch is small.
    prefetch : int
        Batches that are read ahead while each replica has one. So many plus the replicas are in memory.
    broadcast, givens, mode, name, allow_input_downcast
        As for `mgpu.function`.
    executor : {'auto', 'serial', 'threads', 'mpi'}, optional
        Of several processes, 'serial' and 'threads' keep this one to itself; within a process there is a thread a
        replica always. The flag ``mgpu.executor`` by default.

    Attributes
    ----------
    contexts : list of Context
    replicas : list of InferenceReplica

    Raises
    ------
    GraphError, ContextError
        If the graph cannot be run so: also where each call changes what the next one computes.

    Notes
    -----
    Each batch draws random numbers of its own, the same whatever the number of replicas, and the streams of the
    graph do not move on.

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

    def __init__(self, inputs, outputs, contexts=None, replicas_per_context=1, prefetch=2, broadcast=(), givens=None,
                 executor=None, mode=None, name=None, allow_input_downcast=None):
        self._pool, self._inline, self._active, self._calls = None, None, False, 0
        self.contexts, self.replicas = [], []
        self._resources = contextlib.ExitStack()
        self._release = weakref.finalize(self, self._resources.close)
        check_numbers(replicas_per_context=replicas_per_context, prefetch=prefetch)
        self._single = not isinstance(outputs, (list, tuple))
        self._allow_input_downcast = allow_input_downcast
        self.inputs = [check_input(variable) for variable in inputs]
        axes = sample_axes(self.inputs, broadcast=broadcast)
        if not axes:
            raise no_samples(self.inputs)
        self._split = [variable in axes for variable in self.inputs]
        outputs, updates = with_givens([outputs] if self._single else outputs, {}, givens)
        check_independent(updates)
        sharded = theano.config.mgpu.data == 'sharded'
        self._ranks = choose_ranks('threads' if sharded and mpi_environment.size() > 1 else executor)
        self._number = self._ranks.function_number(name or 'predict')
        shared = shared_variables(outputs)
        streams = [variable for variable in shared if is_random_state(variable)]
        variables = [variable for variable in shared if variable not in streams]
        self._variables = [replicated(variable) for variable in variables]
        self._states = [getattr(stream.tag, 'stands_for', stream).get_value() for stream in streams]
        self.refresh()
        wanted = resolve_contexts(contexts) * replicas_per_context
        n_replicas = check_same_graph(self._ranks, self.inputs, outputs, shared, len(wanted))
        try:
            with compiling(name, self.inputs, wanted), self._ranks.first_compiler():
                for context in wanted:
                    self.contexts.append(borrow(context))
                    self._resources.callback(give_back, self.contexts[-1])
                    self.replicas.append(InferenceReplica(self.contexts[-1], self.inputs, outputs, variables, streams,
                                                   self._weights, self._states, mode, name, allow_input_downcast,
                                                   like=[replica.function for replica in self.replicas]))
        except BaseException:
            self.close()
            raise
        self._draws = self.replicas[0].draws()
        self._pool = ReplicaPool(self.replicas, prefetch)
        self._inline = InlinePool(self.replicas[0])
        self._resources.callback(self._pool.close)
        if self._ranks.size > 1 and self._ranks.rank == 0:
            self._pool = RankPool(self._pool, self._ranks, n_replicas, prefetch)

    @property
    def residents(self):
        """The former name of `replicas`."""
        return self.replicas

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End its threads, and give its memory and contexts back."""
        self._release()
        self._pool = self._inline = None
        self.contexts, self.replicas = [], []

    def refresh(self):
        """Take over the values that the shared variables have now.

        Batches that `map` reads from now on are computed with them.
        """
        self._versions = [variable.version for variable in self._variables]
        self._weights = [variable.value() for variable in self._variables]
        self._told = False

    def predict(self, *arrays, batch_size=None, verbose=0):
        """Compute the outputs of all samples.

        Parameters
        ----------
        *arrays : array_like
            One an input, of any length that they share; arrays on disk (`numpy.memmap`, h5py) are read batch by
            batch.
        batch_size : int, optional
            Samples that a replica works on at a time, 32 by default.
        verbose : {0, 1}
            1 shows a progress bar.

        Returns
        -------
        ndarray, or list of ndarray if `outputs` is a list
            A row a sample, in order. On every rank, if there are several.

        Raises
        ------
        PredictionError
            If a batch fails; its ``index`` says which.
        """
        self._check_use()
        batch_size = chosen_batch_size(batch_size)
        arrays = self._by_input(arrays)
        named = [(len(array), str(v)) for array, v, split in zip(arrays, self.inputs, self._split) if split]
        length = batch_length(*map(list, zip(*named)), least=0)
        rows = self._rows_of(arrays, length, batch_size, verbose)
        return rows[0] if self._single else rows

    def map(self, batches, on_error='raise'):
        """Compute batch after batch.

        Parameters
        ----------
        batches : iterable
            Of arrays; for several inputs of lists or tuples of arrays, or dicts by the inputs' names. It is read no
            further ahead than `prefetch` says, so it may be endless.
        on_error : {'raise', 'yield'}
            What becomes of a batch that fails: its error is raised in its turn, or yielded in its place while the
            others go on.

        Yields
        ------
        ndarray, or list of ndarray if `outputs` is a list
            The outputs of each batch, in the order of the batches; or a PredictionError. Of several ranks, rank 0
            reads `batches` and yields outputs; the others only help.

        Raises
        ------
        PredictionError
            If a batch fails; its ``index`` says which.
        """
        if on_error not in ('raise', 'yield'):
            raise ValueError("on_error=%r is neither 'raise' nor 'yield'" % (on_error,))
        self._check_use()
        return self._map(batches, on_error, self._pool)

    def _map(self, batches, on_error, pool):
        self._begin()
        try:
            if self._ranks.rank:
                self._weights = serve(self._pool, self._ranks, self._weights)
                return
            with contextlib.closing(ordered_outputs(pool, batches, self._job, on_error)) as found:
                for outputs in found:
                    rank_process.note_step()
                    yield outputs if isinstance(outputs, PredictionError) or not self._single else outputs[0]
        finally:
            self._active = False

    def _begin(self):
        """Of several ranks, wait until each is here."""
        self._check_open()
        if self._ranks.size > 1:
            if self._active:
                raise MgpuError('several ranks run one map at a time: exhaust the first one, or close() it')
            self._active = True
            self._ranks.meet((CALL, self._number, self._calls))
        self._calls += 1

    def _check_open(self):
        if self._pool is None:
            raise MgpuError('this Predictor is closed: use it within its with block, or make another one')
        if any(context.kind != 'cpu' for context in self.contexts):
            check_process()

    def _check_use(self):
        """As `_check_open`; and warn the caller of the caller, once, of values that were not taken over."""
        self._check_open()
        if not self._told and self._versions != [variable.version for variable in self._variables]:
            self._told = True
            warnings.warn('the values of shared variables have changed since this Predictor took them over; it goes on '
                          'with the former ones until refresh() is called', MgpuWarning, stacklevel=3)

    def _job(self, index, batch):
        return Job(index, self._by_input(self._members(batch)), self._weights, self._next_states())

    def _next_states(self):
        """States of the random streams for one batch; each batch draws from a place of its own."""
        states = self._states
        if any(self._draws):
            self._states = [replica_state(state, 1) if draws else state for state, draws in zip(states, self._draws)]
        return states

    def _members(self, batch):
        """The arrays of one batch."""
        return batch if isinstance(batch, (list, tuple, dict)) else [batch]

    def _by_input(self, arrays):
        """Arrays in the order of the inputs; a BatchError where they are too few, or many, or unknown."""
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            given = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: give one for each' % (given, names))
        return [array if hasattr(array, 'shape') else converted(variable, array, self._allow_input_downcast)
                for array, variable in zip(arrays, self.inputs)]

    def _rows_of(self, arrays, length, batch_size, verbose):
        """Outputs for arrays of so many samples, which may be none."""
        if length == 0:  # BLAS and convolutions refuse a batch of none: compute one of zeros, and keep no row of it
            zeros = [np.zeros((1,) + tuple(array.shape[1:]), array.dtype) if split else array
                     for array, split in zip(arrays, self._split)]
            return [rows[:0] for rows in self._rows([zeros], 1, 0)]
        # Theano's C code keeps Python's lock: beside one replica on the CPU a thread could read, but here is nothing
        # to read, and to hand each batch from thread to thread costs up to a twentieth of a small one.
        inline = len(self.replicas) == 1 == self._ranks.size and self.contexts[0].kind == 'cpu' \
            and all(type(array) is np.ndarray for array in arrays)
        return self._rows(slices(arrays, self._split, length, batch_size), length, verbose,
                          pool=self._inline if inline else None)

    def _rows(self, batches, length, verbose, n_batches=None, pool=None):
        """Outputs of all batches together: one array an output; the same on each rank."""
        rows, error = [], None
        if self._ranks.rank:
            list(self.map(()))
        else:
            try:
                rows = self._collect(batches, length, verbose, n_batches, pool or self._pool)
            except Exception as failure:  # raised on every rank
                error = failure
        return arrays_of_first(self._ranks, rows, error)

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


def check_numbers(**numbers):
    """Raise a ValueError for a number that is too small, or none."""
    for name, number in numbers.items():
        least = 0 if name == 'prefetch' else 1
        if isinstance(number, bool) or not hasattr(number, '__index__') or number < least:
            raise ValueError('%s=%r: give a whole number, at least %d' % (name, number, least))


def chosen_batch_size(batch_size):
    """What `predict` was given, or its default; a ValueError if that is no number of samples."""
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    check_numbers(batch_size=batch_size)
    return batch_size


def check_independent(updates):
    """Raise a GraphError where a call would change what the next one computes, which runs at the same time."""
    states = [variable for variable in updates if not is_random_state(variable)]
    if states:
        raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                         'several batches at a time: use mgpu.function, which computes one after the other'
                         % ', '.join(map(str, states)))


def slices(arrays, split, length, batch_size):
    """The batches that arrays are made of.

    Examples
    --------
    >>> list(slices(['abcde', 7], [True, False], 5, 2))
    [['ab', 7], ['cd', 7], ['e', 7]]
    """
    for start in range(0, length, batch_size):
        stop = min(start + batch_size, length)  # Keras's HDF5Matrix knows no slice beyond its end
        yield [array[start:stop] if divided else array for array, divided in zip(arrays, split)]
