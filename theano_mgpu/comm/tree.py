"""Sums of logical shards in one fixed binary tree, so that their bits depend on the number of shards alone."""
from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Sequence

import numpy as np

from .communicator import Communicator
from .host_sum import all_reduce

Add = Callable[[List[Any], int, int], Any]


class Node(NamedTuple):
    """A node of the tree: `value` is the sum of the shards ``place << level`` to before ``(place + 1) << level``."""

    level: int
    place: int
    value: Any


class Tree(NamedTuple):
    """The tree over the logical shards of a batch, from the view of one rank.

    `counts` and `of_replicas` have the number of shards that each rank, and each replica of all ranks, computes, the
    latter where it is known. The shards lie in the order of the ranks.
    """

    rank: int
    counts: tuple[int, ...]
    of_replicas: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The number of shards of all ranks."""
        return sum(self.counts)

    def first(self, rank: int) -> int:
        """Return the number of the first shard of a rank."""
        return sum(self.counts[:rank])

    def merge(self, nodes: list[Node], node: Node, add: Add) -> int:
        """Put a node after others, and add those that belong together; return how many of the others it was added to.

        The nodes are neighbours, from left to right, which this method has put together; `node` is their right one.
        ``add(values, level, place)`` returns the sum of values, as `folded`, for the node at a place of a level. A node
        without a right neighbour moves up as it is. Of neighbours from an even place on, n leave at most log2(n) + 1.
        """
        level, place, value = node
        chain = [value]
        while True:
            while place and place % 2 == 0 and (place + 1) << level >= self.total:
                level, place = level + 1, place // 2
            if not (place % 2 and nodes and nodes[-1][:2] == (level, place - 1)):
                break
            chain.insert(0, nodes.pop().value)
            level, place = level + 1, place // 2
        nodes.append(Node(level, place, add(chain, level, place) if len(chain) > 1 else value))
        return len(chain) - 1

    def merged(self, nodes: Sequence[Node], add: Add) -> list[Node]:
        """Return what nodes come to, from left to right; all shards come to one node."""
        whole: list[Node] = []
        for node in nodes:
            self.merge(whole, node, add)
        return whole

    def nodes_of(self, rank: int) -> list[Node]:
        """Return the nodes that the shards of a rank come to, without values."""
        first = self.first(rank)
        return self.merged([Node(0, first + i, None) for i in range(self.counts[rank])], lambda *_: None)

    def reduced(self, values: Sequence[Any], ufunc: Callable[[Any, Any], Any]) -> Any:
        """Return the values of all shards, reduced two by two."""
        (_, _, value), = self.merged([Node(0, i, each) for i, each in enumerate(values)],
                                     lambda chain, level, place: folded(chain, ufunc))
        return value


def folded(values: Sequence[Any], add: Callable[[Any, Any], Any]) -> Any:
    """Return the sum of values: of the last one and the one before it first, and so on."""
    value = values[-1]
    for other in values[-2::-1]:
        value = add(other, value)
    return value


def add_arrays(values: Sequence[np.ndarray], out: np.ndarray) -> np.ndarray:
    """Write the sum of arrays, as `folded`, to one piece of memory that none of them shares; return it."""
    if out.dtype == 'float16' and len(values) > 2:  # one addition at a time is rounded, as on a device
        out[...] = folded(values, np.add)
    else:
        all_reduce(values[::-1], out)
    return out


def add_over_ranks(ranks: Communicator, tree: Tree, nodes: Sequence[Node],
                   blocks: Sequence[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
    """Return the elements of the sum over all shards that one block has, on the rank of the block.

    Each rank sends each other one the elements of its nodes, after a handshake, and adds its own block in the order of
    the tree. Where the shards of a rank come to one node, this sends as many bytes as a reduce_scatter in a ring. The
    nodes, of the shards of this rank, have flat arrays of one size and dtype; `blocks` has the first and one-past-last
    element of the block of each rank.
    """
    start, stop = blocks[ranks.rank]
    size, empty = stop - start, np.empty(0, dtype)
    of_ranks = [tree.nodes_of(rank) for rank in range(ranks.size)]
    messages = [np.concatenate([empty] + [node.value[first:last] for node in nodes]) for first, last in blocks]
    received = ranks.all_to_all(messages, [len(others) * size for others in of_ranks])
    every_node = [node._replace(value=value) for others, message in zip(of_ranks, received)
                  for node, value in zip(others, message.reshape(len(others), size))]
    (_, _, value), = tree.merged(every_node, lambda values, *_: add_arrays(values, np.empty(size, dtype)))
    return value
