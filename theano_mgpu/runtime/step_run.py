"""A step: an interpreter of the instructions of a plan, on a batch."""
from __future__ import annotations

import contextlib
import functools
import itertools
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable

from ..comm.collectives import broadcast_object
from ..comm.communicator import Communicator
from ..devices.context_map import HOST, Context
from ..devices.failures import FailureExplained
from ..devices.transfers import DeviceBuffers, copy_to, fetch, own_copy, wait
from ..exchange.host import Sum
from ..exchange.whole import exchanged
from ..graph.analysis import SAME
from ..plan import instructions
from ..plan.instructions import Move, PartOnContext, Slots
from ..utils.executors import ThreadsExecutor
from ..utils.timeline import HOST as HOST_TRACK
from ..utils.timeline import STEP, note, records, span
from .batch import Batch
from .batches.data_set_rows import DataSetRows
from .executable import Executable, Factored
from .replicas.replicated import Replicated, Storages, commit, replicated, storages_of
from .transaction import Transaction

NOTHING: Any = contextlib.nullcontext({})


class StepResult(NamedTuple):
    """The results of a step."""

    outputs: list[np.ndarray]  # the results of the plan
    new_values: Transaction    # they are stored; they stay once it is committed
    samples: int               # of the batch, on all ranks
    ended: float               # the `time.perf_counter` of the store, before outputs with a row a sample are gathered
    timed: float               # seconds in which the replica that was to be timed has computed its stages


class NewValues(NamedTuple):
    """The new values of variables: of all variables on the first context that has computed them, then on the next one.

    Where no context of this process has computed the values, they are of the host.
    """

    storages: Storages
    values: Sequence[Any]

    def by_variable(self) -> Iterator[tuple[Replicated, Any]]:
        """Return each variable with its value on the first context."""
        return zip(self.storages.variables, self.values)


