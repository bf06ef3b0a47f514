"""A batch, scattered: the shard of each replica, and what is known of it in the course of a step."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import theano

from ..devices.context_map import HOST, Context
from ..replicas.transfers import DeviceBuffers, copy_to, is_on
from .exchange import Sum

Values = Dict[theano.Variable, Any]


class Shard:
    """A replica's part of a batch in one step.

    Parameters
    ----------
    replica : int
    span : (int, int)
        Its samples, of those that this process has.
    known : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
        Its inputs; what it computes is added.
    buffers : dict of Context to DeviceBuffers
        Where its inputs go.
    """

    def __init__(self, replica: int, span: Optional[Tuple[int, int]], known: Values,
                 buffers: Dict[Context, DeviceBuffers]):
        self.replica, self.span, self.known = replica, span, known
        self._buffers = buffers
        self._sent = {}

    def keep(self, part, outputs):
        """Keep what a part has computed, and drop what no later one needs, also what was sent of it."""
        self.known.update(zip(part.outputs, outputs))
        for variable in part.last:
            del self.known[variable]
        if part.last:
            self._sent = {key: value for key, value in self._sent.items() if key[0] not in part.last}

    def send(self, variable, value, context):
        """A value on a context's device, where it is sent once a step."""
        if is_on(context, value):
            return value
        key = variable, context
        if key not in self._sent:
            self._sent[key] = copy_to(HOST, value) if context.kind == 'cpu' else \
                self._buffers[context].send(variable, value)
        return self._sent[key]

    def arguments(self, given: Sequence[theano.Variable], takes: Sequence[bool], common: Values,
                  context: Context) -> List[Any]:
        """Values of variables as a function takes them.

        Parameters
        ----------
        given : list of theano.Variable
        takes : list of bool
            Which are taken on the device, see `graph.compile_for`.
        common : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray or Sum)
            What every replica knows.
        context : Context
            That of the function.
        """
        found = []
        for variable, on_device in zip(given, takes):
            value = self.known[variable] if variable in self.known else common[variable]
            if isinstance(value, Sum):
                value = value.on(context) if on_device else value.on_host
            found.append(self.send(variable, value, context if on_device else HOST))
        return found


class Batch:
    """A batch, scattered.

    Parameters
    ----------
    rounds : list of list of Shard
        One after the other, each with a shard for each of the first contexts.
    common : dict of theano.Variable to ndarray
        What is the same for every shard; exchanged values are added.
    lengths : list of int
        Samples of each rank.
    idle : bool
        Whether this rank has none, and takes part with a sample that does not count.
    alone : bool
        Whether one replica has the whole batch: what it computes stays on its device.

    Attributes
    ----------
    new : list of (Replicated, list of Context, list, list of Context)
        New values that the stages have made, as `Runner` stores them.
    """

    def __init__(self, rounds: List[List[Shard]], common: Values, lengths: List[int], idle: bool = False,
                 alone: bool = False):
        self.rounds, self.common, self.lengths, self.idle, self.alone = rounds, common, lengths, idle, alone
        self.new: List[Any] = []
        self.shards = sorted((shard for round_ in rounds for shard in round_), key=lambda shard: shard.span)
