"""The orders in which parts of sums are added: any order, or the tree of logical shards."""
from __future__ import annotations

import functools
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ...comm.communicator import Communicator
from ...comm.half_precision import all_reduce_in_half
from ...comm.host_sum import all_reduce
from ...comm.tree import Node, Tree, add_arrays, add_over_ranks
from ...comm.tree_products import Product, add_products
from ...devices.context_map import Context
from ..batch import Shard, Split
from ..launcher import Launcher
from ..replicas.transfers import FlatBuffers, describe


class Parts(NamedTuple):
    """The parts of sums that replicas have once all shards are computed.

    Attributes
    ----------
    like : list of (shape, dtype)
        Of the sums.
    arrays : list of list
        For each part its arrays, one for each sum.
    shards : list of Shard
    contexts : list of Context
    nodes : list of Node
        The places of the parts in the tree, if that is the order.
    """

    like: Sequence[Any]
    arrays: Sequence[Sequence[Any]]
    shards: Sequence[Shard]
    contexts: Sequence[Context]
    nodes: Sequence[Node] = ()


def _phase(contexts):
    """Return the phase of a step that an addition on some contexts counts for."""
    return 'all_reduce' if contexts[0].kind == 'cpu' else 'launch'


class AnyOrder:
    """Any order: the parts of a replica's micro-batches are added as they come, and so are the sums of all replicas.

    Parameters
    ----------
    memories : dict of Context to (OnHost or OnDevice)
    launcher : Launcher
    """

    is_any, n_nodes = True, 1

    def __init__(self, memories: Mapping[Context, Any], launcher: Launcher) -> None:
        self._memories, self._launcher = memories, launcher
        self._held: dict[int, Any] = {}  # the shard, context and part of each replica

    def add(self, split: Split, number: int, contexts: Sequence[Context],
            parts: Sequence[Sequence[Any]]) -> Parts | None:
        """Add the parts of some shards where they are; return all parts after the last round.

        Parameters
        ----------
        split : Split
            Of the batch.
        number : int
            The number of the round whose shards have computed their parts.
        contexts : list of Context
            The context that each of the shards has its part on.
        parts : list of list of (ndarray or pygpu.gpuarray.GpuArray)
            For each of the shards its part of each sum.
        """
        shards, n_rounds = split.rounds[number], len(split.rounds)
        if n_rounds == 1:
            return Parts(describe(parts[0]), parts, shards, contexts)
        if number:
            parts = self._launcher.run(_phase(contexts), [
                functools.partial(self._memories[context].add, [self._held[shard.replica][-1], part])
                for shard, context, part in zip(shards, contexts, parts)], contexts, shards)
        else:
            self._held = {}
        self._held.update((each[0].replica, each) for each in zip(shards, contexts, parts))
        if number < n_rounds - 1:
            return None
        held, self._held = list(self._held.values()), {}
        shards, contexts, parts = zip(*held)
        return Parts(describe(parts[0]), parts, shards, contexts)

    def drop(self) -> None:
        """Free what a failed step has left."""
        self._held = {}

    def add_up(self, parts: Parts, arrays: Sequence[Sequence[np.ndarray]],
               targets: Sequence[Sequence[np.ndarray]], numbers: slice) -> None:
        """Write the sums of some arrays of the parts, fetched to the host.

        Parameters
        ----------
        parts : Parts
        arrays : list of list of ndarray
            For each part the arrays of the sums `numbers`.
        targets : list of list of ndarray
            For each of the `n_nodes` nodes that remain, memory for these sums.
        numbers : slice
        """
        for each, out in zip(zip(*arrays), targets[0]):
            all_reduce(each, out)

    def add_over(self, ranks: Communicator, buffers: Sequence[FlatBuffers], views: Sequence[np.ndarray],
                 owners: Sequence[int], half: bool) -> Sequence[Any]:
        """Add sums over the ranks, which have just had a handshake; return them, None for one of another owner.

        Parameters
        ----------
        ranks : Communicator
        buffers : list of FlatBuffers
            For each node that remains, its memory.
        views : list of ndarray
            The sums of this rank.
        owners : list of int
            The rank that alone gets each sum; empty if every rank gets them.
        half : bool
            Whether the ranks exchange float16.
        """
        if owners:
            return ranks.reduce_scatter(views, owners)
        if half:
            all_reduce_in_half(ranks, views)
        else:
            ranks.all_reduce(list(buffers[0].flat.values()))
        return views


