"""A second interpreter of the instructions of a step: it takes and frees the memory of values, and computes nothing."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from theano.gpuarray.type import GpuArrayType

from ...comm.communicator import Communicator
from ...comm.tree_products import Product
from ...devices.context_map import HOST, Context
from ...devices.copies import Copies
from ...devices.launcher import Launcher
from ...devices.nccl import communicator_of
from ...devices.transfers import DeviceBuffers
from ...exchange.host import Sum
from ...exchange.memory import Memories
from ...graph.analysis import SAME, STACK
from ...plan import Part
from ...utils.executors import SerialExecutor
from ...utils.timeline import Timings
from ..batch import Batch
from ..exchanges import exchanges_of
from ..executable import Executable, Factored
from ..replicas.replicated import replicated
from .arrays import Array, Memory
from .function import DryFunction
from .shapes import content


class DryRun:
    """Steps whose arrays have no content, of this process alone.

    A value on a device is an `Array`, and so is one on the host whose content is not known. Each class of instructions
    has a method of its name, as in `StepRun`. The exchanges are the real ones, over other memories.

    Attributes
    ----------
    memory : dict of Context to Memory
        One for each device, and one that all contexts on the host share.
    sizes : dict of int to int
        The bytes of the values of the latest step, by their slots.
    """

    def __init__(self, executable: Executable, functions: dict[tuple[Part, str], DryFunction]) -> None:
        self._executable, self._plan, self._functions = executable, executable.plan, functions
        self._host = host = Memory()
        self.memory = _Memories((context, host if context.kind == 'cpu' else Memory())
                                for context in [*self._plan.mesh.contexts, HOST])
        self._copies = {id(copy.container.storage): self.memory[context].array(value.shape, value.dtype)
                        for variable in executable.variables for context, copy in variable.copies.items()
                        for value in copy.container.storage
                        if context in self.memory and isinstance(copy.type, GpuArrayType) and hasattr(value, 'dtype')}
        self._old: list[Array] = []  # they stay until the step is committed
        self._left: dict[tuple[Part, Context], Any] = {}
        self._buffers = {context: DeviceBuffers(context) for context in self._plan.mesh.contexts}
        timings = Timings()
        self._exchanges = exchanges_of(
            self._plan, Communicator(), self.memory, Launcher(SerialExecutor(), timings), timings,
            lambda contexts, _: _idle(communicator_of(contexts, executable.communicator.size)))
        self.sizes: dict[int, int] = {}

    def run(self, batch: Batch) -> None:
        """Take and free memory as a step on a batch does."""
        self._batch, self._slots = batch, batch.slots
        for name, instruction, ended in [*batch.split.program.stages, *batch.split.program.update]:
            getattr(self, name)(instruction)
            for slot in ended:
                self.sizes[slot] = getattr(self._slots[slot], 'nbytes', 0)
                self._slots[slot] = None
        self._old = []

    def send(self, given):
        for moves, shard in zip(given.moves, given.shards):
            buffers = self._buffers if shard is None else self._batch.buffers[shard]
            for source, target, variable, context in moves:
                self._slots[target] = self._sent(variable, self._slots[source], context, buffers)

    def _sent(self, variable, value, context, buffers):
        if isinstance(value, Sum):
            value = value.on(context)
        memory, source = self.memory[context], self._host if isinstance(value, np.ndarray) else value.block.memory
        if source is memory:
            return value
        if self._host not in (source, memory):
            return memory.array(value.shape, value.dtype)
        arrays = {} if memory is self._host else buffers[context].arrays
        if variable not in arrays or arrays[variable].shape != value.shape:
            arrays[variable] = memory.array(value.shape, value.dtype)  # before the old memory goes
        arrays[variable].value = content(value)
        return arrays[variable]

    def launch(self, given):
        for work in given.works:
            part, context, memory = work.part, work.context, self.memory[work.context]
            function = self._executable.parts[part].functions[work.place]
            if (part, context.kind) not in self._functions:
                self._functions[part, context.kind] = DryFunction(function, context.kind)
            dry = self._functions[part, context.kind]
            if (part, context) not in self._left:
                self._left[part, context] = {}, memory.array([dry.constants], 'int8')
            shared = [self._copies.get(id(each.storage), each.storage[0])
                      for each in function.input_storage[len(work.given):]]
            results = dry.run(memory, self._host, [*map(self._slots.__getitem__, work.given), *shared],
                              self._left[part, context][0])
            if isinstance(work.function, Factored):
                results = [self._host.array(each.shape, each.dtype) if isinstance(each, Product) else each
                           for each in work.function.combined(results)]
            for slot, result in zip(work.results, results):
                self._slots[slot] = result

    def wait(self, given):
        pass

    def save(self, given):
        for slot in given.slots:
            if isinstance(self._slots[slot], Array):
                self._slots[slot] = self._host.array(self._slots[slot].shape, self._slots[slot].dtype)
        for buffers in [self._batch.buffers[shard] for shard in given.shards]:
            buffers.update((context, DeviceBuffers(context)) for context in buffers)

    def add(self, given):
        order, channel = self._exchanges[given.group]
        parts = order.add(self._batch.split, given.round, given.contexts,
                          [[self._slots[slot] for slot in part] for part in given.parts])
        if parts is not None:
            channel.prepare(parts)

    def finish(self, given):
        taken = [value for group in given.groups for value in self._exchanges[group].channel.taken()]
        for slot, value in zip(given.targets, taken):
            self._slots[slot] = value

    def gather(self, given):
        self._end_exchanges()
        for target, part, reduction in zip(given.targets, given.parts, given.reductions):
            self._slots[target] = self._gathered([self._slots[slot] for slot in part], reduction)

    def _gathered(self, parts, reduction):
        """Return a value that is put together, from its parts in this process."""
        first, tree, axis = parts[0], self._batch.split.tree, getattr(reduction, 'axis', None)
        if reduction == SAME and content(first) is not None:
            return content(first)
        shape = first.shape
        n_shards = tree.total if tree else self._plan.shares.n_replicas * len(self._batch.split.rounds)  # about
        if reduction == STACK:
            shape = (n_shards, *shape)
        elif axis is not None:
            size = sum(part.shape[axis] for part in parts) * n_shards // len(parts)
            shape = (*shape[:axis], size, *shape[axis + 1:])
        return self._host.array(shape, first.dtype)

    def stack(self, given):
        self._slots[given.target] = self._slots[given.source].reshape((1,) + self._slots[given.source].shape)

    def store(self, given):
        for new in given.news:
            for cell, slot in zip(new.storages.cells, new.slots):
                self._replace(cell, self._slots[slot])
            for *_, copy in new.storages.others:
                self._replace(copy.container.storage)
        divided = self._plan.divided
        of_others = divided.sent.difference(divided.shares[self._plan.machine.rank]) if divided else ()
        for variable in of_others:
            for copy in replicated(variable).copies.values():
                self._replace(copy.container.storage)

    def _replace(self, cell, value=None):
        """Give a copy a new value, by default one like the old one."""
        old = self._copies.get(id(cell))
        if old is not None:
            self._old.append(old)
            self._copies[id(cell)] = old.block.memory.array(old.shape, old.dtype) if value is None else value

    def fetch(self, given):
        self._end_exchanges()

    def _end_exchanges(self):
        for _, channel in self._exchanges.values():
            if not channel.by_host:
                channel.finish()


class _Memories(Memories):
    """The memories of devices and of the host, as `Memories`."""

    computes = False

    def copies(self, context, n_blocks):
        return Copies()

    def on_host(self, shape, dtype, contexts):
        return self[HOST].array(shape, dtype)


def _idle(communicator: Any) -> Any:
    """Return a communicator of NCCL that sends nothing."""
    return SimpleNamespace(contexts=communicator.contexts, first=communicator.first, has_failed=False,
                           is_verified=True, exchange=lambda *given: None, wait=lambda: None)
