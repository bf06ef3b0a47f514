"""Sums of logical shards that devices add: NCCL sends their nodes to all devices, and each adds them in one order."""
from __future__ import annotations

import functools
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from ...comm.tree import Tree, folded
from ...devices.context_map import Context
from ...devices.cuda_libraries.nccl import DTYPES
from ...devices.nccl import BROADCAST, NO_COPIES, Collectives, Copies, NcclCommunicator
from ..launcher import Launcher
from ..replicas.transfers import ALIGNED
from .devices import Layout, Received
from .orders import Parts, TreeOrder

PIECE = 1 << 24  # bytes of each node that devices send each other at a time


class Range(NamedTuple):
    """Elements of one array of a node, and the place that they take in the memory for a piece of their dtype."""

    number: int
    dtype: str
    start: int
    stop: int
    place: int


class OwnNode(NamedTuple):
    """A node of the tree on the device that has computed it.

    Attributes
    ----------
    sources : list
        Its arrays, one for each sum.
    packed : Received
        Memory that the small ones are copied into, and the large ones.
    arrays : list
        The arrays that are sent, as by `Layout.arrays`.
    """

    sources: Sequence[Any]
    packed: Received
    arrays: Sequence[Any]

    def part(self, elements: Range) -> Any:
        """Return some elements."""
        return self.arrays[elements.number][elements.start:elements.stop]


class ReceivedNode(NamedTuple):
    """Memory on a device for a piece of a node of another device, by dtype."""

    memory: dict[str, Any]

    def part(self, elements: Range) -> Any:
        """Return the memory for some elements."""
        length = elements.stop - elements.start
        return self.memory[elements.dtype][elements.place:elements.place + length]


