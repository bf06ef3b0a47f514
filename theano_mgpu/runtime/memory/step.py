"""A dry run of steps: the bytes that each device holds, from the compiled functions and the shapes of a batch."""
from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Mapping, Sequence

import numpy as np
import theano
from theano.gpuarray.type import GpuArrayType

from ...comm.host_sum import bucket_ranges
from ...comm.tree import Node
from ...devices.context_map import HOST, Context
from ...devices.contexts import gpu_context
from ...errors import warn
from ...graph.analysis import SAME, STACK
from ...plan import DeviceReduce, Part, SumGroup
from ...plan.memory import MemoryEstimate
from ...plan.schedule import schedule
from ...plan.shares import sub_batch_sizes
from ...plan.step_plan import Boundary
from ..batch import Batch, Shard, Splitter
from ..executable import Executable
from ..replicas.transfers import SMALL, flat_layout
from .arrays import Array, Memory
from .function import DryFunction, UnknownShape

STEPS = 2         # the second one has arrays that the first has left, and the memory for two batches of inputs
SLICES = 4        # from three on, the number changes nothing: a slice, the one before it, and the sums of the others
MOST = 1 << 26    # samples of a batch; larger ones are not asked for


class DryStep:
    """The steps of an executable, without their computation.

    It mirrors `StepRun`: the same values are kept, and let go of, in the same order. What a device has to allocate is
    counted in bytes. What libgpuarray's cache of freed blocks adds is not.

    Parameters
    ----------
    executable : Executable
    splitter : Splitter
        It knows the shapes of the first batch.
    """

    def __init__(self, executable: Executable, splitter: Splitter) -> None:
        self._executable, self._plan, self._like = executable, executable.plan, splitter
        self._functions: dict[Any, DryFunction] = {}
        self._known: dict[Any, Any] = {}  # the peaks by the number of samples and slices

    def estimate(self) -> MemoryEstimate | None:
        """Return the peaks of a step with the first batch, and the batches that fit.

        Returns
        -------
        MemoryEstimate or None
            None before the first batch, without a device other than the CPU, or if the shape of a value is not known
            before it is computed.
        """
        devices = [context for context in self._plan.mesh.contexts if context.kind != 'cpu']
        if self._like.shapes is None or not devices:
            return None
        shares, first = self._plan.shares, self._like.first
        samples = sum(first)
        peaks = self.peaks(samples, self._like.slices.get(first))
        if peaks is None:
            return None
        totals = {context: gpu_context(context).total_gmem for context in devices}
        largest = {context: self.largest({context: total}) for context, total in totals.items()}
        in_slices = self.largest(totals, SLICES) if shares.grows and shares.is_divided else None
        part = in_slices and max(self._like.shares.sizes(self._lengths(in_slices)))
        return MemoryEstimate(samples, {context: peaks[context] for context in devices}, totals, largest,
                              part and sub_batch_sizes(part, SLICES)[0],
                              not any(each.has_dnn for each in self._functions.values()))

    def peaks(self, samples: int, slices: int | None = None) -> dict[Context, int] | None:
        """Return the most bytes that each context's device has in use at one time, for batches of some length.

        Parameters
        ----------
        samples : int
            Of the whole batch, on all ranks.
        slices : int, optional
            In place of the plan's micro-batches.

        Returns
        -------
        dict of Context to int, or None
            None if the shape of a value is not known before it is computed.
        """
        if self._has_evicted():
            return None
        key = samples, slices, self._like.shares.weights
        if key not in self._known:
            try:
                self._known[key] = self._counted(samples, slices)
            except UnknownShape:
                self._known[key] = None
            except Exception as error:  # an op that the dry run does not understand must not stop a training
                self._known[key] = None
                warn('the memory of %s cannot be estimated: %s: %s' % (self._plan.name or 'a function',
                                                                      type(error).__name__, error))
        return self._known[key]

    def _has_evicted(self):
        """Return whether the memory of a copy that a part reads was freed: its shape is not known before a step."""
        return any(variable.is_evicted(context) for compiled in self._executable.parts.values()
                   for context in compiled.part.contexts for variable in compiled.variables)

    def _counted(self, samples, slices):
        shares, lengths = self._plan.shares, self._lengths(samples)
        splitter = Splitter(self._plan, self._like.with_samples)
        splitter.use(self._like.shares)
        if slices is not None:
            splitter.slices[tuple(lengths)] = slices
        own = lengths[shares.machine.rank] if shares.is_sharded else samples
        values = {variable: self._like.example(variable, own) for variable in self._plan.program.given}
        steps = _Steps(self._executable, self._function, self._like.whole_numbers)
        for _ in range(STEPS):
            steps.step(splitter.split(values, lengths))
        return {context: steps.memory[context].peak for context in self._plan.mesh.contexts}

    def _lengths(self, samples):
        """Return the samples that each rank is given of some samples: of its own, or the whole batch."""
        shares = self._plan.shares
        if not shares.is_sharded:
            return [samples]
        sizes = sub_batch_sizes(samples, shares.machine.size)
        return sizes + [0] * (shares.machine.size - len(sizes))

    def largest(self, limits: Mapping[Context, int], slices: int | None = None) -> int | None:
        """Return the number of samples of the largest batch whose peaks are within limits; 0 if none is.

        Parameters
        ----------
        limits : dict of Context to int
            Bytes of memory.
        slices : int, optional
            As for `peaks`.

        Returns
        -------
        int or None
            None if the peaks are not known, or if any batch is within the limits.
        """
        def excess(samples: int) -> int:
            peaks = self.peaks(samples, slices)
            assert peaks is not None
            return max(peaks[context] - limit for context, limit in limits.items())
        return None if self.peaks(1, slices) is None else last_within(excess, MOST)

    def _function(self, part: Part, replica: int, known: Collection[theano.Variable]) -> DryFunction:
        """Return the dry run of a part; it is the same on all contexts of a kind."""
        key = part, part.contexts[replica].kind
        if key not in self._functions:
            numbers = [i for i, variable in enumerate(part.given) if variable in known]
            self._functions[key] = DryFunction(self._executable.parts[part].functions[replica], key[1], numbers)
        return self._functions[key]


