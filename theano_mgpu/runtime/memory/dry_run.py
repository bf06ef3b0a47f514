"""A step without its computation: `StepRun` over an executable whose arrays have no content."""
from __future__ import annotations

import contextlib
import sys
from typing import Any, Sequence

import numpy as np
from theano.gpuarray.type import GpuArrayType

from ...comm.alone import Alone
from ...devices.context_map import HOST, Context
from ...devices.copies import Copies
from ...devices.nccl import communicator_of
from ...devices.transfers import DeviceBuffers
from ...exchange.host import Sum
from ...exchange.layout import Layout
from ...exchange.over_ranks import OverRanks
from ...graph.analysis import SAME, STACK
from ...plan import Part
from ...utils.timeline import Timings
from ..batch import Batch
from ..device_broadcast import DeviceBroadcasts
from ..divided_update import UpdateOwners
from ..exchanges import exchanges_of
from ..executable import Executable
from ..step_run import StepRun
from ..transaction import Transaction
from .arrays import Array, Memory
from .function import DryFunction


def content(value: Any) -> np.ndarray | None:
    """Return the content of a value, where it is known: an array of NumPy is, as whole numbers that may be sizes."""
    return value.value if isinstance(value, Array) else value


def is_in(memory: Memory, value: Any) -> bool:
    """Return whether a value lies in a memory."""
    return isinstance(value, Array) and value.block.memory is memory


class DryRun(StepRun):
    """A step of a `DryExecutable`: it takes and frees the memory of values, and computes and sends nothing."""

    def __init__(self, executable: DryExecutable, batch: Batch) -> None:
        super().__init__(executable, batch)
        self._transaction = _Transaction(executable)
        self._memory, self._host = executable.memory, executable.memory[HOST]
        self.sizes: dict[int, Any] = {}  # bytes by slot

    def _run(self, steps):
        for name, instruction, ended in steps:
            getattr(self, name)(instruction)
            for slot in ended:
                self.sizes[slot] = getattr(self._slots[slot], 'nbytes', None)
                self._slots[slot] = None

    def _sent(self, variable, value, context, buffers):
        if isinstance(value, Sum):
            value = value.on(context)
        memory = self._memory[context]
        is_on_host = isinstance(value, np.ndarray) or is_in(self._host, value)
        if is_in(memory, value) or memory is self._host and is_on_host:
            return value
        arrays = buffers[context].arrays if is_on_host else {}
        if variable not in arrays or arrays[variable].shape != tuple(value.shape):
            arrays[variable] = memory.array(value.shape, value.dtype)  # before the old memory goes
        arrays[variable].value = content(value)
        return arrays[variable]

    def _on_host(self, value):
        return self._host.array(value.shape, value.dtype) if isinstance(value, Array) else value

    def _compute(self, work):
        part, memory, copies = work.part, self._memory[work.context], self._executable.copies
        arguments = [self._slots[slot] for slot in work.given]
        function = self._executable.parts[part].functions[work.place]
        dry, left = self._executable.dry_function(part, work.context, function, arguments)
        given = [content(value) if i in dry.numbers else tuple(value.shape) for i, value in enumerate(arguments)]
        on_device = [value if work.context.kind != 'cpu' and is_in(memory, value) else None for value in arguments]
        shared = [copies.get(id(each.storage)) for each in function.input_storage[len(arguments):]]
        results = dry.run(memory, on_device, shared, dry.shapes(given), left)
        for variable, slot, i in zip([*part.outputs, *part.updates], work.made, np.argsort(function.mgpu_order)):
            value = results[i]
            self._slots[slot] = value if isinstance(value, (Array, np.ndarray)) else \
                self._host.array(value or (), getattr(variable.type, 'dtype', 'int8'))

    def _gathered(self, parts, reductions, communicator):
        return [self._exchanged([self._slots[slot] for slot in part], reduction)
                for part, reduction in zip(parts, reductions)]

    def _exchanged(self, parts, reduction):
        """Return an exchanged value, from its parts in this process."""
        first, *_ = parts
        if reduction == SAME and content(first) is not None:
            return content(first)
        tree, axis, shape = self._split.tree, getattr(reduction, 'axis', None), first.shape
        n_shards = tree.total if tree else self._executable.plan.shares.n_replicas * len(self._split.rounds)  # about
        if reduction == STACK:
            shape = (n_shards, *shape)
        elif axis is not None:
            size = sum(part.shape[axis] for part in parts) * n_shards // len(parts)
            shape = (*shape[:axis], size, *shape[axis + 1:])
        return self._host.array(shape, first.dtype)

    def fetch(self, given):
        self._wait_for_exchanges()


