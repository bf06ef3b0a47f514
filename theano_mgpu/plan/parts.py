"""The parts of a step, and the exchanges between them: the content of a plan."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

import theano
from theano.compile.sharedvalue import SharedVariable

from ..devices.context_map import Context
from ..graph.partition import Exchange

Variables = Tuple[theano.Variable, ...]


@dataclass(frozen=True)
class AllReduce:
    """Sums over the ranks that every rank gets.

    Attributes
    ----------
    half : bool
        Whether ranks send each other float16, see `half_precision.add_in_half`.
    """

    half: bool = False

    def by(self, n_ranks: int) -> str:
        """Return the name of who adds the sums."""
        return by_host(self, n_ranks)

    def __str__(self) -> str:
        return 'all_reduce in float16' if self.half else 'all_reduce'


@dataclass(frozen=True)
class DeviceReduce:
    """Sums over the replicas of all ranks that their devices add by NCCL.

    Attributes
    ----------
    owners : tuple of (int or None)
        For each sum the replica that alone gets it, by its place among the replicas of all ranks, since no other one
        reads it. None for a sum that each device gets.
    """

    owners: tuple[int | None, ...]

    def by(self, n_ranks: int) -> str:
        """Return the name of who adds the sums."""
        return 'NCCL'


class DeviceGather(DeviceReduce):
    """Sums of logical shards, of which each device adds a block of the elements in the order of the tree.

    NCCL carries the parts and the sums. They have the same bits as through the host. A sum with an owner is added by
    this device alone.
    """

    def by(self, n_ranks: int) -> str:
        return 'NCCL by blocks'


@dataclass(frozen=True)
class ReduceScatter:
    """Sums over the ranks, each of which one rank gets: the only one that reads it.

    Attributes
    ----------
    owners : tuple of int
        The rank that gets each sum.
    """

    owners: tuple[int, ...]

    def by(self, n_ranks: int) -> str:
        """Return the name of who adds the sums."""
        return by_host(self, n_ranks)

    def __str__(self) -> str:
        return 'reduce_scatter'


def by_host(collective: AllReduce | ReduceScatter, n_ranks: int) -> str:
    """Return the name of who adds sums of the host: over the replicas, then by MPI over the ranks."""
    return 'the host' + (', %s by MPI' % collective if n_ranks > 1 else '')


@dataclass(frozen=True, eq=False)
class SumGroup:
    """Sums that replicas, and then ranks, add together once a part has computed its shares of them."""

    exchanges: tuple[Exchange, ...]
    collective: AllReduce | DeviceReduce | ReduceScatter


@dataclass(frozen=True, eq=False)
class Part:
    """A graph that is compiled as one function for each of some contexts.

    Attributes
    ----------
    given, outputs : tuple of theano.Variable
        The values that it takes, and those that it makes.
    inputs, graphs : tuple of theano.Variable
        The input that stands for each of `given` in its graph, and the graph of each output.
    updates : dict of SharedVariable to theano.Variable
        The graphs of new values, which it makes, too.
    contexts : tuple of Context
        Of a stage: one for each replica of this process.
    level : int
        Of the pieces of a stage, see `pieces.Piece`.
    sums : tuple of SumGroup
        Sums that it computes shares of.
    copied_to : tuple of Context
        Contexts that get the new values, if they have copies of the variables and have not computed them.
    is_share : bool
        Whether other contexts, or processes, compute other parts of the same update.
    """

    given: Variables
    inputs: Variables
    outputs: Variables
    graphs: Variables
    updates: dict[SharedVariable, theano.Variable]
    contexts: tuple[Context, ...]
    name: str | None = None
    level: int = 0
    sums: tuple[SumGroup, ...] = ()
    copied_to: tuple[Context, ...] = ()
    is_share: bool = False


@dataclass(frozen=True, eq=False)
class Boundary:
    """The exchanges before a stage, or after the last one.

    Attributes
    ----------
    exchanges : tuple of Exchange
        All of them, for a batch that one replica has alone.
    sums : tuple of SumGroup
    others : tuple of Exchange
        Those that are not among the sums.
    """

    exchanges: tuple[Exchange, ...]
    sums: tuple[SumGroup, ...]
    others: tuple[Exchange, ...]


@dataclass(frozen=True, eq=False)
class StagePlan:
    """A stage: the exchanges before it, the values of earlier stages that it takes, and its parts by level.

    `saved` maps each placeholder of a value of an earlier stage to that value. If it is `once`, the first shard of each
    replica computes it for all its shards.
    """

    boundary: Boundary
    saved: dict[theano.Variable, theano.Variable]
    parts: tuple[Part, ...]
    once: bool = False


@dataclass(frozen=True, eq=False)
class DividedUpdate:
    """An update that is divided among ranks.

    Attributes
    ----------
    shares : tuple of tuple of SharedVariable
        For each rank, the variables whose new values it computes.
    sent : frozenset of SharedVariable
        Those that a step needs on every rank: their new values are sent in the step. The others, such as the state of
        an optimizer, stay with their owner until they are read.
    read : tuple of SharedVariable
        All that the update reads, or makes new values of.
    """

    shares: tuple[tuple[SharedVariable, ...], ...]
    sent: frozenset[SharedVariable]
    read: tuple[SharedVariable, ...]


@dataclass(frozen=True, eq=False)
class DeviceBroadcast:
    """New values of a divided update that devices send each other by NCCL.

    Attributes
    ----------
    contexts : tuple of Context
        One for each replica of this process.
    owners : dict of SharedVariable to int
        The replica that computes each value, by its place among the replicas of all ranks.
    """

    contexts: tuple[Context, ...]
    owners: dict[SharedVariable, int]
