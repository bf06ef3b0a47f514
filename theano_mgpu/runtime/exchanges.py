"""The exchange of each group of sums of a plan: an order, and a channel."""
from __future__ import annotations

from typing import Any, NamedTuple

import theano

from ..comm.communicator import Communicator
from ..devices.context_map import HOST, Context
from ..devices.nccl import communicator_of
from ..exchange.host import HostChannel, Stays
from ..exchange.nccl_channel import NcclChannel, NcclSum
from ..exchange.orders import AnyOrder, TreeOrder
from ..exchange.tree_devices import InTree
from ..plan import Part, StepPlan, SumGroup
from ..utils.timeline import Timings


class GroupExchange(NamedTuple):
    """The exchange of the sums of a group."""

    order: Any    # AnyOrder or TreeOrder: it adds the parts of each round where they are
    channel: Any  # HostChannel, NcclChannel or Stays: it adds the parts that all replicas have


def exchanges_of(plan: StepPlan, ranks: Communicator, memories: Any, launcher: Any,
                 timings: Timings) -> dict[SumGroup, GroupExchange]:
    """Return the exchange of each group of sums."""
    read_on: dict[Context, set[theano.Variable]] = {context: set() for context in [*plan.mesh.contexts, HOST]}
    for part in plan.parts:
        for context in part.contexts:
            read_on[context].update(part.given)
    one_replica = plan.machine.size == len(plan.mesh.replicas) == 1

    def exchange_of(part: Part, group: SumGroup) -> GroupExchange:
        way = group.way
        order: Any = TreeOrder(memories, launcher) if way.in_tree else AnyOrder(memories, launcher)
        if one_replica and (not way.in_tree or all(context.kind != 'cpu' for context in part.contexts)):
            return GroupExchange(order, Stays())
        if not way.by_devices:
            wanted = {context: [i for i, each in enumerate(group.exchanges) if each.variable in read]
                      for context, read in read_on.items()}
            return GroupExchange(order, HostChannel(order, way.owners, wanted, memories, launcher, timings, ranks))
        adder: Any = InTree(order, memories, launcher) if way.in_tree else NcclSum()
        return GroupExchange(order, NcclChannel(communicator_of(part.contexts, ranks.size), way.owners, adder, memories,
                                           timings, ranks))
    return {group: exchange_of(part, group) for part in plan.parts for group in part.sums}