class DryExecutable(Executable):
    """A twin of an executable: it takes and frees the memory of steps, and computes and sends nothing.

    A value on a device is an `Array`, and so is one on the host whose content is not known. Each object of the
    executable has a twin, too: a copy that inherits all but the methods that touch a device, or another rank.

    Parameters
    ----------
    executable : Executable
    functions : dict of (Part, str) to DryFunction
        The dry run of each part for a kind of context, as far as there has been one; it adds others.

    Attributes
    ----------
    memory : dict of Context to Memory
        One for each device, and one that all contexts on the host share.
    copies : dict of int to Array
        The copies of shared variables on devices, by the id of their storage.
    """

    def __init__(self, executable: Executable, functions: dict[tuple[Part, str], DryFunction]) -> None:
        idle, host = _Idle(), Memory()
        vars(self).update(vars(executable), launcher=idle, timings=idle)
        self.memory = {context: host if context.kind == 'cpu' else Memory()
                       for context in [*self.plan.mesh.contexts, HOST]}
        self.copies: dict[int, Array] = {}
        for variable in self.variables:
            for context, copy in variable.copies.items():
                value, key = copy.container.storage[0], id(copy.container.storage)
                if context in self.memory and key not in self.copies and \
                        isinstance(copy.type, GpuArrayType) and hasattr(value, 'dtype'):
                    self.copies[key] = self.memory[context].array(value.shape, value.dtype)
        self._functions = functions
        self._left: dict[tuple[Part, Context], tuple[dict[Any, Any], Array]] = {}
        self.over_ranks = OverRanks(Alone(), idle, False)
        memories, size = _Memories(self.memory), executable.communicator.size

        def connected(contexts, _):
            return _Nccl(communicator_of(contexts, size))
        self.exchanges = exchanges_of(self.plan, Alone(), memories, idle, idle, connected)
        self.by_devices = [channel for _, channel in self.exchanges.values() if not channel.by_host]
        if self.broadcasts:
            self.broadcasts = DeviceBroadcasts(self.plan.broadcasts, Alone(), memories, connected)
        self.owners = self.owners and _twin(_Owners, self.owners, host=host)
        self.update_buffers = {context: DeviceBuffers(context) for context in self.update_buffers}

    def dry_function(self, part: Part, context: Context, function: Any, arguments: Sequence[Any]) -> Any:
        """Return the dry run of a function, the same on all contexts of a kind, and what its calls have left here."""
        if (part, context.kind) not in self._functions:
            known = [i for i, value in enumerate(arguments) if content(value) is not None]
            self._functions[part, context.kind] = DryFunction(function, context.kind, known)
        dry = self._functions[part, context.kind]
        if (part, context) not in self._left:
            self._left[part, context] = {}, self.memory[context].array([dry.constants], 'int8')
        left, _ = self._left[part, context]
        return dry, left


def _twin(cls: Any, original: Any, **changes: Any) -> Any:
    """Return an object of a class with the attributes of an object of a base, but for some changes."""
    twin = cls.__new__(cls)
    vars(twin).update(vars(original), **changes)
    return twin


class _Idle(Timings):
    """A launcher that runs tasks in order, and timings that note nothing."""

    def run(self, name, tasks, contexts, shards=(), numbers=None):
        return [task() for task in tasks]

    def span(self, phase):
        return contextlib.nullcontext()


class _Memories(dict):
    """The memories of devices and of the host, as `Memories`."""

    computes, block = False, sys.maxsize

    def fetcher(self, context, layout, blocks, here):
        return _Fetcher(self[context], self[HOST], layout, here)

    def copies(self, context, n_blocks):
        return _Copies()

    def on_host(self, shape, dtype, context):
        return self[HOST].array(shape, dtype)


class _Fetcher:
    """A fetcher that takes the memory in which a `Fetcher` puts small arrays together."""

    is_beside = True

    def __init__(self, memory, host, layout, here):
        self.here = here
        self._there = Layout(layout.like, apart=True).allocated(memory.empty) if memory is not host else None

    def start(self, arrays):
        self._arrays = arrays

    def arrive(self, number):
        pass

    def drop(self):
        self._arrays = ()


class _Copies(Copies):
    """Copies that write nothing."""

    def write(self, pieces):
        pass


class _Nccl:
    """A communicator of NCCL that sends nothing."""

    has_failed, is_verified = False, True

    def __init__(self, communicator):
        self.contexts, self.first = communicator.contexts, communicator.first

    def exchange(self, *given):
        pass

    wait = exchange


class _Owners(UpdateOwners):
    """New values that ranks send each other."""

    def _gathered(self, owned, values):
        shapes = [(variable, variable.variable.container.storage[0].shape) for variable, owner in owned
                  if owner != self._ranks.rank]
        return {variable: self.host.array(shape, variable.variable.dtype) for variable, shape in shapes}


class _Transaction(Transaction):
    """The new values of a step; the old ones stay as long as it does."""

    def __init__(self, executable):
        super().__init__()
        self._memory, self._copies = executable.memory, executable.copies

    def replace(self, storages, values):
        for key, value in zip(map(id, storages), values):
            if key in self._copies:
                self._old.append(([], self._copies[key]))
                self._copies[key] = value

    def store_rows(self, variable, value):
        pass

    def replace_by_copy(self, shared, value, context):
        self.replace([shared.container.storage], [self._memory[context].array(value.shape, value.dtype)])
