"""Sums of logical shards that devices add: each adds a block of the elements in one order, and sends the sum to all."""
from __future__ import annotations

import functools
import itertools
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from ..comm.tree import Tree, folded
from ..devices.context_map import Context
from ..devices.exchange_operations import BROADCAST, EVERY, MESSAGE, NO_COPIES, Collectives, Copies
from ..devices.launcher import Launcher
from ..devices.nccl import ALL, NcclCommunicator
from ..devices.nccl_library import DTYPES
from .layout import ALIGNED, SMALL, Flat, Range, cut
from .nccl_channel import NcclLayout
from .orders import Parts, TreeOrder

PIECE = 1 << 24  # bytes of each node that devices send each other at a time


class OwnNode(NamedTuple):
    """A node of the tree on the device that has computed it."""

    sources: Sequence[Any]  # its arrays, one for each sum
    packed: Flat            # memory that the small ones are copied into, and the large ones
    arrays: Sequence[Any]   # the arrays that are sent, as by `NcclLayout.arrays`

    def part(self, elements: Range) -> Any:
        return self.arrays[elements.number][elements.start:elements.stop]


class ReceivedNode(NamedTuple):
    """Memory on a device for a piece of a node of another device, by dtype."""

    memory: dict[Any, Any]

    def part(self, elements: Range) -> Any:
        length = elements.stop - elements.start
        return self.memory[elements.dtype][elements.place:elements.place + length]


