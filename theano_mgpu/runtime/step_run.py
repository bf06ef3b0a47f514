"""A step: stage after stage of a compiled plan on a batch, with an exchange before each, then the update."""
from __future__ import annotations

import contextlib
import functools
import time
from typing import Any, Collection, Iterator, NamedTuple, Sequence

import numpy as np
import theano

from ..comm.alone import Alone
from ..comm.collectives import broadcast_object
from ..comm.communicator import Communicator
from ..devices.context_map import Context
from ..graph.analysis import SAME, STACK, Reduction
from ..plan import Output, Part
from ..plan.schedule import schedule
from ..plan.step_plan import Boundary
from .batch import Batch, DeviceSum, Shard, Sum, Values
from .exchange import exchanged
from .executable import CompiledPart, Executable
from .executors import SerialExecutor
from .launcher import MemoryExplained
from .replicas.replicated import Replicated, Slots, commit, slots_of
from .replicas.transfers import fetch, own_copy, wait
from .transaction import Transaction

Work = Sequence[Any]  # of (Part, Shard)


class StepResult(NamedTuple):
    """The results of a step.

    Attributes
    ----------
    outputs : list of ndarray
        The results of the plan.
    new_values : Transaction
        The new values are stored; they stay once it is committed, and are undone once it is rolled back.
    samples : int
        Samples of the batch, on all ranks.
    ended : float
        The `time.perf_counter` when the new values were stored, before outputs with a row a sample are gathered.
    timed : float
        Seconds in which the replica that was to be timed has computed its stages.
    """

    outputs: list[np.ndarray]
    new_values: Transaction
    samples: int
    ended: float
    timed: float = 0.0


class NewValues(NamedTuple):
    """The new values of variables: their slots on the contexts that have computed them, the values on each.

    `copied_to` has contexts that get a copy; where no context of this process has computed the values, they are of the
    host.
    """

    slots: Slots
    contexts: Sequence[Context]
    values: Sequence[Sequence[Any]]
    copied_to: Sequence[Context] = ()

    def by_variable(self) -> Iterator[tuple[Replicated, Any]]:
        """Return each variable with its value on the first context."""
        return zip(self.slots.variables, self.values[0])

    def without(self, variables: Collection[Replicated]) -> NewValues:
        """Return the new values of the other variables."""
        kept = [i for i, variable in enumerate(self.slots.variables) if variable not in variables]
        return self._replace(slots=slots_of([self.slots.variables[i] for i in kept], self.contexts),
                             values=[[values[i] for i in kept] for values in self.values])


class Launched(NamedTuple):
    """A part that was started: the number of its round, the shards, and the results of each."""

    part: Part
    number: int
    shards: Sequence[Shard]
    results: list[Any]


def run(executable: Executable, batch: Batch) -> StepResult:
    """Compute a batch.

    Parameters
    ----------
    executable : Executable
    batch : Batch

    Returns
    -------
    StepResult
    """
    step = StepRun(executable, batch)
    try:
        step.start()
        return step.finish()
    except BaseException:
        step.undo()
        raise


