"""The orders in which parts of sums are added: any order, or the tree of logical shards."""
from __future__ import annotations

import functools
from typing import Any, NamedTuple, Sequence

import numpy as np

from ..comm.communicator import Communicator
from ..comm.host_sum import all_reduce_each, describe
from ..comm.tree import Node, add_arrays, add_over_ranks
from ..comm.tree_products import Product, add_products
from ..devices.context_map import Context
from ..devices.launcher import Shard
from ..errors import GraphError


class Parts(NamedTuple):
    """The parts of sums that replicas have once all shards are computed; none on a rank without samples."""

    like: Sequence[Any]              # the shape and dtype of each sum
    arrays: Sequence[Sequence[Any]]  # of each part, one for each sum
    shards: Sequence[Shard]
    contexts: Sequence[Context]
    nodes: Sequence[Node] = ()       # the places of the parts in the tree, if that is the order


class Order:
    """An order: the base of `AnyOrder` and `TreeOrder`."""

    def __init__(self, memories: Any, launcher: Any) -> None:
        self._memories, self._launcher = memories, launcher
        self._nodes: dict[int, Any] = {}  # the nodes of each replica, a shard, and the context
        self.tree: Any = None
        self._like: Any = None  # the shapes and dtypes of the sums

    def add(self, split: Any, number: int, contexts: Sequence[Context],
            parts: Sequence[Sequence[Any]]) -> Parts | None:
        """Add the parts of the shards of a round where they are; return what replicas have after the last round.

        A shard has a context, and a part of each sum. A GraphError says if the parts have different shapes.
        """
        shards, n_rounds = split.rounds[number], len(split.rounds)
        if number == 0:
            self.drop()
            self.tree, self._like = split.tree, describe(parts[0])
        for part, context in zip(parts, contexts):
            if describe(part) != self._like:
                raise GraphError('the replicas have gradients, or other sums, of different shapes: %s, and on %s %s'
                                 % (self._like, context.name, describe(part)))
        if split.idle:
            return Parts(self._like, [], [], [])
        if split.tree is None and n_rounds == 1:
            return Parts(self._like, parts, shards, contexts)
        self._launcher.run('all_reduce' if contexts[0].kind == 'cpu' else 'launch',
                           [functools.partial(self._take, *each) for each in zip(shards, contexts, parts)],
                           contexts, shards)
        if number < n_rounds - 1:
            return None
        of_replicas, self._nodes = sorted(self._nodes.items()), {}
        nodes = [(node, *place) for _, (own, *place) in of_replicas for node in own]
        return Parts(self._like, [node.value for node, *_ in nodes], [shard for _, shard, _ in nodes],
                     [context for *_, context in nodes], [node for node, *_ in nodes])

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes, each with a part of all sums, that the parts of this rank come to."""
        return 1

    def _take(self, shard, context, part):
        own, *_ = self._nodes.setdefault(shard.replica, ([], shard, context))
        self._join(own, Node(0, shard.number, part), self._memories[context].add)

    def drop(self) -> None:
        """Free the parts that a failed step has left."""
        self._nodes = {}


class AnyOrder(Order):
    """Any order: the parts of a replica's micro-batches are added as they come, and so are the sums of all replicas."""

    def _join(self, nodes, node, add):
        nodes[:] = [node._replace(value=add([nodes[0].value, node.value])) if nodes else node]

    def add_up(self, parts: Parts, arrays: Sequence[Sequence[np.ndarray]],
               targets: Sequence[Sequence[np.ndarray]]) -> None:
        """Write the sums of arrays of the parts, or of blocks of them, to the arrays of each node that remains."""
        if arrays:
            all_reduce_each(arrays, targets[0])
            return
        for target in targets[0]:
            target[...] = 0

    def add_over(self, ranks: Communicator, nodes: Sequence[Sequence[np.ndarray]], owners: Sequence[int]) -> None:
        """Add a block of sums over the ranks, which have just had a handshake, in the memory of the first node.

        The ranks that alone get an array are its `owners`; without any, every rank gets all.
        """
        arrays = nodes[0]
        if owners:
            for array, total in zip(arrays, ranks.reduce_scatter(arrays, owners)):
                if total is not None:
                    array[...] = total
        else:
            ranks.all_reduce(arrays)


class TreeOrder(Order):
    """The order of the tree of logical shards: the nodes of each replica where they are, then the nodes of all.

    An addition has the same bits on the host and on devices, as IEEE 754 has it. Large products of shards on the host
    are computed and added last, see `add_products`.
    """

    @property
    def n_nodes(self) -> int:
        return max(1, len(self.tree.nodes_of(self.tree.rank)))

    def _join(self, nodes, node, add):
        part = [self._without_large(i, node.place, value) if isinstance(value, Product) else value
                for i, value in enumerate(node.value)]
        self.tree.merge(nodes, node._replace(value=part), lambda chain, *_: add(chain))

    def _without_large(self, i, number, product):
        """Return a small product of a shard; keep a large one for later, and return None in its place."""
        if product.is_small:
            return product.computed()
        self._products.setdefault(i, {})[number] = product
        return None

    def drop(self) -> None:
        super().drop()
        self._products: dict[int, dict[int, Product]] = {}  # of each sum, by the number of the shard

    def add_up(self, parts: Parts, arrays: Sequence[Sequence[np.ndarray]],
               targets: Sequence[Sequence[np.ndarray]]) -> None:
        """Do as `AnyOrder.add_up`."""
        last = {node[:2]: i for i, node in enumerate(self.tree.nodes_of(self.tree.rank))}
        for number, (terms, outs) in enumerate(zip(zip(*arrays), zip(*targets))):
            if number in self._products:  # on the host, which has all sums in one block
                add_products(self.tree, sorted(self._products.pop(number).items()), outs)
                continue

            def add(chain, level, place, outs=outs):
                out = outs[last[level, place]] if (level, place) in last else np.empty_like(chain[0])
                return add_arrays(chain, out)
            nodes = [node._replace(value=value) for node, value in zip(parts.nodes, terms)]
            for out, node in zip(outs, self.tree.merged(nodes, add)):
                if node.value is not out:
                    out[...] = node.value

    def add_over(self, ranks: Communicator, nodes: Sequence[Sequence[np.ndarray]], owners: Sequence[int]) -> None:
        """Do as `AnyOrder.add_over`: each rank gets some elements of all nodes, and adds these."""
        places = self.tree.nodes_of(self.tree.rank)
        for i, (total, *_) in enumerate(zip(*nodes)):
            bounds = [total.size * rank // ranks.size for rank in range(ranks.size + 1)] if not owners else \
                [total.size * (rank > owners[i]) for rank in range(ranks.size + 1)]
            blocks = list(zip(bounds, bounds[1:]))
            own = add_over_ranks(ranks, self.tree, [place._replace(value=arrays[i]) for place, arrays in
                                                    zip(places, nodes)], blocks, total.dtype)
            if not owners:
                ranks.all_gather(own, total, [stop - start for start, stop in blocks])
            elif owners[i] == ranks.rank:
                total[...] = own