class InTree:
    """The addition of logical shards by each device, in the order of the tree.

    NCCL sends the nodes of each device to all devices, piece by piece, so that the nodes of other devices take little
    memory. Each device adds a piece of all nodes by one kernel.

    Parameters
    ----------
    order : TreeOrder
    memories : Memories
    launcher : Launcher
    """

    def __init__(self, order: TreeOrder, memories: Any, launcher: Launcher) -> None:
        self._tree_order, self._memories, self._launcher = order, memories, launcher
        self._pieces: list[list[Range]] = []
        self._room: dict[str, int] = {}    # elements of the largest piece, by dtype
        self._layout = Layout([])
        self._devices: Sequence[int] = ()  # of each node, from left to right; devices of all ranks count
        self._order = ''                   # of the additions

    def use(self, layout: Layout, parts: Parts) -> None:
        """Prepare for parts of a layout."""
        if layout is not self._layout:
            self._layout, self._pieces, self._room = layout, list(pieces(layout)), {}
            for each in (each for piece in self._pieces for each in piece):
                self._room[each.dtype] = max(self._room.get(each.dtype, 0), each.place + each.stop - each.start)
        self._devices, self._order = order_of(self._tree_order.tree.of_replicas)

    def own(self, layout: Layout, parts: Parts, context: Context, place: int, memory: Any) -> list[Any]:
        """Return a context's nodes, and memory for the other nodes."""
        own = iter([part for part, other in zip(parts.arrays, parts.contexts) if other == context])
        for dtype in set(layout.names):
            memory.kernel(dtype, self._order, len(self._devices))  # compiled before other ranks begin to wait
        return [self._own(memory, next(own)) if device == place else self._of_another(memory)
                for device in self._devices]

    def cleared(self, own: list[Any], memory: Any) -> list[Any]:
        """Return what a context of a rank without samples sends: it has no nodes, and receives the others'."""
        return own

    def _own(self, memory, part):
        sources = list(map(memory.contiguous, part))
        packed = self._layout.packed(memory, {i: sources[i] for i in self._layout.large})
        return OwnNode(sources, packed, self._layout.arrays(packed))

    def _of_another(self, memory):
        return ReceivedNode({dtype: memory.empty((size,), dtype) for dtype, size in self._room.items()})

    def enqueue(self, communicator: NcclCommunicator, layout: Layout, every_own: Sequence[Any],
                every_received: Sequence[Received]) -> None:
        """Enqueue the addition on all devices of this process."""
        copies, contexts = self._copies(every_own), communicator.contexts
        totals = list(map(layout.arrays, every_received))
        for piece in self._pieces:
            communicator.exchange(copies, self._broadcasts(piece, every_own))
            copies = NO_COPIES
            self._launcher.run('all_reduce', [functools.partial(self._add_nodes, *each, piece)
                                              for each in zip(contexts, every_own, totals)], contexts)

    def _copies(self, arrays):
        """Return the copies of small arrays into the memory that is sent; devices have different numbers of nodes."""
        copied = self._layout.copied
        of_devices = [[(node.packed.views[i].gpudata, node.sources[i].gpudata) for node in nodes
                       if isinstance(node, OwnNode) for i in copied] for nodes in arrays]
        most = max(map(len, of_devices))
        table = np.array([pairs + [(0, 0)] * (most - len(pairs)) for pairs in of_devices], 'uint64')
        to, source = np.ascontiguousarray(table.reshape(len(arrays), most, 2).transpose(2, 0, 1))
        return Copies(to, source, np.tile(self._layout.bytes, most // max(1, len(copied))))

    def _broadcasts(self, piece, arrays):
        """Return the broadcasts of a piece of every node; it stays in place on the device that has it."""
        addresses = np.array([[node.part(each).gpudata for node in nodes for each in piece] for nodes in arrays],
                             'uint64')
        sizes = [(each.stop - each.start) * np.dtype(each.dtype).itemsize for each in piece]
        n = len(self._devices)
        return Collectives(addresses, addresses, np.array(sizes * n, 'uint64'),
                           np.full(n * len(piece), DTYPES['uint8'], 'int32'),
                           np.full(n * len(piece), BROADCAST, 'int32'),
                           np.repeat(np.array(self._devices, 'int32'), len(piece)))

    def _add_nodes(self, context, nodes, totals, piece):
        """Add a piece of all nodes on a device, for the sums that it gets."""
        for each in piece:
            if totals[each.number] is not None:
                kernel = self._memories[context].kernel(each.dtype, self._order, len(nodes))
                kernel(totals[each.number][each.start:each.stop],
                                                  *[node.part(each) for node in nodes])


@functools.lru_cache(maxsize=None)
def order_of(counts: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return the device of each node, from left to right, and the order in which nodes are added, as an expression.

    Parameters
    ----------
    counts : tuple of int
        The number of logical shards that each device computes.

    Examples
    --------
    >>> order_of((4, 0, 4)), order_of((3, 2))
    (((0, 2), '(n0 + n1)'), ((0, 0, 1, 1), '((n0 + (n1 + n2)) + n3)'))
    """
    tree = Tree(0, counts)
    nodes = [(device, node) for device in range(len(counts)) for node in tree.nodes_of(device)]
    (_, _, text), = tree.merged([node._replace(value='n%d' % i) for i, (_, node) in enumerate(nodes)],
                                lambda chain, level, place: folded(chain, '({} + {})'.format))
    return tuple(device for device, _ in nodes), text


def pieces(layout: Layout) -> Iterator[list[Range]]:
    """Yield the pieces of a node that devices send each other, of at most `PIECE` bytes."""
    piece: list[Range] = []
    free, places = PIECE, dict.fromkeys(layout.names, 0)
    for number, (count, dtype) in enumerate(zip(layout.counts.tolist(), layout.names)):
        size, start = np.dtype(dtype).itemsize * ALIGNED, 0
        while start < count:
            stop = min(count, start + free // size * ALIGNED)
            if stop > start:
                piece.append(Range(number, dtype, start, stop, places[dtype]))
                n = -(-(stop - start) // ALIGNED)
                places[dtype] += n * ALIGNED
                free -= n * size
            if stop < count:
                yield piece
                piece, free, places = [], PIECE, dict.fromkeys(layout.names, 0)
            start = stop
    if piece:
        yield piece
