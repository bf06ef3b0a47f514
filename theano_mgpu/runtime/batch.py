"""A batch that is split: the shard of each replica, and what is known of it in the course of a step."""
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import theano

from ..devices.context_map import HOST, Context
from ..replicas.transfers import DeviceBuffers, copy_to, is_on

Values = Dict[theano.Variable, Any]


class Sum(NamedTuple):
    """A sum that lies on the host, and on the devices that it was sent to.

    `sums` sends it to a device together with the others of its step; `on_devices` has what is on each device, the same
    object for all of them.
    """

    value: Any
    index: int
    sums: Any
    on_devices: Dict[Context, Dict[int, Any]]

    def on(self, context: Context) -> Any:
        """Return the sum where functions of a context take it."""
        if context.kind == 'cpu':
            return self.value
        if context not in self.on_devices:
            self.on_devices[context] = self.sums.send(context)
        return self.on_devices[context][self.index]


class Outbox:
    """Sends values to the devices of one replica, each value once a step.

    Parameters
    ----------
    buffers : dict of Context to DeviceBuffers
        Where the values go.
    """

    def __init__(self, buffers: Mapping[Context, DeviceBuffers]):
        self._buffers = buffers
        self._sent: Dict[Tuple[theano.Variable, Context], Any] = {}

    def send(self, variable: theano.Variable, value: Any, context: Context) -> Any:
        """Return a value where functions of a context take it."""
        if isinstance(value, Sum):
            value = value.on(context)
        if is_on(context, value):
            return value
        key = variable, context
        if key not in self._sent:
            self._sent[key] = copy_to(HOST, value) if context.kind == 'cpu' else \
                self._buffers[context].send(variable, value)
        return self._sent[key]

    def forget(self, variables: Sequence[theano.Variable]) -> None:
        """Let go of what was sent of variables."""
        self._sent = {key: value for key, value in self._sent.items() if key[0] not in variables}

    def arguments(self, given: Sequence[theano.Variable], takes: Sequence[bool], context: Context, values: Values,
                  common: Values) -> List[Any]:
        """Return the values of variables as a function takes them.

        Parameters
        ----------
        given : list of theano.Variable
        takes : list of bool
            Which are taken on the device, see `graph.compile_for`.
        context : Context
            That of the function.
        values, common : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray or Sum)
            What the replica knows, and what every replica knows.
        """
        return [self.send(variable, values[variable] if variable in values else common[variable],
                          context if on_device else HOST) for variable, on_device in zip(given, takes)]


class Shard:
    """The part of a batch that a replica works on at a time.

    Parameters
    ----------
    replica : int
    span : (int, int)
        Its samples, of those that this process has: the first, and the one after the last.
    values : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
        Its inputs; what it computes is added.
    outbox : Outbox
    """

    __slots__ = 'replica', 'span', 'values', 'outbox'

    def __init__(self, replica: int, span: Tuple[int, int], values: Values, outbox: Outbox):
        self.replica, self.span, self.values, self.outbox = replica, span, values, outbox

    def keep(self, part, outputs):
        """Keep what a part has computed, and let go of what no later one needs."""
        self.values.update(zip(part.outputs, outputs))
        if part.last:
            for variable in part.last:
                del self.values[variable]
            self.outbox.forget(part.last)


class Batch:
    """A batch that is split.

    Parameters
    ----------
    rounds : list of list of Shard
        One list a micro-batch, each with a shard for each of the first replicas.
    common : dict of theano.Variable to ndarray
        What is the same for every shard; exchanged values are added.
    samples : int
        Those of all ranks together.
    lengths : list of int
        Samples that each rank works on.
    idle : bool
        Whether this rank has none, and takes part with a sample that does not count.
    alone : bool
        Whether one replica has the whole batch: what it computes stays on its device.
    """

    def __init__(self, rounds: List[List[Shard]], common: Values, samples: int, lengths: List[int],
                 idle: bool = False, alone: bool = False):
        self.rounds, self.common, self.samples, self.lengths = rounds, common, samples, lengths
        self.idle, self.alone = idle, alone
        self.shards = rounds[0] if len(rounds) == 1 else \
            sorted((shard for round_ in rounds for shard in round_), key=lambda shard: shard.span)