def last_within(excess: Callable[[int], Any], most: int) -> int | None:
    """Return the last whole number from 1 on with an excess of at most 0; 0 if there is none, None if it is `most`.

    Parameters
    ----------
    excess : callable
        It grows with the number, about as a straight line.
    most : int

    Examples
    --------
    >>> last_within(lambda n: 3 * n - 100, 1000), last_within(lambda n: n, 9), last_within(lambda n: n - 99, 9)
    (33, 0, None)
    """
    low, high = 0, 1
    while excess(high) <= 0:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    is_bisection = False
    while high - low > 1:
        middle = (low + high) // 2
        if low and not is_bisection:  # along the line through both ends
            below, above = -excess(low), excess(high)
            middle = min(max(low + (high - low) * below // (below + above), low + 1), high - 1)
        is_bisection = not is_bisection and high - low > 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return low


class _Sum:
    """A sum: `on` returns its array on a context, or its value on the host."""

    def __init__(self, value: Any, on: Callable[[Context], Any]) -> None:
        self.value, self.on = value, on


class _Launched:
    """A part that was started, as `step_run.Launched`."""

    def __init__(self, part: Part, number: int, shards: Sequence[Shard], results: list[Any]) -> None:
        self.part, self.number, self.shards, self.results = part, number, shards, results


class _Steps:
    """The memory of each device, and the arrays that stay there from step to step. `StepRun` has the same methods."""

    def __init__(self, executable: Executable, function: Callable[..., DryFunction],
                 whole_numbers: Collection[theano.Variable]) -> None:
        self._executable, self._plan, self._function = executable, executable.plan, function
        self._known = {*executable.plan.program.numbers, *whole_numbers}  # whose values are known
        self.memory = {context: Memory() for context in [*dict.fromkeys(self._plan.mesh.contexts), HOST]}
        self._variables: dict[int, Any] = {}  # by the storage of a replica
        self._buffers: dict[Any, Any] = {}  # arrays that inputs are sent to, and that small sums are put together in
        self._kept: dict[Any, dict[Any, Any]] = {}  # arrays that the calls of each function leave
        for variable in executable.variables:
            for context, copy in variable.copies.items():
                value, key = copy.container.storage[0], id(copy.container.storage)
                if context in self.memory and key not in self._variables and self._counts(context, copy):
                    self._variables[key] = self.memory[context].array(value.shape, value.dtype)
        self._constants: dict[Any, Array] = {}

    @staticmethod
    def _counts(context: Context, variable: Any) -> bool:
        """Return whether a variable's value lies in the memory of a context."""
        return isinstance(variable.type, GpuArrayType) == (context.kind != 'cpu') and \
            hasattr(variable.container.storage[0], 'dtype')

    def step(self, batch: Batch) -> None:
        """Run a step."""
        self._batch = batch
        self._old: list[Any] = []
        self._new: list[Any] = []
        self._launched: list[_Launched] = []
        self._sent: dict[Any, Any] = {}
        self._held: dict[SumGroup, dict[int, Any]] = {}  # for each replica its context, and nodes of its sums
        for stage in self._plan.stages:
            self._exchange(stage.boundary)
            for shard in batch.shards if stage.saved else ():
                shard.values.update([(variable, shard.values[source]) for variable, source in stage.saved.items()])
            self._known.update(variable for variable, source in stage.saved.items() if source in self._known)
            self._compute(stage.parts, 1 if stage.once else len(batch.rounds))
            if stage.once:
                batch.share(stage.parts)
        self._exchange(self._plan.last)
        self._update()
        del self._batch, self._old, self._new, self._sent, self._held

    # --- stages

    def _compute(self, parts, n_rounds):
        waits = len(parts) > 1 and self._executable.on_devices
        for cycle in schedule(parts, n_rounds):
            if not waits:
                self._complete_all()
            before = self._launched
            self._launched = self._launch(cycle)
            if waits:
                self._complete(before)
            del before

    def _launch(self, cycle):
        work = [(part, number, shard) for part, number in cycle for shard in self._batch.rounds[number]]
        arguments = [self._arguments(part, shard.replica, shard.values, shard) for part, _, shard in work]
        results = []
        for (part, _, shard), given in zip(work, arguments):
            results.append(self._run(part, shard.replica, given))
        for (part, _, shard), (outputs, _) in zip(work, results):
            shard.keep(part, outputs)
            for key in [key for key in self._sent if key[0] is shard and key[1] in part.last]:
                del self._sent[key]
        every_result = iter(results)
        return [_Launched(part, number, self._batch.rounds[number],
                          [next(every_result) for _ in self._batch.rounds[number]]) for part, number in cycle]

    def _complete_all(self):
        self._complete(self._launched)
        self._launched = []

    def _complete(self, every_launched):
        batch = self._batch
        for launched in every_launched:
            part, number = launched.part, launched.number
            contexts = [part.contexts[shard.replica] for shard in launched.shards]
            for group in () if batch.alone else part.sums:
                self._add(group, launched.shards, contexts, number)
            for j, variable in enumerate(part.updates):
                new = variable, contexts, [values[j] for _, values in launched.results], ()
                if variable not in self._plan.program.streams:
                    self._new += [new] if number == 0 else []
                elif not batch.idle:
                    self._store([new])
            if batch.waits_on_host and self._executable.on_devices and part in self._plan.ends:
                for shard in launched.shards:
                    self._move_to_host(shard)

    def _move_to_host(self, shard):
        shard.values = {variable: _host(variable, value.shape) if isinstance(value, Array) else value
                        for variable, value in shard.values.items()}
        buffers = list(shard.outbox.buffers.values())
        for key in [key for key in self._buffers if key[0] in buffers]:
            del self._buffers[key]
        for key in [key for key in self._sent if key[0] is shard]:
            del self._sent[key]

    def _exchange(self, boundary: Boundary) -> None:
        self._complete_all()
        batch = self._batch
        if batch.alone:
            shard, = batch.shards
            for variable, source, reduction in boundary.exchanges:
                value = shard.values[source]
                shape = (1, *value.shape) if reduction == STACK else value.shape
                batch.common[variable] = value.reshaped(shape) if isinstance(value, Array) else value.reshape(shape)
            return
        for variable, source, reduction in boundary.others:
            if reduction == SAME and source in self._known:
                value = batch.shards[0].values[source]
                batch.common[variable] = value.value if isinstance(value, Array) else value
                self._known.add(variable)
                continue
            shapes = [shard.values[source].shape for shard in batch.shards]
            batch.common[variable] = _host(variable, _exchanged_shape(shapes, reduction, self._n_shards()))

    def _n_shards(self):
        """Return about how many shards all ranks have."""
        batch = self._batch
        return batch.tree.total if batch.tree else self._plan.shares.n_replicas * len(batch.rounds)

    # --- calls

    def _arguments(self, part, replica, values, owner):
        """Return the arguments of a part: arrays on its device, and values on the host."""
        context, common = part.contexts[replica], self._batch.common
        takes = self._executable.parts[part].takes[replica]
        return [self._send(owner, variable, values[variable] if variable in values else common[variable],
                           context if on_device else HOST) for variable, on_device in zip(part.given, takes)]

    def _send(self, owner, variable, value, context):
        """Return a value where functions of a context take it, as `Outbox.send` does."""
        if isinstance(value, _Sum):
            value = value.on(context)
        if isinstance(value, Array):
            if context.kind == 'cpu' or value.block.memory is self.memory[context]:
                return value
            key = owner, variable, context
            if key not in self._sent:
                self._sent[key] = self.memory[context].array(value.shape, variable.dtype)
                self._sent[key].value = value.value
            return self._sent[key]
        if context.kind == 'cpu':
            return value
        buffers = owner.outbox.buffers[context] if isinstance(owner, Shard) else 'update'
        array = self._buffer((buffers, variable, context), context, value.shape, variable.dtype)
        array.value = value
        return array

    def _buffer(self, key, context, shape, dtype):
        """Return memory that is used again; new memory is there before the old one goes."""
        shape = tuple(shape)
        if key not in self._buffers or self._buffers[key].shape != shape:
            self._buffers[key] = self.memory[context].array(shape, dtype)
        return self._buffers[key]

    def _run(self, part, replica, arguments):
        """Return the outputs and the new values of a part on a replica's device."""
        context, function = part.contexts[replica], self._function(part, replica, self._known)
        if (part, context) not in self._constants:
            self._constants[part, context] = self.memory[context].array([function.constants], 'int8')
        own = self._executable.parts[part].functions[replica]
        storages = [each.storage for each in own.input_storage[len(arguments):]]
        given = [(value.value if isinstance(value, Array) else np.asarray(value)) if i in function.numbers else
                 tuple(value.shape) for i, value in enumerate(arguments)]
        arrays = [value if isinstance(value, Array) and context.kind != 'cpu' else None for value in arguments]
        results = function.run(self.memory[context], arrays, [self._variables.get(id(each)) for each in storages],
                               function.shapes(given), self._kept.setdefault((part, context), {}))
        results = [results[i] for i in np.argsort(own.mgpu_order).tolist()]
        graphs = [*part.outputs, *part.updates]
        self._known.update(variable for variable, value in zip(graphs, results)
                           if (value.value is not None if isinstance(value, Array) else isinstance(value, np.ndarray)))
        results = [value if isinstance(value, (Array, np.ndarray)) else _host(variable, value)
                   for variable, value in zip(graphs, results)]
        return results[:len(part.outputs)], results[len(part.outputs):]

    # --- sums

    def _add(self, group, shards, contexts, number):
        """Add the parts of shards, as `HostSums.add` does."""
        sources, kept = [exchange.source for exchange in group.exchanges], self._plan.kept
        parts = [[shard.values[source] if source in kept else shard.values.pop(source) for source in sources]
                 for shard in shards]
        n_rounds = len(self._batch.rounds)
        if n_rounds > 1 and contexts[0].kind != 'cpu':
            for shard, context in zip(shards, contexts):
                self._hold(group, shard, context, parts.pop(0))
            if number < n_rounds - 1:
                return
            contexts, parts = zip(*[(context, node.value) for context, nodes in self._held.pop(group).values()
                                    for node in nodes])
            if self._plan.machine.size == len(self._plan.mesh.replicas) == 1:
                for exchange, value in zip(group.exchanges, parts[0]):
                    self._batch.common[exchange.variable] = value
                return
        if isinstance(group.collective, DeviceReduce) and self._executable.sums[group].is_ready:
            self._reduce(group, contexts, parts)
            return
        self._fetch(group, contexts, parts)
        if number == n_rounds - 1:
            self._announce(group, [_host(exchange.variable, value.shape)
                                   for exchange, value in zip(group.exchanges, parts[0])])

    def _hold(self, group, shard, context, part):
        """Add the part of a shard to the sums that its replica holds: one, or the nodes of a tree."""
        def added(values: Sequence[Any], level: int, place: int) -> Any:
            total = values[-1]
            for _ in values[1:]:
                total = [self._new_like(context, value) for value in total]
            return total
        _, nodes = self._held.setdefault(group, {}).setdefault(shard.replica, (context, []))
        if self._batch.tree is not None:
            self._batch.tree.merge(nodes, Node(0, shard.number, part), added)
        else:
            nodes[:] = [Node(0, 0, added([nodes[0].value, part], 0, 0) if nodes else part)]

    def _new_like(self, context, value):
        return self.memory[context].array(value.shape, 'V%d' % value.itemsize) if isinstance(value, Array) else value

    def _fetch(self, group, contexts, parts):
        """Take the memory on devices in which small parts are put together, before they are fetched."""
        sizes = [value.nbytes for value in parts[0]]
        on_devices = self._executable.on_devices
        for start, stop in bucket_ranges(sizes) if on_devices else [(0, len(sizes))]:
            for i, (context, part) in enumerate(zip(contexts, parts)):
                arrays = [value for value in part[start:stop] if isinstance(value, Array) and value.nbytes <= SMALL]
                if context.kind != 'cpu' and len(arrays) > 1:
                    like = [(value.shape or (1,), np.dtype('V%d' % value.itemsize)) for value in arrays]
                    for dtype, size in flat_layout(like)[0].items():
                        self._buffer((group, i, start, dtype), context, (size,), dtype)

    def _flat(self, context, like):
        """Return new flat arrays, by dtype, for views of some shapes and dtypes."""
        return {dtype: self.memory[context].array((size,), dtype) for dtype, size in flat_layout(like)[0].items()}

    def _announce(self, group, values):
        """Let the replicas read the sums: they are sent to a device in one copy a dtype when it reads the first."""
        sent: dict[Context, dict[int, Any]] = {}
        placeholders = [exchange.variable for exchange in group.exchanges]

        def on(number, context):
            if context.kind == 'cpu':
                return values[number]
            if context not in sent:
                read = {variable for part in self._plan.parts if context in part.contexts for variable in part.given}
                wanted = [i for i, variable in enumerate(placeholders) if variable in read]
                like = [(values[i].shape, values[i].dtype) for i in wanted]
                flat = self._flat(context, like)
                sent[context] = {i: flat[values[i].dtype].part(values[i].shape) for i in wanted}
            return sent[context][number]
        for i, variable in enumerate(placeholders):
            self._batch.common[variable] = _Sum(values[i], functools.partial(on, i))

    def _reduce(self, group, contexts, parts):
        """Take the memory of sums that devices add, as `DeviceSums` does."""
        owners = group.collective.owners
        first = sum(self._plan.machine.replicas[:self._plan.machine.rank])
        every_context = next(part for part in self._plan.parts if group in part.sums).contexts
        arrays = [[value if value.is_contiguous else self._new_like(context, value) for value in part]
                  for context, part in zip(contexts, parts)]
        received: dict[Context, dict[int, Any]] = {}
        for place, context in enumerate(every_context, first):
            if context not in contexts:
                arrays.append([self._new_like(context, value) for value in parts[0]])
            memory = self.memory[context]
            small = [i for i, value in enumerate(parts[0]) if value.nbytes <= SMALL]
            like = {i: (parts[0][i].shape, group.exchanges[i].variable.dtype) for i in range(len(parts[0]))}
            flat = self._flat(context, [like[i] for i in small])
            received[context] = {i: flat[like[i][1]].part(like[i][0]) for i in small}
            received[context].update((i, memory.array(*like[i])) for i in like if i not in small and
                                     owners[i] in (None, place))
        del arrays

        def on(number, context):
            home = next((each for each in [received.get(context, {}), *received.values()] if number in each), None)
            if context in received and number in received[context]:
                return received[context][number]
            assert home is not None
            return self._sent.setdefault(('sum', group, number, context), self._new_like(context, home[number])) \
                if context.kind != 'cpu' else home[number]
        for i, exchange in enumerate(group.exchanges):
            self._batch.common[exchange.variable] = _Sum(None, functools.partial(on, i))

    # --- the update

    def _update(self):
        batch = self._batch
        for part in self._plan.update:
            contexts = part.contexts[:1] if batch.alone else part.contexts
            arguments = [self._arguments(part, i, {}, 'update') for i in range(len(contexts))]
            results = [self._run(part, i, given) for i, given in enumerate(arguments)]
            self._new += [(variable, contexts, each, part.copied_to)
                          for variable, each in zip(part.updates, zip(*[new for _, new in results]))]
        self._share_new_values()
        self._store(self._new)

    def _share_new_values(self):
        """Take the memory of new values that devices send each other, as `DeviceBroadcasts` does."""
        own = {variable: values[0] for variable, _, values, _ in self._new}
        first = sum(self._plan.machine.replicas[:self._plan.machine.rank])
        for planned in self._plan.broadcasts:
            for variable, owner in planned.owners.items():
                like = own.get(variable) or _host(variable, variable.container.storage[0].shape)
                values = [own[variable] if place == owner else self.memory[context].array(like.shape, variable.dtype)
                          for place, context in enumerate(planned.contexts, first)]
                self._new = [each for each in self._new if each[0] is not variable]
                self._new.append((variable, planned.contexts, values, ()))

    def _store(self, every_new):
        """Give copies of variables their new values; the old ones stay until the step ends."""
        replicas = {each.variable: each for each in self._executable.variables}
        for variable, contexts, values, copied_to in every_new:
            every_value, replica = dict(zip(contexts, values)), replicas[variable]
            for context in [*contexts, *[each for each in copied_to if each not in contexts
                                         and replica.is_current(each)]]:
                copy = replica.copies.get(context)
                if copy is None or not self._counts(context, copy):
                    continue
                key = id(copy.container.storage)
                self._old.append(self._variables.get(key))
                value = every_value.get(context)
                self._variables[key] = value if isinstance(value, Array) else \
                    self.memory[context].array(values[0].shape, variable.dtype)


def _host(variable: theano.Variable, shape: Sequence[int]) -> Any:
    """Return an array on the host that takes no memory."""
    return np.broadcast_to(np.zeros((), getattr(variable.type, 'dtype', 'int8')), tuple(shape or ()))


def _exchanged_shape(shapes: Sequence[tuple[int, ...]], reduction: Any, n_shards: int) -> tuple[int, ...]:
    """Return the shape of an exchanged value, from the shapes of its parts in this process."""
    if reduction == STACK:
        return (n_shards, *shapes[0])
    axis = getattr(reduction, 'axis', None)
    if axis is None:
        return shapes[0]
    size = sum(shape[axis] for shape in shapes) * n_shards // len(shapes)
    return (*shapes[0][:axis], size, *shapes[0][axis + 1:])
