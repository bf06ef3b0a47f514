"""A step without its computation: `StepRun` over an executable whose arrays have no content."""
from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from theano.gpuarray.type import GpuArrayType

from ...comm.alone import Alone
from ...comm.host_sum import bucket_ranges
from ...devices.context_map import HOST
from ...graph.analysis import SAME, STACK
from ...plan import Part
from ..batch import Batch, DeviceSum, Outbox, Sum
from ..device_broadcast import DeviceBroadcasts
from ..device_sums import DeviceSums
from ..divided_update import UpdateOwners
from ..executable import CompiledPart, Executable
from ..gathered_sums import GatheredSums
from ..replicas.transfers import SMALL, DeviceBuffers, FlatBuffers, describe
from ..step_run import StepRun
from ..sums import HostSums, OverRanks, TreeSums
from ..timeline import Timings
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
    """A step of a `DryExecutable`. Only the exchange of single values differs from a `StepRun`."""

    def __init__(self, executable: DryExecutable, batch: Batch) -> None:
        super().__init__(executable, batch)
        self._transaction = _Transaction(executable)
        self._host = executable.memory[HOST]

    def step(self) -> None:
        """Run the step up to its new values."""
        self.start()
        self._update()
        self._wait_for_exchanges()

    def _together(self, variables, reductions, communicator):
        return [self._exchanged([shard.values[variable] for shard in self._batch.shards], reduction)
                for variable, reduction in zip(variables, reductions)]

    def _exchanged(self, parts, reduction):
        """Return an exchanged value, from its parts in this process."""
        first, *_ = parts
        if reduction == SAME and content(first) is not None:
            return content(first)
        tree, axis, shape = self._batch.tree, getattr(reduction, 'axis', None), first.shape
        n_shards = tree.total if tree else self._plan.shares.n_replicas * len(self._batch.rounds)  # about, of all ranks
        if reduction == STACK:
            shape = (n_shards, *shape)
        elif axis is not None:
            size = sum(part.shape[axis] for part in parts) * n_shards // len(parts)
            shape = (*shape[:axis], size, *shape[axis + 1:])
        return self._host.array(shape, first.dtype)


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
        self.over_ranks = OverRanks(Alone(), idle, False)
        self.parts = {part: _twin(_Part, each, memory=self.memory, copies=self.copies, dry_functions=functions,
                                  constants={}, left={}) for part, each in self.parts.items()}
        memory = self.memory.__getitem__
        self.sums = {group: _twin(TWINS.get(type(each), _Sums), each, _memory=memory, _launcher=idle, _timings=idle,
                                  _fetched_through={}, _over_ranks=False) for group, each in self.sums.items()}
        self.device_sums = [each for each in self.sums.values() if isinstance(each, DeviceSums)]
        self.broadcasts = self.broadcasts and _twin(_Broadcasts, self.broadcasts, _memory=memory, _ranks=Alone())
        self.owners = self.owners and _twin(_Owners, self.owners, host=host)
        self.update_buffers = {context: DeviceBuffers(context) for context in self.update_buffers}

    def outbox(self, buffers: Any = None) -> Outbox:
        return _Outbox(self.update_buffers if buffers is None else buffers, self.memory)


def _twin(cls: Any, original: Any, **changes: Any) -> Any:
    """Return an object of a class with the attributes of an object of a base, but for some changes."""
    twin = cls.__new__(cls)
    vars(twin).update(vars(original), **changes)
    return twin


class _Idle(Timings):
    """A launcher that runs tasks in order, and timings that note nothing."""

    def run(self, name, tasks, contexts, shards=None):
        return [task() for task in tasks]

    def span(self, phase):
        return contextlib.nullcontext()

    def waits(self):
        return False


class _Part(CompiledPart):
    """A part whose functions run dry."""

    def run(self, replica, arguments, compute=None):
        context, function, part = self.part.contexts[replica], self.functions[replica], self.part
        memory, dry = self.memory[context], self._dry(context, function, arguments)
        if context not in self.constants:
            self.constants[context] = memory.array([dry.constants], 'int8')
        given = [content(value) if i in dry.numbers else tuple(value.shape) for i, value in enumerate(arguments)]
        on_device = [value if context.kind != 'cpu' and is_in(memory, value) else None for value in arguments]
        copies = [self.copies.get(id(each.storage)) for each in function.input_storage[len(arguments):]]
        results = dry.run(memory, on_device, copies, dry.shapes(given), self.left.setdefault(context, {}))
        results = [value if isinstance(value, (Array, np.ndarray)) else
                   self.memory[HOST].array(value or (), getattr(variable.type, 'dtype', 'int8'))
                   for variable, value in zip([*part.outputs, *part.updates], [results[i] for i in self._positions])]
        return results[:len(part.outputs)], results[len(part.outputs):]

    def _dry(self, context, function, arguments):
        """Return the dry run of a function; it is the same on all contexts of a kind."""
        key = self.part, context.kind
        if key not in self.dry_functions:
            known = [i for i, value in enumerate(arguments) if content(value) is not None]
            self.dry_functions[key] = DryFunction(function, context.kind, known)
        return self.dry_functions[key]


