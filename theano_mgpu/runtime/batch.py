"""A batch that is split: the shard of each replica, and the values that are known in the course of a step."""
from __future__ import annotations

import collections
import functools
from typing import Any, Callable, Collection, Dict, Mapping, NamedTuple, Sequence

import numpy as np
import theano

from ..comm.tree import Tree
from ..devices.context_map import HOST, Context
from ..plan import Choice, Part, Shares, StepPlan
from ..plan.shares import Span
from .replicas.transfers import DeviceBuffers, copy_to, is_on

Values = Dict[theano.Variable, Any]


class Sum(NamedTuple):
    """A sum that lies on the host, and on the devices that it was sent to.

    `sums` sends it to a device together with the others of its step; `on_devices` has the copies on each device, by
    their numbers, and is the same object for all of them.
    """

    value: Any
    number: int
    sums: Any
    on_devices: dict[Context, dict[int, Any]]

    def on(self, context: Context) -> Any:
        """Return the sum where functions of a context take it."""
        if context.kind == 'cpu':
            return self.value
        if context not in self.on_devices:
            self.on_devices[context] = self.sums.send(context)
        return self.on_devices[context][self.number]


class DeviceSum(NamedTuple):
    """A sum that lies on devices, which have added it: number `number` of the sums `reduced`."""

    number: int
    reduced: Any

    @property
    def value(self) -> Any:
        """The sum on the host, once the devices have it."""
        return self.reduced.value(self.number)

    def on(self, context: Context) -> Any:
        """Return the sum where functions of a context take it."""
        return self.value if context.kind == 'cpu' else self.reduced.on(context, self.number)


class Outbox:
    """The values that are sent to the devices of one replica, each value once a step.

    Parameters
    ----------
    buffers : dict of Context to DeviceBuffers
        The memory that the values are sent to.
    """

    def __init__(self, buffers: Mapping[Context, DeviceBuffers]):
        self.buffers = buffers
        self._sent: dict[tuple[theano.Variable, Context], Any] = {}

    def send(self, variable: theano.Variable, value: Any, context: Context) -> Any:
        """Return a value where functions of a context take it."""
        if isinstance(value, (Sum, DeviceSum)):
            value = value.on(context)
        if is_on(context, value):
            return value
        key = variable, context
        if key not in self._sent:
            self._sent[key] = copy_to(HOST, value) if context.kind == 'cpu' else \
                self.buffers[context].send(variable, value)
        return self._sent[key]

    def clear(self) -> None:
        """Let go of all values, and of their memory."""
        self._sent = {}
        self.buffers = {context: DeviceBuffers(context) for context in self.buffers}

    def forget(self, variables: Sequence[theano.Variable]) -> None:
        """Let go of the values of variables."""
        self._sent = {key: value for key, value in self._sent.items() if key[0] not in variables}

    def arguments(self, given: Sequence[theano.Variable], takes: Sequence[bool], context: Context, values: Values,
                  common: Values) -> list[Any]:
        """Return the values of variables as a function takes them.

        Parameters
        ----------
        given : list of theano.Variable
        takes : list of bool
            Whether each of them is taken on the device, see `compiler.compile_for`.
        context : Context
            The context of the function.
        values, common : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray or Sum)
            The values that the replica knows, and those that every replica knows.
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
    number : int
        Its number among the shards of all ranks, where these are logical shards.
    values : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
        Its inputs, to which computed values are added.
    outbox : Outbox
    """

    __slots__ = 'replica', 'span', 'number', 'values', 'outbox'

    def __init__(self, replica: int, span: Span, values: Values, outbox: Outbox):
        self.replica, self.span, self.number, self.values, self.outbox = replica, span, 0, values, outbox

    def keep(self, part: Part, outputs: Sequence[Any]) -> None:
        """Keep the outputs of a part, and let go of the values that no later part needs."""
        self.values.update(zip(part.outputs, outputs))
        if part.last:
            for variable in part.last:
                del self.values[variable]
            self.outbox.forget(part.last)


    def move_to_host(self) -> None:
        """Move all values to the host, and free their memory on the devices."""
        self.values = {variable: self.outbox.send(variable, value, HOST) for variable, value in self.values.items()}
        self.outbox.clear()


