"""A replica for inference: a graph compiled for its contexts, with its own copies of the shared variables."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from ..devices.context_map import Context, describe
from ..devices.discovery import reason
from ..errors import PredictionError
from ..graphs.graph import compile_for, shared_variables
from ..replicas.copies import copy_on
from ..replicas.transfers import Sender, fetch
from .inference_graph import InferenceGraph


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
            results = function.unwatched_call(*sender.send([known[variable] for variable in piece.given]))
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