class _Outbox(Outbox):
    """An outbox that takes the memory of the values that it sends."""

    def __init__(self, buffers, memory):
        super().__init__(buffers)
        self._memory = memory

    def send(self, variable, value, context):
        if isinstance(value, (Sum, DeviceSum)):
            value = value.on(context)
        memory, host, key = self._memory[context], self._memory[HOST], (variable, context)
        is_on_host = isinstance(value, np.ndarray) or is_in(host, value)
        if is_in(memory, value) or memory is host and is_on_host:
            return value
        if key not in self._sent:
            arrays = self.buffers[context].arrays if is_on_host else {}
            if variable not in arrays or arrays[variable].shape != tuple(value.shape):
                arrays[variable] = memory.array(value.shape, value.dtype)  # before the old memory goes
            self._sent[key] = arrays[variable]
            self._sent[key].value = content(value)
        return self._sent[key]


class _Sums(HostSums):
    """Sums that the host adds."""

    def send(self, context):
        wanted = self._wanted[context]
        there = FlatBuffers(describe([self.views[i] for i in wanted]), self._flat(context))
        return dict(zip(wanted, there.views))

    def _compile_adder(self, context):
        pass

    def _added(self, context, totals, values):
        return [self._memory(context).array(each.shape, each.dtype) for each in values]

    def _add(self, parts, shards, contexts, accumulate, is_last):
        self.views = self._on_host(parts[0])
        for bucket in bucket_ranges([each.nbytes for each in parts[0]]) if self._on_devices else ():
            self._fetched(parts, bucket, shards, contexts)

    def _fetched(self, parts, bucket, shards, contexts):
        """Take the memory in which small arrays are put together, as a `Fetcher` does."""
        fetched = [part[slice(*bucket)] for part in parts]
        for i, (context, arrays) in enumerate(zip(contexts, fetched)):
            small = [each for each in arrays if is_in(self._memory(context), each) and each.nbytes <= SMALL]
            like, key = [(shape or (1,), dtype) for shape, dtype in describe(small)], (i, context, bucket)
            before = self._fetched_through.get(key)
            if context.kind != 'cpu' and len(small) > 1 and not (before and before.like == like):
                self._fetched_through[key] = FlatBuffers(like, self._flat(context))
        return list(map(self._on_host, fetched))

    def _flat(self, context):
        return lambda size, dtype: self._memory(context).array((size,), dtype)

    def _on_host(self, arrays):
        return [self._memory(HOST).array(each.shape, each.dtype) for each in arrays]


class _TreeSums(TreeSums, _Sums):
    """Sums of logical shards."""

    def _use_buffers(self, like):
        self.views = [self._memory(HOST).array(*each) for each in like]

    def _sum(self, context, replica, every_terms, level, place):
        return every_terms[-1] if context.kind == 'cpu' else super()._sum(context, replica, every_terms, level, place)

    def _copied_to_host(self, i, node):
        return node


class _DeviceSums(DeviceSums, _Sums):
    """Sums that devices add."""

    def finish(self):
        self._taken = None

    def _enqueue(self, arrays, received):
        pass

    def _verified(self, parts, arrays, received, ranks):
        return ''


class _GatheredSums(_DeviceSums, _TreeSums, GatheredSums):
    """Sums of logical shards that devices add."""

    def _kernel(self, context, dtype):
        pass


class _Broadcasts(DeviceBroadcasts):
    """New values that devices send each other."""

    def finish(self):
        pass

    def _enqueue(self, communicator, owners, devices):
        pass


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

    def replace_by_copy(self, shared, value, context):
        self.replace([shared.container.storage], [self._memory[context].array(value.shape, value.dtype)])


TWINS = {DeviceSums: _DeviceSums, TreeSums: _TreeSums, GatheredSums: _GatheredSums}  # of sums; of all others, _Sums