class Batch:
    """A batch that is split.

    Parameters
    ----------
    rounds : list of list of Shard
        One list a micro-batch, each with a shard for each replica that has samples.
    common : dict of theano.Variable to ndarray
        The values that are the same for every shard; exchanged values are added.
    samples : int
        Samples of all ranks together.
    lengths : list of int
        Samples that each rank works on.
    idle : bool
        Whether this rank has none, and takes part with a sample that does not count.
    alone : bool
        Whether one replica has the whole batch: its values stay on its device.
    waits_on_host : bool
        Whether the values of a micro-batch are on the host while the devices compute others.
    tree : Tree, optional
        The order in which the parts of logical shards are added.
    """

    def __init__(self, rounds: Sequence[Sequence[Shard]], common: Values, samples: int, lengths: Sequence[int],
                 idle: bool = False, alone: bool = False, waits_on_host: bool = False, tree: Tree | None = None):
        self.rounds, self.common, self.samples, self.lengths = rounds, common, samples, lengths
        self.idle, self.alone, self.waits_on_host, self.tree = idle, alone, waits_on_host, tree
        self.shards = rounds[0] if len(rounds) == 1 else \
            sorted((shard for round_ in rounds for shard in round_), key=lambda shard: shard.span)
        if tree is not None:
            for number, shard in enumerate(self.shards, tree.first(tree.rank)):
                shard.number = number


    def share(self, parts: Sequence[Part]) -> None:
        """Give the outputs of parts, which the first shard of each replica has computed, to its other shards."""
        first = {shard.replica: shard for shard in self.rounds[0]}
        computed = [variable for part in parts for variable in part.outputs]
        for shard in self.shards:
            values = first[shard.replica].values
            shard.values.update([(variable, values[variable]) for variable in computed if variable in values])