class StepRun:
    """One step, in two halves: between them, the devices compute, and the next batch can be prepared.

    Each class of instructions has a method of its name, see `plan.instructions`. A replica of this process that is to
    be `timed` is launched last, and waited for.
    """

    def __init__(self, executable: Executable, batch: Batch, timed: int | None = None):
        self._timed, self._seconds, self._ended, self._is_shown = timed, 0.0, 0.0, records()
        self._executable, self._batch, self._split, self._slots = executable, batch, batch.split, batch.slots
        self._launcher, self._timings = executable.launcher, executable.timings
        self._transaction = Transaction()
        self._new: list[NewValues] = []
        self._are_forked, self._began = batch.crew is not None and batch.crew.are_forked, 0.0
        self._begun: dict[int, Any] = {}  # calls of processes, by the `id` of their work
        self._unchecked: list[PartOnContext] = []  # they may have looked up rows that do not exist
        self._underway: list[Any] = [] if batch.split.division.alone else list(executable.by_devices)  # by NCCL

    def start(self) -> None:
        """Compute all stages; the last one may still be under way on the devices."""
        self._began = time.perf_counter()
        if self._executable.over_ranks.underway:
            self._executable.over_ranks.wait()  # a second Ctrl-C may have ended the wait of the last step
        self._run(self._split.program.stages)

    def end(self) -> StepResult:
        """Wait for the last stage, compute the update, store the new values, and gather the outputs."""
        self._run(self._split.program.update)
        if self._unchecked:
            self._launcher.run('run', [work.function.mgpu_call.check for work in self._unchecked],
                               [work.context for work in self._unchecked], self._split.shards,
                               [work.shard for work in self._unchecked])
        forked = self._executable.forked
        if forked is not None and self._batch.crew is not None:
            forked.note(self._split.samples, self._ended - self._began, self._batch.crew)
        outputs = list(map(self._slots.__getitem__, self._split.program.results))
        result = StepResult(outputs, self._transaction, self._split.samples, self._ended, self._seconds)
        return self._of_rank_0(result) if self._executable.of_rank_0 else result

    def _run(self, steps: Sequence[tuple[str, Any, Slots]]) -> None:
        slots = self._slots
        try:
            for name, instruction, ended in steps:
                carry_out = getattr(self, name)
                if self._is_shown:
                    with span(name, STEP):
                        carry_out(instruction)
                else:
                    carry_out(instruction)
                for slot in ended:
                    slots[slot] = None
        except Exception:
            # Where the results of rank 0 count, an op may fail here, such as one whose queue ends earlier.
            if not self._executable.of_rank_0 or not self._executable.communicator.rank:
                raise

    def _of_rank_0(self, result: StepResult) -> StepResult:
        """Return the result with rank 0's outputs, and store rank 0's new values."""
        variables, ranks = self._executable.variables, self._executable.communicator
        new = [(variables.index(variable), fetch(value)) for each in self._new
               for variable, value in each.by_variable()]
        outputs, new = broadcast_object(ranks, (result.outputs, new))
        for i, value in new if ranks.rank else ():
            self._transaction.store_rows(variables[i].variable, value)
        return result._replace(outputs=outputs)

    def undo(self) -> None:
        """Put every old value back, after an error, and free the arrays that the step has left on the devices."""
        self._executable.over_ranks.wait()
        self._transaction.roll_back()
        self._executable.drop()

    # --- parts

    def send(self, given: instructions.Send) -> None:
        """Send values to the contexts where parts take them, each once."""
        buffers = [self._executable.update_buffers if shard is None else self._batch.buffers[shard]
                   for shard in given.shards]
        tasks = [functools.partial(self._send, *each) for each in zip(given.moves, buffers)]
        self._launcher.run(given.phase, tasks, given.contexts, self._split.shards, given.shards)

    def _send(self, moves: Sequence[Move], buffers: dict[Context, DeviceBuffers]) -> None:
        slots = self._slots
        for source, target, variable, context in moves:
            if slots[target] is None:  # else it was sent ahead
                slots[target] = self._sent(variable, slots[source], context, buffers)

    def _sent(self, variable: theano.Variable | None, value: Any, context: Context,
              buffers: dict[Context, DeviceBuffers]) -> Any:
        """Return a value where functions of a context take it."""
        if isinstance(value, (Sum, DataSetRows)):
            value = value.on(context)
        return copy_to(HOST, value) if context.kind == 'cpu' else buffers[context].send(variable, value)

    def launch(self, given: instructions.Launch) -> None:
        """Start parts; on the CPU, compute them."""
        works, contexts, shards, began = given.works, given.contexts, given.shards, time.perf_counter()
        compute: Callable[[PartOnContext], None] = self._compute
        forked = self._executable.forked if self._are_forked else None
        if self._timed is not None and shards[0] is not None and not forked:
            works, compute = tuple(sorted(works, key=lambda work: work.place == self._timed)), self._compute_timed
            contexts, shards = tuple(work.context for work in works), tuple(work.shard for work in works)
        with forked.computing(works, self._slots) if forked else NOTHING as self._begun:
            self._launcher.run(given.phase, [functools.partial(compute, work) for work in works], contexts,
                               self._split.shards, shards)
        if self._executable.on_devices:
            self._unchecked += [work for work in works if getattr(work.function.mgpu_call, 'unchecked', ())]
        if self._timed is not None and forked and shards[0] is not None:  # all replicas compute at the same time
            self._seconds += time.perf_counter() - began
        if shards[0] is None and self._executable.on_devices and self._timings.waits():
            with self._timings.span(given.phase):
                wait(self._slots[slot] for work in works for slot in work.made)

    def _compute(self, work: PartOnContext) -> None:
        slots = self._slots
        with self._reading(work):
            for slot, result in zip(work.results, self._results_of(work)):
                slots[slot] = result

    def _reading(self, work: PartOnContext) -> Any:
        """Return a ``with`` block in which a part reads what was sent to the device."""
        return self._batch.buffers[work.shard][work.context].read() \
            if work.shard is not None and self._batch.buffers else NOTHING

    def _results_of(self, work: PartOnContext) -> Sequence[Any]:
        if id(work) in self._begun:
            return self._begun[id(work)]()
        return work.function.mgpu_call(*map(self._slots.__getitem__, work.given))

    def _compute_timed(self, work: PartOnContext) -> None:
        """Run a part as `_compute`; of the replica that is timed, wait for its results, and add the seconds."""
        began = time.perf_counter()
        self._compute(work)
        if work.place != self._timed:
            return
        launched = time.perf_counter()
        wait(self._slots[slot] for slot in work.made)
        waited = time.perf_counter() - launched
        self._seconds += launched - began + waited
        if self._executable.on_devices and not isinstance(self._launcher.executor, ThreadsExecutor):
            self._timings.move(waited, 'launch', 'run')

    def wait(self, given: instructions.Wait) -> None:
        """Wait until devices have computed parts."""
        works = given.works + (given.others if self._timings.waits() else ())
        if works:
            tasks = [functools.partial(wait, [self._slots[slot] for slot in work.made[:len(work.part.outputs)]])
                     for work in works]
            self._launcher.run('run', tasks, [work.context for work in works],
                               self._split.shards, [work.shard for work in works])

    def save(self, given: instructions.Save) -> None:
        """Move the values of shards to the host, and free their memory on the devices."""
        for slot in given.slots:
            self._slots[slot] = self._sent(None, self._slots[slot], HOST, {})
        for buffers in [self._batch.buffers[shard] for shard in given.shards]:
            buffers.update((context, DeviceBuffers(context)) for context in buffers)

    # --- exchanges

    def add(self, given: instructions.Add) -> None:
        """Add up the parts of sums that shards have."""
        (order, channel), value_of = self._executable.exchanges[given.group], self._slots.__getitem__
        parts = order.add(self._split, given.round, given.contexts, [list(map(value_of, part)) for part in given.parts])
        if parts is not None:
            channel.prepare(parts)
            if self._executable.over_ranks.overlaps:
                self._executable.over_ranks.start(channel)

    def finish(self, given: instructions.Finish) -> None:
        """Add up sums over the ranks."""
        channels = [self._executable.exchanges[group].channel for group in given.groups]
        self._executable.over_ranks.finish(channels)
        for slot, value in zip(given.targets, [value for channel in channels for value in channel.taken()]):
            self._slots[slot] = value

    def gather(self, given: instructions.Gather) -> None:
        """Put values together, of this rank's own samples or of all ranks."""
        self._wait_for_exchanges()
        with self._timings.span('device_to_host'):
            fetched = [[fetch(self._slots[slot]) for slot in (part[:1] if reduction == SAME else part)]
                       for part, reduction in zip(given.parts, given.reductions)]
        ranks: Communicator = Communicator() if given.own else self._executable.communicator
        with self._timings.span('exchange'):
            values = exchanged(fetched, given.reductions, self._split.lengths, ranks, self._split.tree)
        if self._are_forked:  # a value of one part lies in memory that processes share, which the user must not have
            values = [np.array(value) if len(part) == 1 else value for part, value in zip(given.parts, values)]
        for slot, reduction, value in zip(given.targets, given.reductions, values):
            self._slots[slot] = value if not given.own or not self._split.idle else \
                np.moveaxis(np.moveaxis(value, reduction.axis, 0)[:0], 0, reduction.axis)

    def _wait_for_exchanges(self) -> None:
        """Wait for values that devices exchange, while they compute the update: no value may stay without these."""
        if self._underway:
            with self._timings.span('exchange'):
                for each in self._underway:
                    each.finish()

    # --- new values and results

    def store(self, given: instructions.Store) -> None:
        """Give copies of variables their new values."""
        executable, slots = self._executable, self._slots
        self._new = [NewValues(new.storages, list(map(slots.__getitem__, new.slots))) for new in given.news]
        if executable.broadcasts or executable.owners:
            with self._timings.span('broadcast'):
                self._share_new_values(given.broadcast)
        everywhere = True
        for storages, values in self._new:
            self._store(storages, values)
            everywhere = everywhere and storages.everywhere
        for variable, slot in given.rows:
            everywhere = everywhere and replicated(variable) not in executable.variables  # which read it whole
            if not (executable.plan.shares.is_sharded and self._split.idle):
                self._transaction.store_rows(variable, slots[slot])
        if executable.owners:
            self._transaction.then(executable.owners.leave)
        elif everywhere:
            self._transaction.then(executable.note_new_values)

    def _share_new_values(self, broadcast: Sequence[tuple[SharedVariable, int]]) -> None:
        """Add the new values that other devices, or other ranks, have computed alone."""
        executable = self._executable
        new = executable.owners.exchange(dict(pair for new in self._new for pair in new.by_variable())) \
            if executable.owners else {}
        if executable.broadcasts:
            self._underway.append(executable.broadcasts)
            self._new += itertools.starmap(NewValues, executable.broadcasts.start(
                {replicated(variable): self._slots[slot] for variable, slot in broadcast}))
        self._new.append(NewValues(storages_of(list(new), [], executable.plan.mesh.contexts), list(new.values())))

    def _store(self, storages: Storages, values: Sequence[Any]) -> None:
        self._transaction.replace(storages.cells, values)
        copies = storages.copies
        if storages.others:
            copies = list(copies)
            with self._timings.span('broadcast'):
                for i, context, copy in storages.others:
                    # A copy that is out of date is one that this step does not read: it stays as it is.
                    if copy in storages.variables[i].latest_in:
                        with FailureExplained(self._executable.plan.mesh.contexts.index(context), context, 'update'):
                            value = copy.type.filter(copy_to(context, values[i]))
                            self._transaction.replace([copy.container.storage], [value])
                        copies[i] += copy,
        self._transaction.then(commit, storages.variables, copies)

    def fetch(self, given: instructions.Fetch) -> None:
        """Bring results to the host."""
        began, slots = time.perf_counter(), self._slots
        self._wait_for_exchanges()
        for variable, source, target in zip(*given):
            value = slots[source]
            slots[target] = own_copy(variable, value.on(HOST) if isinstance(value, Sum) else value)
        if self._executable.on_devices:  # results that stayed there may still have been in progress
            note(self._timings.seconds, 'run', HOST_TRACK, began)
        self._ended = time.perf_counter()


class StepAgain(StepRun):
    """A step whose parts ``compute(work, function, arguments, shard, with_samples)`` computes."""

    def __init__(self, executable: Executable, batch: Batch, compute: Callable[..., Any]) -> None:
        super().__init__(executable, batch)
        self._compute_part, self._are_forked = compute, False

    def _results_of(self, work: PartOnContext) -> Sequence[Any]:
        results = self._compute_part(
            work, self._executable.parts[work.part].functions[work.place], [self._slots[slot] for slot in work.given],
            None if work.shard is None else self._split.shards[work.shard], self._split.program.of_shards)
        return work.function.combined(results) if isinstance(work.function, Factored) else results


def send(executable: Executable, batch: Batch) -> None:
    """Send the inputs that the first stage reads of a batch to the devices; the run of the batch finds them there."""
    known = {i for i, value in enumerate(batch.slots) if value is not None}
    for _, instruction, _ in batch.split.program.stages:
        if isinstance(instruction, instructions.Send) and \
                known.issuperset(source for moves in instruction.moves for source, *_ in moves):
            StepRun(executable, batch).send(instruction)
            return
