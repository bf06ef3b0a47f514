"""A graph for inference, and a replica: the graph compiled for contexts, with copies of its shared variables."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np
import theano

from ..devices.context_map import Context, describe
from ..devices.discovery import reason
from ..devices.mesh import Mesh
from ..devices.transfers import Sender, fetch
from ..errors import BatchError, GraphError, PredictionError
from ..graph.graph import shared_variables
from ..graph.random_streams import is_random_state
from ..graph.updates import with_givens
from ..plan.layout import placed
from ..plan.pieces import Places, cut
from ..runtime.batches.arguments import check_input, converted, no_samples, sample_axes
from ..runtime.compiler import compile_for
from ..runtime.replicas.copies import copy_on


class InferenceGraph:
    """A graph for inference, which each replica compiles.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    broadcast, givens, mode, name, allow_input_downcast
        As for `mgpu.function`.

    Attributes
    ----------
    inputs, outputs : list of theano.Variable
    split : list of bool
        For each input, whether it has samples, along axis 0.
    shared, variables, streams : list of SharedVariable
        All that the graph reads, its weights, and the states of its random streams.
    pieces : list of Piece
        The parts that one device computes at a time, in order; see `lay_out`.

    Raises
    ------
    GraphError
        If no input has samples, or a call changes what the next one computes.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], broadcast: Sequence = (),
                 givens: Any = None, mode: Any = None, name: str | None = None,
                 allow_input_downcast: bool | None = None) -> None:
        self.inputs = [check_input(variable) for variable in inputs]
        axes = sample_axes(self.inputs, broadcast=broadcast)
        if not axes:
            raise no_samples(self.inputs)
        self.split = [variable in axes for variable in self.inputs]
        self.outputs, updates = with_givens(outputs, {}, givens)
        states = [variable for variable in updates if not is_random_state(variable)]
        if states:
            raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                             'several batches at a time: use mgpu.function, which computes one after the other'
                             % ', '.join(map(str, states)))
        self.shared = shared_variables(self.outputs)
        self.streams = [variable for variable in self.shared if is_random_state(variable)]
        self.variables = [variable for variable in self.shared if variable not in self.streams]
        self.name, self.mode, self._allow_input_downcast = name, mode, allow_input_downcast
        self.pieces: list[Any] = []

    def lay_out(self, contexts: Sequence[Any]) -> Mesh:
        """Cut the graph where the device changes, and lay out contexts for it.

        Parameters
        ----------
        contexts : list of Context, or list of list of Context
            As `resolve_contexts` returns them.

        Returns
        -------
        Mesh
            Its columns are the places of `pieces`: one piece and place, if the graph is not placed.

        Raises
        ------
        ContextError
            If the graph is placed on contexts that it cannot run on.
        """
        outputs, _, mesh = placed(self.outputs, {}, contexts)
        self.outputs = list(outputs)
        self.pieces = cut(self.inputs, self.outputs, Places(mesh).of)
        return mesh

    def by_input(self, arrays: Any) -> list[Any]:
        """Return arrays in the order of the inputs; raise a BatchError unless there is one for each.

        Parameters
        ----------
        arrays : list or dict of array_like
        """
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            text = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: pass one for each' % (text, names))
        return [array if hasattr(array, 'shape') else self.converted(variable, array)
                for array, variable in zip(arrays, self.inputs)]

    def converted(self, variable: theano.Variable, value: Any) -> np.ndarray:
        """Return a value as an array of an input's type; raise a BatchError if it cannot be one."""
        return converted(variable, value, self._allow_input_downcast)

    def slices(self, arrays: Sequence[Any], length: int, batch_size: int) -> Iterator[list[Any]]:
        """Yield the batches of `batch_size` that arrays of a length consist of; the last one may be smaller."""
        for start in range(0, length, batch_size):
            stop = min(start + batch_size, length)  # Keras's HDF5Matrix has no slices beyond its end
            yield [array[start:stop] if split else array for array, split in zip(arrays, self.split)]