class Splitter:
    """A splitter of batches by the shares of a plan. It keeps the memory on the devices for their inputs.

    Parameters
    ----------
    plan : StepPlan
    split : list of theano.Variable
        Inputs that have samples along axis 0; every replica gets the others whole.
    outbox : callable
        ``outbox(buffers)`` makes the Outbox of a shard.

    Attributes
    ----------
    shapes : dict of theano.Variable to tuple of int, or None
        The shapes of the first replica's inputs in the first batch.
    shares : Shares
        The shares of the plan, at first.
    first : tuple of int
        Samples that each rank was given of the first batch: of its own, or the whole batch.
    whole_numbers : dict of theano.Variable to int
        The values of its inputs that are a whole number, such as Keras's learning phase.
    with_samples : frozenset of theano.Variable
        Inputs that have samples along axis 0.
    rounds, lengths, shards_of_ranks, shards_of_replicas : callable
        The methods of `Shares`, with a memory.
    slices : dict of tuple of int to int
        The number of slices by the `key` of a batch, where a device had too little memory for the number of the plan.
    """

    def __init__(self, plan: StepPlan, split: Collection[theano.Variable],
                 outbox: Callable[[Mapping[Context, DeviceBuffers]], Outbox] = Outbox):
        self._mesh, self._new_outbox = plan.mesh, outbox
        self.with_samples = frozenset(split)
        self._total, *self._of_shard = plan.program.numbers or [None]
        self.use(plan.shares)
        self.slices: dict[tuple[int, ...], int] = {}
        self.shapes: dict[theano.Variable, tuple[int, ...]] | None = None
        self.first: tuple[int, ...] = ()
        self.whole_numbers: dict[theano.Variable, int] = {}
        self._buffers: dict[int, Any] = collections.defaultdict(collections.deque)
        # While a batch is computed, the next one is sent. The inputs of several parts are read in the whole step.
        self._turns = 2 if sum(len(stage.parts) for stage in plan.stages) == 1 else None

    def use(self, shares: Shares, measured: Sequence[int] = ()) -> None:
        """Split further batches by other shares.

        Parameters
        ----------
        shares : Shares
        measured : list of int, optional
            Samples that each rank was given in the steps by whose times the shares were chosen.
        """
        self.shares, self.measured = shares, measured
        self.rounds = functools.lru_cache(maxsize=None)(shares.rounds)
        self.lengths = functools.lru_cache(maxsize=None)(shares.lengths)
        self.shards_of_ranks = functools.lru_cache(maxsize=None)(shares.shards_of_ranks)
        self.shards_of_replicas = functools.lru_cache(maxsize=None)(shares.shards_of_replicas)

    def key(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the key of `slices` for the samples that the ranks are given: of their own, or the whole batch.

        Its sum is the number of samples of the batch, on all ranks.
        """
        return tuple(lengths) if self.shares.is_sharded else (lengths[0],)

    def slice(self, lengths: Sequence[int], number: int) -> None:
        """Split batches of some lengths into a number of slices, and free the memory of inputs that were larger."""
        self.slices[self.key(lengths)] = number
        self._buffers.clear()

    def changes(self) -> list[Choice]:
        """Return the choices of the plan that its steps have changed: shares by speed, slices for lack of memory."""
        shares = self.shares
        changed = []
        if self.measured:
            changed.append(Choice('shares', ' + '.join(map(str, shares.sizes(self.measured))), 'mgpu.shares=auto: by '
                                  'measured speeds, for batches of %d samples' % sum(self.measured)))
        for key, number in sorted(self.slices.items()):
            changed.append(Choice('slices', '%d for batches of %d samples' % (number, sum(key)),
                                  'a device had too little memory for fewer'))
        return changed

    def split(self, values: Values, lengths: Sequence[int]) -> Batch:
        """Split a batch.

        Parameters
        ----------
        values : dict of theano.Variable to ndarray
            The inputs of this process.
        lengths : list of int
            Samples that each rank was given: of its own, or the whole batch.
        """
        shares, machine, given = self.shares, self.shares.machine, self.key(lengths)
        total, before, own, slices = lengths[0], 0, lengths[0], self.slices.get(given)
        if shares.is_sharded:
            total, before, own = sum(lengths), sum(lengths[:machine.rank]), lengths[machine.rank]
        else:
            lengths = self.lengths(total)
        rounds = self.rounds(own, slices)
        tree = Tree(machine.rank, self.shards_of_ranks(given), self.shards_of_replicas(given)) \
            if shares.is_divided and shares.logical_shards else None
        # Slices for lack of memory. A device would keep all slices of a batch whose samples meet in several stages.
        waits_on_host = slices is not None and len(rounds) > 1
        alone = not shares.is_divided or tree is None and \
            machine.size == machine.n_replicas == len(rounds) == 1 and len(rounds[0]) == 1
        common = {variable: value for variable, value in values.items() if variable not in self.with_samples}
        if self._total is not None:
            common[self._total] = np.array(total, 'int64')
        with_samples = [(variable, value) for variable, value in values.items() if variable in self.with_samples]

        def shard(replica: int, span: Span) -> Shard:
            start, stop = span
            of_shard = {variable: value[start:stop] for variable, value in with_samples}
            for variable, number in zip(self._of_shard, (stop - start, before + start, before)):
                of_shard[variable] = np.array(number, 'int64')
            return Shard(replica, span, of_shard, self._outbox(replica, 0 if waits_on_host else
                                                               self._turns or len(rounds) + 1))
        # A process without samples takes part with one sample that does not count.
        shards = [[shard(*work) for work in round_] for round_ in rounds or [[(0, (0, 1))]]]
        if self.shapes is None:
            first, self.first = {**common, **shards[0][0].values}, given
            self.shapes = {v: np.shape(value) for v, value in first.items()}
            self.whole_numbers = {v: int(value) for v, value in first.items() if isinstance(value, np.ndarray)
                                  and not value.ndim and value.dtype.kind in 'biu'}
        return Batch(shards, common, total, lengths, not rounds, alone, waits_on_host, None if alone else tree)

    def _outbox(self, replica: int, turns: int) -> Outbox:
        """Return an outbox with memory that the last `turns - 1` shards of the replica do not use; 0 is new memory."""
        buffers = self._buffers[replica] if turns else collections.deque()
        if len(buffers) < max(turns, 1):
            buffers.append({context: DeviceBuffers(context) for context in self._mesh.replicas[replica]})
        else:
            buffers.rotate(-1)
        return self._new_outbox(buffers[-1])