class TreeOrder:
    """The order of the tree of logical shards: the nodes of each replica where they are, then the nodes of all.

    An addition has the same bits on the host and on devices, as IEEE 754 has it. Large products of shards on the host
    are computed and added last, see `add_products`.

    Parameters
    ----------
    memories, launcher
        As for `AnyOrder`.

    Attributes
    ----------
    tree : Tree
        Of the batch.
    """

    is_any = False

    def __init__(self, memories: Mapping[Context, Any], launcher: Launcher) -> None:
        self._memories, self._launcher, self.tree = memories, launcher, Tree(0, (1,))
        self._nodes: dict[int, Any] = {}  # the nodes of each replica, a shard, and the context
        self._products: dict[int, dict[int, Product]] = {}  # of each sum, by the number of the shard

    @property
    def n_nodes(self) -> int:
        """The number of nodes that the shards of this rank come to."""
        return max(1, len(self.tree.nodes_of(self.tree.rank)))

    def add(self, split: Split, number: int, contexts: Sequence[Context],
            parts: Sequence[Sequence[Any]]) -> Parts | None:
        """Do as `AnyOrder.add`; a process without samples has no parts."""
        shards = split.rounds[number]
        assert split.tree is not None
        if number == 0:
            self.drop()
            self.tree = split.tree
        if not split.idle:
            self._launcher.run(_phase(contexts), [functools.partial(self._merge, *each) for each in
                                                  zip(shards, contexts, map(self._without_large, shards, parts))],
                               contexts, shards)
        if number < len(split.rounds) - 1:
            return None
        of_replicas = sorted(self._nodes.items())
        self._nodes = {}
        nodes = [(node, *place) for _, (own, *place) in of_replicas for node in own]
        return Parts(describe(parts[0]), [node.value for node, *_ in nodes], [shard for _, shard, _ in nodes],
                     [context for *_, context in nodes], [node for node, *_ in nodes])

    def drop(self) -> None:
        """Free what a failed step has left."""
        self._nodes, self._products = {}, {}

    def _without_large(self, shard, part):
        """Return a part with small products computed; large ones are kept for later, with None in their place."""
        part = list(part)
        for i, value in enumerate(part):
            if isinstance(value, Product):
                part[i] = value.computed() if value.is_small else None
                if part[i] is None:
                    self._products.setdefault(i, {})[shard.number] = value
        return part

    def _merge(self, shard, context, part):
        nodes, *_ = self._nodes.setdefault(shard.replica, ([], shard, context))
        self.tree.merge(nodes, Node(0, shard.number, part), lambda chain, *_: self._memories[context].add(chain))

    def add_up(self, parts: Parts, arrays: Sequence[Sequence[np.ndarray]],
               targets: Sequence[Sequence[np.ndarray]], numbers: slice) -> None:
        """Do as `AnyOrder.add_up`."""
        last = {node[:2]: i for i, node in enumerate(self.tree.nodes_of(self.tree.rank))}
        for number, terms, outs in zip(range(len(parts.like))[numbers], zip(*arrays), zip(*targets)):
            if number in self._products:
                add_products(self.tree, sorted(self._products.pop(number).items()), outs)
                continue

            def add(chain, level, place, outs=outs):
                out = outs[last[level, place]] if (level, place) in last else np.empty_like(chain[0])
                add_arrays(chain, out)
                return out
            nodes = [node._replace(value=value) for node, value in zip(parts.nodes, terms)]
            for out, node in zip(outs, self.tree.merged(nodes, add)):
                if node.value is not out:
                    out[...] = node.value

    def add_over(self, ranks: Communicator, buffers: Sequence[FlatBuffers], views: Sequence[np.ndarray],
                 owners: Sequence[int], half: bool) -> Sequence[Any]:
        """Do as `AnyOrder.add_over`: each rank gets some elements of all nodes, and adds these."""
        nodes, whole = self.tree.nodes_of(self.tree.rank), buffers[0]
        for dtype, flat in whole.flat.items():
            blocks = _blocks(whole, dtype, ranks.size, owners)
            own = add_over_ranks(ranks, self.tree, [node._replace(value=each.flat[dtype]) for node, each in
                                                    zip(nodes, buffers)], blocks, dtype)
            if owners:
                flat[slice(*blocks[ranks.rank])] = own
            else:
                ranks.all_gather(own, flat, [stop - start for start, stop in blocks])
        return [view if owner == ranks.rank else None for view, owner in zip(views, owners)] if owners else views


def _blocks(whole, dtype, n_ranks, owners):
    """Return the elements of a flat array that each rank adds."""
    if not owners:
        bounds = [whole.flat[dtype].size * rank // n_ranks for rank in range(n_ranks + 1)]
        return list(zip(bounds, bounds[1:]))
    blocks, end = [], 0
    for rank in range(n_ranks):
        own = [place for place, owner, (_, other) in zip(whole.places, owners, whole.like)
               if owner == rank and other == dtype]
        blocks.append((own[0].start, own[-1].stop) if own else (end, end))
        end = blocks[-1][1]
    return blocks
