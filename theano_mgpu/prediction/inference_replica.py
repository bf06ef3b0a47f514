"""A replica for inference: a graph compiled for one context, with its own copies of the shared variables."""
import threading
from collections import namedtuple

from ..batches.arguments import converted
from ..devices.context_map import describe
from ..devices.discovery import reason
from ..errors import PredictionError
from ..graphs import graph
from ..replicas.replicated import copy_on
from ..replicas.transfers import Sender, fetch

Job = namedtuple('Job', 'index arrays weights states')
Job.__doc__ = """One batch: its `index`; its `arrays`, one an input; the `weights` to compute it with, and the `states`
of random streams, as `InferenceReplica` takes them."""


class InferenceReplica:
    """A function compiled for one context, with the values of one moment.

    Parameters
    ----------
    context : Context
    inputs, outputs : list of theano.Variable
    variables, streams : list of SharedVariable
        What the graph reads: weights, and states of random streams.
    weights, states : list of ndarray
        Their values; on a ``cpu`` context they are used in place, and must not be written to.
    mode, name, allow_input_downcast
        As for `theano.function`.
    like : list of theano.compile.function_module.Function
        Those of the same graph on other contexts.

    Attributes
    ----------
    calls : int
        Batches computed.
    """

    def __init__(self, context, inputs, outputs, variables, streams, weights, states, mode=None, name=None,
                 allow_input_downcast=None, like=()):
        self.context = context
        self.inputs = inputs
        self.calls = 0
        self._lock = threading.Lock()  # no compiled function runs in two threads at once
        self._allow_input_downcast = allow_input_downcast
        self._weights = weights
        self._copies = [copy_on(context, variable, value) for variable, value in zip(variables, weights)]
        self._streams = [copy_on(context, variable, state) for variable, state in zip(streams, states)]
        replicas = dict(zip(variables + streams, self._copies + self._streams))
        self.function = graph.compile_for(context, inputs, outputs, {}, replicas, mode, name, like)
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
            From whatever went wrong.
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
        arguments = [converted(variable, value, self._allow_input_downcast)
                     for variable, value in zip(self.inputs, job.arrays)]
        outputs = [fetch(output) for output in self.function.unwatched_call(*self._sender.send(arguments))]
        self.calls += 1
        return outputs

    def draws(self):
        """For each random stream, whether anything is drawn from it; what only training draws is optimised away."""
        maker = self.function.maker
        read = [given.value for given, variable in zip(maker.inputs, maker.fgraph.inputs) if variable.clients]
        return [any(stream.container is value for value in read) for stream in self._streams]


def _set(copies, values):
    for copy, value in zip(copies, values):
        copy.container.value = value
