"""A graph for inference, compiled for each replica: a program without exchange, which a replica computes alone."""
from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np
import theano

from ..comm.communicator import Communicator
from ..devices.context_map import HOST, describe
from ..devices.discovery import reason
from ..devices.launcher import Shard
from ..devices.mesh import Mesh
from ..devices.transfers import DeviceBuffers
from ..errors import BatchError, GraphError, PredictionError
from ..graph.graph import host_type, shared_variables, substitute
from ..graph.placement.tags import placed_on
from ..graph.random_streams import is_random_state
from ..graph.theano_functions import builds_graphs
from ..graph.updates import with_givens
from ..options import Options
from ..plan import Machine, Shares, plan, undivided
from ..plan.layout import placed
from ..runtime.batch import Batch, of_one_replica
from ..runtime.batches.arguments import Arguments, converted, no_samples, sample_axes
from ..runtime.batches.sub_batches import batch_length
from ..runtime.executable import Executable
from ..runtime.replicas.replicated import copy_on, replicated
from ..runtime.step_run import StepRun
from ..utils.timeline import PHASES, Timings


class InferenceGraph:
    """A graph for inference, compiled for all replicas, with the weights of one moment.

    Attributes
    ----------
    shared, variables, streams : list of SharedVariable
        All that the graph reads, its weights, and the states of its random streams.
    weights : list of ndarray
        The values of `variables` that the replicas have.
    replicas : list of InferenceReplica
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], options: Options) -> None:
        self._options = options
        self.arguments = Arguments(inputs, sample_axes(inputs, broadcast=options.broadcast),
                                   options.allow_input_downcast)
        self.inputs, self.split = self.arguments.inputs, self.arguments.split
        if not any(self.split):
            raise no_samples(self.inputs)
        self.outputs, updates = with_givens(outputs, {}, options.givens)
        states = [variable for variable in updates if not is_random_state(variable)]
        if states:
            raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                             'several batches at a time: use mgpu.function, which computes one after the other'
                             % ', '.join(map(str, states)))
        self.shared = shared_variables(self.outputs)
        self.streams = [variable for variable in self.shared if is_random_state(variable)]
        self.variables = [variable for variable in self.shared if variable not in self.streams]
        self.replicas: list[InferenceReplica] = []

    def lay_out(self, contexts: Sequence[Any]) -> Mesh:
        """Give each op its place, and return the mesh of contexts; a ContextError if it cannot run on them."""
        outputs, _, mesh = placed(self.outputs, {}, contexts)
        self.outputs = list(outputs)
        return mesh

    @builds_graphs
    def compile(self, mesh: Mesh, weights: list[Any]) -> None:
        """Compile it for each replica of a mesh; on the host, the weights are used in place."""
        self.weights = _read_only(weights)
        with placed_on(None):
            self._own = {variable: copy_on(HOST, variable, value) for variable, value in zip(self.variables, weights)}
            self.states = list(map(_input_for, self.streams))  # each batch has states of its own
            outputs = substitute(self.outputs, {**self._own, **dict(zip(self.streams, self.states))})
            placement = {self._own.get(variable, variable): place for variable, place in mesh.placement.items()}
            machine = Machine(replicas=(len(mesh.replicas),))
            step_plan = plan(undivided(outputs)._replace(given=self.inputs + self.states),
                             mesh._replace(placement=placement), self._options, machine,
                             Shares(machine, is_divided=False))
            self.executable = Executable(step_plan, Communicator(), 'serial', Timings(PHASES), self._options.mode)
        self.replicas += [InferenceReplica(self, number) for number in range(len(mesh.replicas))]

    def take(self, weights: list[Any]) -> None:
        """Give all replicas other weights, once none of them computes."""
        with contextlib.ExitStack() as stack:
            for replica in self.replicas:
                stack.enter_context(replica.lock)
            for variable, value in zip(self.variables, _read_only(weights)):
                replicated(self._own[variable]).give(value)
            self.executable.refresh()
            self.weights = weights

    def draws(self) -> list[bool]:
        """Return whether anything is drawn, for each random stream; draws of training alone are optimised away."""
        read = {given for part, compiled in self.executable.parts.items()
                for given, variable in zip(part.given, compiled.functions[0].maker.fgraph.inputs) if variable.clients}
        return [state in read for state in self.states]

    def by_input(self, arrays: Any) -> list[Any]:
        """Return arrays, a list or a dict, in the order of the inputs; a BatchError unless there is one for each."""
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            text = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: pass one for each' % (text, names))
        return [array if hasattr(array, 'shape') else converted(variable, array, self._options.allow_input_downcast)
                for array, variable in zip(arrays, self.inputs)]

    def slices(self, arrays: Sequence[Any], length: int, batch_size: int) -> Iterator[list[Any]]:
        """Yield the batches of `batch_size` that arrays of a length consist of; the last one may be smaller."""
        for start in range(0, length, batch_size):
            stop = min(start + batch_size, length)  # Keras's HDF5Matrix has no slices beyond its end
            yield [array[start:stop] if split else array for array, split in zip(arrays, self.split)]


def _read_only(weights):
    """Make arrays read-only: copies on devices need not be compared with them."""
    for value in weights:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return weights


def _input_for(stream):
    """Return an input for the state of a random stream."""
    variable = host_type(stream)() if hasattr(stream, 'ndim') else stream.type()
    variable.tag.is_rng = True
    return variable


@dataclass(frozen=True)
class Job:
    """A batch, one array for each input, with the weights (a list) and the states of random streams for it."""

    index: int
    arrays: list[Any]
    weights: Any
    states: list[np.ndarray]


class InferenceReplica:
    """A replica of a graph, of a number, on contexts that it alone uses.

    `functions` has one a piece of the graph, and `calls` counts the batches.
    """

    def __init__(self, graph: InferenceGraph, number: int) -> None:
        self._graph, self._number, self.calls = graph, number, 0
        self.contexts = list(graph.executable.plan.mesh.replicas[number])
        self.functions = [compiled.functions[number] for compiled in graph.executable.parts.values()]
        self.lock = threading.Lock()  # no compiled function runs in two threads at once
        self._split = of_one_replica(graph.executable.plan, number, graph.executable.parts)
        self._buffers = {context: DeviceBuffers(context) for context in self.contexts}

    def run(self, job: Job) -> list[np.ndarray]:
        """Compute the batch of a job; any error is the cause of a PredictionError."""
        try:
            while True:
                with self.lock:
                    if job.weights is self._graph.weights:
                        return self._compute(job)
                self._graph.take(job.weights)  # of a later moment, or of an earlier one if another job is ahead
        except Exception as error:
            raise PredictionError('batch %d failed on context %s: %s: %s'
                                  % (job.index, describe(self.contexts), type(error).__name__,
                                     reason(error).strip().partition('\n')[0]), job.index, self.contexts[0]) from error

    def _compute(self, job):
        graph, split = self._graph, self._split
        values = graph.arguments.bind(job.arrays, {})
        length = batch_length(graph.arguments.lengths(values), graph.arguments.names_of_lengths, least=0)
        slots, split = list(split.slots), split._replace(shards=[Shard(self._number, (0, length))])
        for variable, value in zip(graph.inputs + graph.states, [*values, *job.states]):
            slots[split.program.common[variable]] = value
        step = StepRun(graph.executable, Batch(split, slots, [self._buffers]))
        step.start()
        outputs = step.end().outputs
        self.calls += 1
        return outputs