class StepRun:
    """One step, in two halves: between them, the devices compute, and the next batch can be prepared.

    Parameters
    ----------
    executable : Executable
    batch : Batch
    timed : int, optional
        A replica of this process whose time is measured: it is launched last, and waited for.
    """

    def __init__(self, executable: Executable, batch: Batch, timed: int | None = None):
        self._timed, self._seconds = timed, 0.0
        self._executable, self._plan, self._batch = executable, executable.plan, batch
        self._launcher, self._timings = executable.launcher, executable.timings
        self._transaction = Transaction()
        self._new: list[NewValues] = []
        self._launched: list[Launched] = []
        self._underway: list[Any] = [] if batch.alone else list(executable.device_sums)  # of exchanges by NCCL
        # The results of rank 0 count, also where an op fails here, such as one whose queue ends earlier.
        self._own: Any = contextlib.suppress(Exception) if executable.of_rank_0 and executable.communicator.rank else \
            contextlib.nullcontext()

    def start(self) -> None:
        """Compute all stages; the last one may still be under way on the devices."""
        self._executable.over_ranks.wait()  # a second Ctrl-C may have ended the wait of the last step
        with self._own:
            for stage in self._plan.stages:
                self._exchange(stage.boundary)
                for shard in self._batch.shards if stage.saved else ():
                    shard.values.update([(variable, shard.values[source]) for variable, source in stage.saved.items()])
                self._compute(stage.parts, 1 if stage.once else len(self._batch.rounds))
                if stage.once:
                    self._batch.share(stage.parts)

    def finish(self) -> StepResult:
        """Wait for the last stage, compute the update, store the new values, and gather the outputs."""
        result = StepResult([], self._transaction, self._batch.samples, 0.0)
        with self._own:
            result = self._computed()
        return self._of_rank_0(result) if self._executable.of_rank_0 else result

    def _of_rank_0(self, result: StepResult) -> StepResult:
        """Return the result with rank 0's outputs, and store rank 0's new values."""
        variables, ranks = self._executable.variables, self._executable.communicator
        new = [(variables.index(variable), fetch(value)) for each in self._new
               for variable, value in each.by_variable()]
        outputs, new = broadcast_object(ranks, (result.outputs, new))
        for i, value in new if ranks.rank else ():
            self._transaction.store_rows(variables[i].variable, value)
        return result._replace(outputs=outputs)

    def _computed(self) -> StepResult:
        of_update = self._update()
        self._wait_for_exchanges()
        whole, with_rows = self._executable.results
        with self._timings.span('run'):  # results that stayed on the device may still be in progress
            outputs = {each: self._on_host(each.variable, of_update) for each in whole}
        ended = time.perf_counter()
        outputs.update(self._gathered(with_rows))
        self._store_rows()
        return StepResult([outputs[each] for each in self._plan.results], self._transaction, self._batch.samples,
                          ended, self._seconds)

    def _wait_for_exchanges(self) -> None:
        """Wait for values that devices exchange, while they compute the update: no value may stay without these."""
        if self._underway:
            with self._timings.span('exchange'):
                for each in self._underway:
                    each.finish()

    def undo(self) -> None:
        """Put every old value back, after an error, and free the arrays that the step has left on the devices."""
        self._executable.over_ranks.wait()
        self._transaction.roll_back()
        self._executable.drop()

    # --- stages

    def _compute(self, parts: Sequence[Part], n_rounds: int) -> None:
        """Run the parts of a stage, cycle after cycle; the results of the last cycle are not complete yet."""
        waits = len(parts) > 1 and self._executable.on_devices
        for cycle in schedule(parts, n_rounds):
            # The values of a micro-batch are released before the next one starts. The CPU computes at once.
            if not waits:
                self._complete_all()
            before = self._launched  # not in one line with the next: that would keep the results of the cycle before
            self._launched = self._launch(cycle)
            if waits:
                self._complete(before)

    def _launch(self, cycle: Sequence[tuple[Part, int]]) -> list[Launched]:
        """Start the parts of a clock cycle, each on the shards of its round."""
        compiled, rounds = self._executable.parts, self._batch.rounds
        work = [(part, shard) for part, number in cycle for shard in rounds[number]]
        work.sort(key=lambda each: each[1].replica == self._timed)
        contexts, arguments = arguments_on_devices(self._executable, work, self._batch.common)
        name = 'launch' if self._executable.on_devices else 'run'
        tasks = [functools.partial(self._time if shard.replica == self._timed else self._call, compiled[part],
                                   shard.replica, given, shard) for (part, shard), given in zip(work, arguments)]
        results = self._launcher.run(name, tasks, contexts, [shard for _, shard in work])
        for (part, shard), (outputs, _) in zip(work, results):
            shard.keep(part, outputs)
        results_of = dict(zip(work, results))
        return [Launched(part, number, rounds[number], [results_of[part, shard] for shard in rounds[number]])
                for part, number in cycle]

    def _call(self, compiled: CompiledPart, replica: int, arguments: Sequence[Any],
              shard: Shard | None = None) -> tuple[list[Any], list[Any]]:
        """Run a part as `CompiledPart.run`, on a shard or, in the update, on none."""
        return compiled.run(replica, arguments)

    def _time(self, compiled: CompiledPart, replica: int, arguments: Sequence[Any],
              shard: Shard) -> tuple[list[Any], list[Any]]:
        """Run a part, wait for its outputs, and add the seconds that it took."""
        began = time.perf_counter()
        outputs, new_values = self._call(compiled, replica, arguments, shard)
        launched = time.perf_counter()
        wait(outputs)
        waited = time.perf_counter() - launched
        self._seconds += launched - began + waited
        if self._executable.on_devices and isinstance(self._launcher.executor, SerialExecutor):
            self._timings.move(waited, 'launch', 'run')
        return outputs, new_values

    def _complete_all(self) -> None:
        self._complete(self._launched)
        self._launched = []

    def _complete(self, every_launched: Sequence[Launched]) -> None:
        """Wait for parts that were started, add up their sums, and note the new values of the first round."""
        if not every_launched:
            return
        executable, batch = self._executable, self._batch
        waited = [each for each in every_launched if self._timings.waits() or
                  not batch.alone and each.part not in executable.added_on_devices]
        if executable.on_devices and waited:
            work = [(each.part.contexts[shard.replica], shard, functools.partial(wait, outputs))
                    for each in waited for shard, (outputs, _) in zip(each.shards, each.results)]
            on, of, tasks = zip(*work)
            self._launcher.run('run', tasks, on, of)
        for part, number, shards, results in every_launched:
            contexts = [part.contexts[shard.replica] for shard in shards]
            for group in () if batch.alone else part.sums:
                sums = executable.sums[group]
                sums.add(batch, number, contexts)
                if number == len(batch.rounds) - 1:
                    executable.over_ranks.start(sums, batch.idle)
            if number == 0 and part.updates:
                slots = executable.parts[part].slots(tuple(contexts))
                self._new.append(NewValues(slots, contexts, [values for _, values in results]))
            if batch.waits_on_host and executable.on_devices and part in self._plan.ends:
                for shard in shards:
                    shard.move_to_host()

    def _exchange(self, boundary: Boundary) -> None:
        """Complete the stage before, and add the exchanged values to those that every shard knows."""
        self._complete_all()
        batch = self._batch
        if batch.alone:  # the values of the only shard stay on its device
            shard, = batch.shards
            for variable, source, reduction in boundary.exchanges:
                value = shard.values[source]
                batch.common[variable] = value.reshape((1,) + value.shape) if reduction == STACK else value
            return
        every_sums = [self._executable.sums[group] for group in boundary.sums]
        self._executable.over_ranks.finish(every_sums, batch.idle)
        for sums in every_sums:
            batch.common.update(sums.taken())
        if boundary.others:
            self._wait_for_exchanges()
            variables, sources, reductions = zip(*boundary.others)
            values = self._together(sources, reductions, self._executable.communicator)
            batch.common.update(zip(variables, values))

    def _together(self, variables: Sequence[theano.Variable], reductions: Sequence[Reduction],
                  communicator: Communicator) -> list[Any]:
        """Return the whole of values that the shards have parts of."""
        batch = self._batch
        with self._timings.span('device_to_host'):
            parts = [[fetch(shard.values[variable])
                      for shard in (batch.shards[:1] if reduction == SAME else batch.shards)]
                     for variable, reduction in zip(variables, reductions)]
        with self._timings.span('exchange'):
            return exchanged(parts, reductions, batch.lengths, communicator, batch.tree)

    # --- the update

    def _update(self) -> Values:
        """Compute the update from the values exchanged last, and store new values; return the outputs of its parts."""
        executable, batch = self._executable, self._batch
        self._exchange(self._plan.last)
        executable.over_ranks.wait()
        of_update: Values = {}
        for part in self._plan.update:
            compiled, contexts = executable.parts[part], part.contexts[:1] if batch.alone else part.contexts
            arguments = self._broadcast(part, contexts)
            tasks = [functools.partial(self._call, compiled, i, given) for i, given in enumerate(arguments)]
            results = self._launcher.run('update', tasks, contexts)
            if self._timings.waits():
                with self._timings.span('update'):
                    wait(value for _, new in results for value in new)
            of_update.update(zip(part.outputs, results[0][0]))
            self._new.append(NewValues(compiled.slots(contexts), contexts, [new for _, new in results], part.copied_to))
        if executable.broadcasts or executable.owners:
            with self._timings.span('broadcast'):
                self._share_new_values()
        self._store(self._new)
        if executable.owners:
            self._transaction.then(executable.owners.leave)
        return of_update

    def _share_new_values(self) -> None:
        """Add the new values that other devices, or other ranks, have computed alone."""
        executable = self._executable
        own = dict(pair for new in self._new for pair in new.by_variable())
        sent: dict[Replicated, Any] = {}
        if executable.broadcasts:
            sent = executable.broadcasts.start(own)
        if sent:
            self._underway.append(executable.broadcasts)
            self._new = [new.without(sent) for new in self._new]
            self._new += [NewValues(slots_of([variable], contexts), contexts, [[value] for value in values])
                          for variable, (contexts, values) in sent.items()]
        if executable.owners:
            new = executable.owners.exchange(own, sent)
            self._new.append(NewValues(slots_of(list(new), []), [], [list(new.values())], self._plan.mesh.contexts))

    def _broadcast(self, part: Part, contexts: Sequence[Context]) -> list[list[Any]]:
        """Return the arguments of a part of the update on each context."""
        takes = self._executable.parts[part].takes
        tasks = [functools.partial(self._executable.outbox().arguments, part.given, takes[i], context, {},
                                   self._batch.common) for i, context in enumerate(contexts)]
        return self._launcher.run('broadcast', tasks, contexts) if any(map(any, takes)) else [task() for task in tasks]

    def _store(self, every_new: Sequence[NewValues]) -> None:
        """Give copies of variables their new values."""
        for new in every_new:
            for storages, values in zip(new.slots.storages, new.values):
                self._transaction.replace(storages, values)
            copies = new.slots.copies
            others = [context for context in new.copied_to if context not in new.contexts]
            if others:
                with self._timings.span('broadcast'):
                    copies = [self._copied(variable, value, stored, others)
                              for (variable, value), stored in zip(new.by_variable(), copies)]
            self._transaction.then(commit, new.slots.variables, copies)

    def _copied(self, variable: Replicated, value: Any, stored: tuple[Any, ...], contexts: Sequence[Context]
                ) -> tuple[Any, ...]:
        """Copy a new value to contexts; return the copies that have it: these, and those that are `stored`."""
        # A copy that is out of date is one that this step does not read: it stays as it is.
        for i, context in enumerate([each for each in contexts if variable.is_current(each)]):
            copy = variable.copies[context]
            if copy not in stored:  # contexts on the host share a copy
                with MemoryExplained(i, context, 'update'):
                    self._transaction.replace_by_copy(copy, value, context)
                stored += copy,
        return stored

    # --- outputs

    def _on_host(self, variable: theano.Variable, of_update: Values) -> Any:
        for known in (of_update, self._batch.common, self._batch.shards[0].values):
            if variable in known:
                value = known[variable]
                return own_copy(variable, value.value if isinstance(value, (Sum, DeviceSum)) else value)
        raise AssertionError('nothing has computed %s' % variable)

    def _store_rows(self) -> None:
        """Store the states with a row a sample."""
        rows = self._plan.rows
        if rows and not (self._plan.shares.is_sharded and self._batch.idle):
            states = self._gathered(list(rows.values()))
            with self._timings.span('update'):
                for variable, output in rows.items():
                    self._transaction.store_rows(variable, states[output])

    def _gathered(self, outputs: Sequence[Output]) -> dict[Output, Any]:
        """Return outputs with rows of samples, put together on the host, of all ranks or of this rank's own samples."""
        if not outputs:
            return {}
        is_sharded = self._plan.shares.is_sharded
        reductions: list[Any] = [output.reduction for output in outputs]
        rows = self._together([output.variable for output in outputs], reductions,
                              Alone() if is_sharded else self._executable.communicator)
        if is_sharded and self._batch.idle:
            rows = [np.moveaxis(np.moveaxis(value, each.axis, 0)[:0], 0, each.axis)
                    for each, value in zip(reductions, rows)]
        return dict(zip(outputs, rows))


def arguments_on_devices(executable: Executable, work: Work, common: Values) -> tuple[list[Context], list[list[Any]]]:
    """Return the contexts of parts for shards, and the arguments on their devices.

    Parameters
    ----------
    executable : Executable
    work : list of (Part, Shard)
    common : dict of theano.Variable to ndarray
    """
    contexts = [part.contexts[shard.replica] for part, shard in work]
    tasks = [functools.partial(shard.outbox.arguments, part.given, executable.parts[part].takes[shard.replica], context,
                               shard.values, common) for (part, shard), context in zip(work, contexts)]
    return contexts, [task() for task in tasks] if not executable.on_devices else \
        executable.launcher.run('host_to_device', tasks, contexts, [shard for _, shard in work])


def send(executable: Executable, batch: Batch) -> None:
    """Send the inputs that the first stage reads of a batch to the devices; the run of the batch finds them there."""
    first = next((stage for stage in executable.plan.stages if not stage.once), None)
    if executable.on_devices and first:
        arguments_on_devices(executable, [(part, shard) for part in first.parts if part.level == 0 and not first.saved
                                          for shard in batch.rounds[0]], batch.common)
