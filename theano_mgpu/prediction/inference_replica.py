"""A replica for inference: a graph compiled for one context, with its own copies of the shared variables."""
import threading
from collections import namedtuple

from ..devices.context_map import describe
from ..devices.discovery import reason
from ..errors import PredictionError
from ..replicas.replicated import copy_on
from ..replicas.transfers import Sender, fetch

Job = namedtuple('Job', 'index arrays weights states')
Job.__doc__ = """One batch: its `index`; its `arrays`, one for each input; the `weights` to compute it with, and the
`states` of random streams, as `InferenceReplica` takes them."""


class InferenceReplica:
    """A graph compiled for one context, with the weights of one moment.

    Parameters
    ----------
    context : Context
    graph : InferenceGraph
    weights, states : list of ndarray
        Values of the graph's variables and random streams. On a ``cpu`` context they are used in place, and must not
        be written to.
    like : list of theano.compile.function_module.Function
        The functions of the same graph on other contexts.

    Attributes
    ----------
    calls : int
        Batches computed.
    """

    def __init__(self, context, graph, weights, states, like=()):
        self.context = context
        self.calls = 0
        self._graph = graph
        self._lock = threading.Lock()  # no compiled function runs in two threads at once
        self._weights = weights
        self._copies = [copy_on(context, variable, value) for variable, value in zip(graph.variables, weights)]
        self._streams = [copy_on(context, variable, state) for variable, state in zip(graph.streams, states)]
        copies = dict(zip(graph.variables + graph.streams, self._copies + self._streams))
        self.function = graph.compile(context, copies, like)
        self._sender = Sender(self.function)

    def run(self, job):
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
            For any error; its cause is the error.
        """
        try:
            with self._lock:
                return self._compute(job)
        except Exception as error:
            raise PredictionError('batch %d failed on context %s: %s: %s'
                                  % (job.index, describe([self.context]), type(error).__name__,
                                     reason(error).strip().partition('\n')[0]), job.index, self.context) from error

    def _compute(self, job):
        if job.weights is not self._weights:
            _set(self._copies, job.weights)
            self._weights = job.weights
        _set(self._streams, job.states)
        arguments = list(map(self._graph.converted, self._graph.inputs, job.arrays))
        outputs = [fetch(output) for output in self.function.unwatched_call(*self._sender.send(arguments))]
        self.calls += 1
        return outputs

    def draws(self):
        """For each random stream, whether anything is drawn from it; draws that only training uses are optimised away.
        """
        maker = self.function.maker
        read = [given.value for given, variable in zip(maker.inputs, maker.fgraph.inputs) if variable.clients]
        return [any(stream.container is value for value in read) for stream in self._streams]


def _set(copies, values):
    for copy, value in zip(copies, values):
        copy.container.value = value