class InTree:
    """The addition of logical shards by each device, in the order of the tree.

    NCCL sends the nodes that the shards of a device come to, piece by piece, so that the nodes of other devices take
    little memory. Of each piece, a device receives its own block of all nodes, adds them by one kernel, and sends
    the sum to all devices while they exchange the next piece. A sum that one device alone gets is in its blocks, and
    stays there. A few bytes are not worth a second message: every device receives and adds them.
    """

    def __init__(self, order: TreeOrder, memories: Any, launcher: Launcher) -> None:
        self._tree_order, self._memories, self._launcher = order, memories, launcher
        self._pieces: list[list[Range]] = []
        self._room: dict[Any, int] = {}    # elements of the largest piece, by dtype
        self._layout = NcclLayout([])
        self._devices: Sequence[int] = ()  # of each node, from left to right; devices of all ranks count
        self._order = ''                   # of the additions

    def _use(self, layout):
        of_replicas = self._tree_order.tree.of_replicas
        self._devices, self._order = order_of(of_replicas)
        if layout is not self._layout:
            self._layout, self._pieces, self._room = layout, list(pieces(layout, len(of_replicas))), {}
            for each in (each for piece in self._pieces for each in piece):
                self._room[each.dtype] = max(self._room.get(each.dtype, 0), each.place + each.stop - each.start)

    def own(self, layout: NcclLayout, parts: Parts, context: Context, place: int, memory: Any) -> list[Any]:
        """Return a context's nodes, and memory for the other nodes."""
        self._use(layout)
        own = iter([part for part, other in zip(parts.arrays, parts.contexts) if other == context])
        for dtype in set(layout.dtypes):
            memory.kernel(dtype, self._order, len(self._devices))  # compiled before other ranks begin to wait
        return [self._own(memory, next(own)) if device == place else
                ReceivedNode({dtype: memory.empty((size,), dtype) for dtype, size in self._room.items()})
                for device in self._devices]

    def _own(self, memory, part):
        sources = list(map(memory.contiguous, part))
        packed = self._layout.allocated(memory.empty, {i: sources[i] for i in self._layout.large})
        return OwnNode(sources, packed, self._layout.arrays(packed))

    def enqueue(self, communicator: NcclCommunicator, layout: NcclLayout, every_own: Sequence[Any],
                every_received: Sequence[Flat]) -> int:
        """Enqueue the addition on all devices of this process, in the order of what they compute."""
        copies, contexts, first = self._copies(every_own), communicator.contexts, communicator.first
        totals = list(map(layout.arrays, every_received))
        for before, piece in zip([[], *self._pieces], [*self._pieces, []]):
            collectives = self._collectives(range(first, first + len(contexts)), every_own, piece, totals, before)
            if collectives.counts.size or copies.bytes.size:
                communicator.exchange(copies, collectives)
            copies = NO_COPIES
            if piece:
                self._launcher.run('all_reduce', [functools.partial(self._add_nodes, *each, piece) for each in
                                                  zip(itertools.count(first), contexts, every_own, totals)], contexts)
        return ALL

    def _copies(self, arrays):
        """Return the copies of small arrays into the memory that is sent; devices have different numbers of nodes."""
        copied = self._layout.small
        of_devices = [[(node.packed.views[i].gpudata, node.sources[i].gpudata) for node in nodes
                       if isinstance(node, OwnNode) for i in copied] for nodes in arrays]
        most = max(map(len, of_devices))
        table = np.array([pairs + [(0, 0)] * (most - len(pairs)) for pairs in of_devices], 'uint64')
        to, source = np.ascontiguousarray(table.reshape(len(arrays), most, 2).transpose(2, 0, 1))
        return Copies(to, source, np.tile(self._layout.bytes, most // max(1, len(copied))))

    def _collectives(self, places, arrays, piece, totals, before):
        """Return what sends a piece of every node to its adders, and the sums of the piece before to all devices."""
        rows, columns = [], []
        for each in piece:
            for i, source in enumerate(self._devices):
                if source != each.owner:
                    op, ends = (BROADCAST, places) if each.owner == EVERY else (MESSAGE, (source, each.owner))
                    rows.append([nodes[i].part(each).gpudata if place in ends else 0
                                 for place, nodes in zip(places, arrays)])
                    columns.append((each.bytes, op, source, each.owner))
        for each in before:
            if self._layout.roots[each.number] == EVERY != each.owner:
                rows.append([total[each.number][each.start:each.stop].gpudata for total in totals])
                columns.append((each.bytes, BROADCAST, each.owner, EVERY))
        addresses = np.array(rows, 'uint64').reshape(-1, len(arrays)).T
        sizes, *others = np.array(columns, 'int64').reshape(-1, 4).T
        ops, roots, targets = [each.astype('int32') for each in others]
        elsewhere = [(ops == MESSAGE) & (np.array(places)[:, None] != ends) for ends in (roots, targets)]
        send, receive = [np.ascontiguousarray(np.where(each, np.uint64(0), addresses)) for each in elsewhere]
        return Collectives(send, receive, sizes.astype('uint64'), np.full(len(ops), DTYPES['uint8'], 'int32'),
                           ops, roots, targets)

    def _add_nodes(self, place, context, nodes, totals, piece):
        for each in piece:
            if each.owner in (place, EVERY):
                kernel = self._memories[context].kernel(each.dtype, self._order, len(nodes))
                kernel(totals[each.number][each.start:each.stop], *[node.part(each) for node in nodes])


@functools.lru_cache(maxsize=None)
def order_of(counts: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return the device of each node, from left to right, and the order in which nodes are added, as an expression.

    >>> order_of((4, 0, 4)), order_of((3, 2))
    (((0, 2), '(n0 + n1)'), ((0, 0, 1, 1), '((n0 + (n1 + n2)) + n3)'))
    """
    tree = Tree(0, counts)
    nodes = [(device, node) for device in range(len(counts)) for node in tree.nodes_of(device)]
    (_, _, text), = tree.merged([node._replace(value='n%d' % i) for i, (_, node) in enumerate(nodes)],
                                lambda chain, level, place: folded(chain, '({} + {})'.format))
    return tuple(device for device, _ in nodes), text


def pieces(layout: NcclLayout, n: int) -> Iterator[list[Range]]:
    """Yield the pieces of a node that n devices send each other, of at most `PIECE` bytes, with the block of each."""
    whole = [Range(i, name, 0, count, 0, owner) for i, (name, count, owner) in
             enumerate(zip(layout.dtypes, layout.lengths.tolist(), layout.roots.tolist()))]
    shared = [each for each in whole if each.owner == EVERY]
    rounding = 8 * ALIGNED  # bytes that the end of an array or of a list may leave free
    size = sum(each.bytes + rounding for each in shared)
    if size <= SMALL:
        yield from cut(shared, PIECE)
        shared = []
    blocks = itertools.chain(cut(shared, size // n + rounding), itertools.repeat([]))
    of_devices = []
    for device, block in zip(range(n), blocks):
        own = block + [each for each in whole if each.owner == device]
        of_devices.append(cut([each._replace(owner=device) for each in own], PIECE // n))
    for piece in itertools.zip_longest(*of_devices, fillvalue=[]):
        yield list(itertools.chain(*piece))