@dataclass(frozen=True)
class Job:
    """A batch, one array for each input, with the weights and the states of random streams to compute it with."""

    index: int
    arrays: list[Any]
    weights: list[np.ndarray] | None
    states: list[np.ndarray]


class InferenceReplica:
    """A graph compiled for one context, or for several if it is placed, with the weights of one moment.

    Parameters
    ----------
    contexts : dict of str to Context
        The context of each place of the graph; only this replica uses them.
    graph : InferenceGraph
        Laid out.
    weights, states : list of ndarray
        Values of the graph's variables and random streams. On a ``cpu`` context they are used in place, and must not
        be written to.
    like : list of InferenceReplica
        Others of the same graph.

    Attributes
    ----------
    contexts : list of Context
    functions : list of theano.compile.function_module.Function
        One a piece of the graph.
    calls : int
        Number of batches computed.
    """

    def __init__(self, contexts: dict[str, Context], graph: InferenceGraph, weights: list[np.ndarray],
                 states: list[np.ndarray], like: Sequence[InferenceReplica] = ()) -> None:
        self.contexts = list(contexts.values())
        self.calls = 0
        self._graph = graph
        self._lock = threading.Lock()  # no compiled function runs in two threads at once
        self._weights = weights
        # For each variable, its copy on each context that reads it.
        self._copies: list[dict[Context, Any]] = [{} for _ in graph.variables]
        self._streams: list[dict[Context, Any]] = [{} for _ in graph.streams]
        self.functions: list[Any] = []
        for i, piece in enumerate(graph.pieces):
            context, copies = contexts[piece.place], {}
            read = shared_variables(piece.graphs)
            for variable, value, on in zip(graph.variables + graph.streams, list(weights) + list(states),
                                           self._copies + self._streams):
                if variable in read:
                    if context not in on:
                        on[context] = copy_on(context, variable, value)
                    copies[variable] = on[context]
            self.functions.append(compile_for(context, piece.stand_ins, piece.graphs, {}, copies, graph.mode,
                                              graph.name, [other.functions[i] for other in like]))
        self._senders = [Sender(function) for function in self.functions]

    def run(self, job: Job) -> list[np.ndarray]:
        """Compute a batch.

        Parameters
        ----------
        job : Job

        Returns
        -------
        list of ndarray

        Raises
        ------
        PredictionError
            In place of any error, which is its cause.
        """
        try:
            with self._lock:
                return self._compute(job)
        except Exception as error:
            raise PredictionError('batch %d failed on context %s: %s: %s'
                                  % (job.index, describe(self.contexts), type(error).__name__,
                                     reason(error).strip().partition('\n')[0]), job.index, self.contexts[0]) from error

    def _compute(self, job):
        if job.weights is not self._weights:
            _set(self._copies, job.weights)
            self._weights = job.weights
        _set(self._streams, job.states)
        graph = self._graph
        known = dict(zip(graph.inputs, map(graph.converted, graph.inputs, job.arrays)))
        for piece, function, sender in zip(graph.pieces, self.functions, self._senders):
            results = function.mgpu_call(*sender.send([known[variable] for variable in piece.given]))
            known.update(zip(piece.outputs, results))
        outputs = [fetch(known[output]) for output in graph.outputs]
        self.calls += 1
        return outputs

    def draws(self) -> list[bool]:
        """Return whether anything is drawn, for each random stream; draws of training alone are optimised away."""
        read = [source.value for maker in (function.maker for function in self.functions)
                for source, variable in zip(maker.inputs, maker.fgraph.inputs) if variable.clients]
        return [any(copy.container is value for copy in copies.values() for value in read) for copies in self._streams]


def _set(variables, values):
    for copies, value in zip(variables, values):
        for copy in copies.values():
            copy.container.unwatched = value
