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
class ExchangeWay:
    """The way in which sums are exchanged: the order, the owners, the channel.

    Attributes
    ----------
    in_tree : bool
        Whether the parts of logical shards are added in the order of their tree, and not in any order.
    owners : tuple of (int or None)
        For each sum the place that alone gets it, since no other one reads it; None for a sum that each place gets.
        Empty if each place gets all sums. A place is a replica, of all ranks, if devices add, or else a rank.
    by_devices : bool
        Whether the devices add them by NCCL, and not the host, with MPI between ranks.
    """

    in_tree: bool = False
    owners: tuple[int | None, ...] = ()
    by_devices: bool = False

    def by(self, n_ranks: int) -> str:
        """Return the name of who adds the sums, and how."""
        if self.by_devices:
            return 'NCCL' + ' by blocks' * self.in_tree
        return 'the host' + ', %s by MPI' % ('reduce_scatter' if self.owners else 'all_reduce') * (n_ranks > 1)


@dataclass(frozen=True, eq=False)
class SumGroup:
    """Sums that replicas, and then ranks, add together once a part has computed its shares of them."""

    exchanges: tuple[Exchange, ...]
    way: ExchangeWay


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
class ShardedUpdate:
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
    """New values of a sharded update that devices send each other by NCCL.

    Attributes
    ----------
    contexts : tuple of Context
        One for each replica of this process.
    owners : dict of SharedVariable to int
        The replica that computes each value, by its place among the replicas of all ranks.
    """

    contexts: tuple[Context, ...]
    owners: dict[SharedVariable, int]
