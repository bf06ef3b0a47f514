"""The exchange of the sums of a group: an order, and a channel; and sums over the ranks that are under way."""
from __future__ import annotations

import threading
from typing import Any, NamedTuple, Sequence

import theano

from ...comm.activities import ADD
from ...comm.communicator import Communicator
from ...devices.context_map import HOST, Context
from ...devices.nccl import communicator_of
from ...plan import Part, StepPlan, SumGroup
from ...utils.worker_threads import Task, WorkerThreads
from ..timeline import Timings, span
from .checked import Checked
from .devices import NcclChannel, Reduction
from .host import HostChannel, Stays
from .orders import AnyOrder, TreeOrder
from .tree_devices import InTree


class Exchange(NamedTuple):
    """The exchange of the sums of a group.

    Attributes
    ----------
    order : AnyOrder or TreeOrder
        It adds the parts of each round where they are.
    channel : HostChannel, Checked or Stays
        It adds what all replicas have.
    """

    order: Any
    channel: Any


def exchanges_of(plan: StepPlan, ranks: Communicator, memories: Any, launcher: Any, timings: Timings,
                 connected: Any = communicator_of) -> dict[SumGroup, Exchange]:
    """Return the exchange of each group of sums.

    Parameters
    ----------
    plan : StepPlan
    ranks : Communicator
    memories : Memories
    launcher : Launcher
    timings : Timings
    connected : callable
        ``connected(contexts, n_ranks)`` returns their NcclCommunicator.
    """
    read_on: dict[Context, set[theano.Variable]] = {context: set() for context in [*plan.mesh.contexts, HOST]}
    for part in plan.parts:
        for context in part.contexts:
            read_on[context].update(part.given)
    one_replica = plan.machine.size == len(plan.mesh.replicas) == 1

    def exchange_of(part: Part, group: SumGroup) -> Exchange:
        way = group.way
        order: Any = TreeOrder(memories, launcher) if way.in_tree else AnyOrder(memories, launcher)
        if one_replica and (not way.in_tree or all(context.kind != 'cpu' for context in part.contexts)):
            return Exchange(order, Stays())
        wanted = {context: [i for i, each in enumerate(group.exchanges) if each.variable in read]
                  for context, read in read_on.items()}
        host = HostChannel(order, () if way.by_devices else way.owners, way.half, wanted, memories, launcher, timings)
        if not way.by_devices:
            return Exchange(order, host)
        adder: Any = InTree(order, memories, launcher) if way.in_tree else Reduction()
        channel = NcclChannel(connected(part.contexts, ranks.size), way.owners, adder, memories, timings)
        return Exchange(order, Checked(channel, host, way.in_tree, ranks))
    return {group: exchange_of(part, group) for part in plan.parts for group in part.sums}


class OverRanks:
    """The addition of sums over the ranks, in place: in order, or each while the next part of a stage is computed.

    The sums of an idle rank, which has no samples, are 0.

    Parameters
    ----------
    ranks : Communicator
    timings : Timings
    overlaps : bool
        Whether `start` adds on a thread of its own. The ranks exchange a handshake before, in the thread that calls.
        So an error of one rank is found as in a step without overlap.

    Attributes
    ----------
    overlaps : bool
    underway : dict of HostChannel to Task
        Sums of a later boundary may be among them.
    """

    def __init__(self, ranks: Communicator, timings: Timings, overlaps: bool):
        self._ranks, self._timings = ranks, timings
        self.overlaps = overlaps and ranks.size > 1
        self._threads = WorkerThreads([_add_over] * self.overlaps, 'theano_mgpu exchange')
        self.underway: dict[HostChannel, Task] = {}

    def wait(self) -> None:
        """Wait for the sums under way; also after an error, since the other ranks add, too."""
        self._threads.finish(self.underway.values())
        self.underway = {}

    def start(self, sums: HostChannel, idle: bool) -> None:
        """Begin to add on the thread for it; devices need none."""
        if not sums.by_host:
            return
        self._meet([sums], idle)
        begun, busy = threading.Lock(), any(not each.done() for each in self.underway.values())
        begun.acquire()
        self.underway[sums] = task = Task(sums, self._ranks, begun)
        self._threads.submit(task)
        if not busy:
            begun.acquire()  # Theano's compiled code keeps Python's lock: without this, the thread would start after it

    def finish(self, every_sums: Sequence[HostChannel], idle: bool) -> None:
        """Add the rest of these sums, and end those under way: ranks have to exchange values in one order."""
        if self._ranks.size == 1:
            return
        with self._timings.span('exchange'):
            for each in self.underway.values():
                each.result()
        rest = [sums for sums in every_sums if sums not in self.underway]
        if rest:
            self._meet(rest, idle)
            with self._timings.span('exchange'):
                for sums in rest:
                    sums.add_over(self._ranks)

    def _meet(self, every_sums, idle):
        for sums in every_sums if idle else ():
            sums.clear()
        with self._timings.span('wait'):
            on_devices = [sums for sums in every_sums if not sums.by_host]
            if not on_devices:
                self._ranks.handshake((ADD,))
            elif not self._ranks.handshake((ADD,), [all(sums.is_ready for sums in on_devices)]).all():
                for sums in on_devices:
                    sums.use_host()


def _add_over(sums, ranks, begun):
    begun.release()
    with span('exchange', 'exchange'):
        sums.add_over(ranks)
