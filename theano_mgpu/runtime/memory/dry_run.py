"""A step that takes and frees the memory of values, and computes nothing."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from theano.gpuarray.type import GpuArrayType

from ...comm.communicator import Communicator
from ...comm.tree_products import Product
from ...devices.context_map import HOST, Context
from ...devices.copies import HostCopies
from ...devices.nccl import communicator_of
from ...devices.transfers import DeviceBuffers
from ...exchange.host import Sum
from ...exchange.memory import Memories
from ...exchange.over_ranks import OverRanks
from ...graph.analysis import SAME
from ...plan import Part
from ...utils.timeline import Timings
from ..batch import Batch
from ..exchanges import exchanges_of
from ..executable import Executable, Factored
from ..replicas.replicated import replicated
from ..step_run import StepRun
from .arrays import Array, Memory
from .function import DryFunction
from .shapes import content


class DryRun(StepRun):
    """Steps whose arrays have no content, of this process alone.

    A value on a device is an `Array`, and so is one on the host whose content is not known. The exchanges are the real
    ones, over other memories.

    Attributes
    ----------
    memory : dict of Context to Memory
        One for each device, and one that all contexts on the host share.
    sizes : dict of int to int
        The bytes of the values of the latest step, by their slots.
    """

    def __init__(self, executable: Executable, functions: dict[tuple[Part, str], DryFunction]) -> None:
        self._functions, plan = functions, executable.plan
        self._host = host = Memory()
        self.memory = _Memories((context, host if context.kind == 'cpu' else Memory())
                                for context in [*plan.mesh.contexts, HOST])
        self._copies: dict[int, Array] = {}  # of variables, by the storage
        for variable in executable.variables:
            for context, copy in variable.copies.items():
                if context in self.memory and isinstance(copy.type, GpuArrayType):
                    value, whole = copy.container.storage[0], variable.variable.container.storage[0]
                    shape = value.shape if value.size else whole.shape  # the memory of a copy may have been freed
                    self._copies[id(copy.container.storage)] = self.memory[context].array(shape, value.dtype)
        self._old: list[Array] = []  # they stay until the step is committed
        self._left: dict[tuple[Part, Context], Any] = {}
        launcher: Any = SimpleNamespace(run=lambda phase, tasks, *others: [task() for task in tasks])
        timings, alone = Timings(), Communicator()
        exchanges = exchanges_of(plan, alone, self.memory, launcher, timings, lambda contexts, _: _idle(
            communicator_of(contexts, executable.communicator.size)))
        self._dry: Any = SimpleNamespace(
            plan=plan, parts=executable.parts, on_devices=False, launcher=launcher, timings=timings,
            exchanges=exchanges, by_devices=[each for _, each in exchanges.values() if not each.by_host],
            over_ranks=OverRanks(alone, timings, overlaps=False),
            update_buffers={context: DeviceBuffers(context) for context in plan.mesh.contexts})
        self.sizes: dict[int, int] = {}

    def run(self, batch: Batch) -> None:
        """Take and free memory as a step on a batch does."""
        super().__init__(self._dry, batch)
        for name, instruction, ended in [*batch.split.program.stages, *batch.split.program.update]:
            getattr(self, name)(instruction)
            for slot in ended:
                self.sizes[slot] = getattr(self._slots[slot], 'nbytes', 0)
                self._slots[slot] = None
        self._old = []

    def _sent(self, variable, value, context, buffers):
        if isinstance(value, Sum):
            value = value.on(context)
        memory, source = self.memory[context], value.memory if isinstance(value, Array) else self._host
        if source is memory:
            return value
        arrays = buffers[context].arrays if source is self._host else {}
        if variable not in arrays or arrays[variable].shape != value.shape:
            arrays[variable] = memory.array(value.shape, value.dtype)  # before the old memory goes
        arrays[variable].value = content(value)
        return arrays[variable]

    def _results_of(self, work):
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
        return results

    def gather(self, given):
        self._wait_for_exchanges()
        for target, part, reduction in zip(given.targets, given.parts, given.reductions):
            self._slots[target] = self._gathered([self._slots[slot] for slot in part], reduction)

    def _gathered(self, parts, reduction):
        """Return a value that is put together, from its parts in this process."""
        first, tree, axis = parts[0], self._split.tree, getattr(reduction, 'axis', None)
        if reduction == SAME and content(first) is not None:
            return content(first)
        shape = first.shape
        n_shards = tree.total if tree else self._executable.plan.shares.n_replicas * len(self._split.rounds)  # about
        if axis is not None:
            size = sum(part.shape[axis] for part in parts) * n_shards // len(parts)
            shape = (*shape[:axis], size, *shape[axis + 1:])
        return self._host.array(shape, first.dtype)

    def store(self, given):
        for new in given.news:
            for cell, slot in zip(new.storages.cells, new.slots):
                self._replace(cell, self._slots[slot])
            for *_, copy in new.storages.others:
                self._replace(copy.container.storage)
        plan = self._executable.plan
        of_others = plan.divided.sent.difference(plan.divided.shares[plan.machine.rank]) if plan.divided else ()
        for variable in of_others:
            for copy in replicated(variable).copies.values():
                self._replace(copy.container.storage)

    def _replace(self, cell, value=None):
        """Give a copy a new value, by default one like the old one."""
        old = self._copies.get(id(cell))
        if old is not None:
            self._old.append(old)
            self._copies[id(cell)] = old.memory.array(old.shape, old.dtype) if value is None else value

    def fetch(self, given):
        self._wait_for_exchanges()


class _Memories(Memories):
    """The memories of devices and of the host, as `Memories`."""

    computes = False

    def copies(self, context, n_blocks):
        return HostCopies()

    def on_host(self, shape, dtype, contexts):
        return self[HOST].array(shape, dtype)


def _idle(communicator: Any) -> Any:
    """Return a communicator of NCCL that sends nothing."""
    return SimpleNamespace(contexts=communicator.contexts, first=communicator.first, has_failed=False,
                           is_verified=True, exchange=lambda *given: None, wait=lambda: None)
