"""Run a compiled plan on a batch: stage after stage, with an exchange before each, then the update."""
import functools
import time
from typing import Any, Dict, List, NamedTuple, Sequence

import numpy as np

from ..analysis import SAME, STACK
from ..devices.context_map import Context
from ..distributed.alone import Alone
from ..plan import Output
from ..plan.schedule import schedule
from ..replicas.replicated import Replicated
from ..replicas.transfers import copy_to, fetch, own_copy, wait
from .advice import MemoryExplained
from .batch import Batch, Outbox, Shard, Sum, Values
from .exchange import exchanged
from .executable import CompiledBoundary, CompiledPart, Executable
from .transaction import Transaction


class StepResult(NamedTuple):
    """What a step has computed.

    Attributes
    ----------
    outputs : list of ndarray
        The results of the plan.
    new_values : Transaction
        The new values are stored; they stay once it is committed, and are undone once it is rolled back.
    samples : int
        Samples of the batch, on all ranks.
    seconds : float
        Duration up to the new values, without that of gathering outputs with a row a sample.
    """

    outputs: List[np.ndarray]
    new_values: Transaction
    samples: int
    seconds: float


class NewValue(NamedTuple):
    """The new value of a variable: the contexts that have computed it, the value on each, and contexts that get a copy.
    """

    variable: Replicated
    contexts: Sequence[Context]
    values: Sequence[Any]
    copied_to: Sequence[Context] = ()


class Launched(NamedTuple):
    """A part that was started: the number of its round, the shards, and the results of each."""

    part: CompiledPart
    number: int
    shards: List[Shard]
    results: List[Any]


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
    """

    def __init__(self, executable: Executable, batch: Batch):
        self._executable, self._batch = executable, batch
        self._launcher, self._timings = executable.launcher, executable.timings
        self._transaction = Transaction()
        self._new: List[NewValue] = []
        self._launched: List[Launched] = []
        self._began = time.perf_counter()

    def start(self) -> None:
        """Compute all stages but what the last one has launched on the devices."""
        self._executable.over_ranks.wait()  # a second Ctrl-C may have ended the wait of the last step
        for stage in self._executable.stages:
            self._complete(self._launched)
            self._launched = []
            self._exchange(stage.boundary)
            if stage.saved:
                for shard in self._batch.shards:
                    shard.values.update([(variable, shard.values[source]) for variable, source in stage.saved])
            self._compute(stage.parts)

    def finish(self) -> StepResult:
        """Wait for the last stage, compute the update, store the new values, and gather the outputs."""
        self._complete(self._launched)
        self._launched = []
        self._exchange(self._executable.last)
        self._executable.over_ranks.wait()
        values = self._update()
        outputs = self._results(values)
        seconds = time.perf_counter() - self._began
        self._gather_rows(outputs)
        results = [outputs[output] for output in self._executable.plan.results]
        return StepResult(results, self._transaction, self._batch.samples, seconds)

    def undo(self) -> None:
        """Put every old value back, after an error."""
        self._executable.over_ranks.wait()
        self._transaction.roll_back()

    # --- stages

    def _compute(self, parts: Sequence[CompiledPart]) -> None:
        """Run the parts of a stage, cycle after cycle; what the last cycle has launched is not complete yet."""
        waits = len(parts) > 1 and self._executable.on_devices
        for cycle in schedule(parts, len(self._batch.rounds)):
            # The values of a micro-batch are released before the next one starts. The CPU computes at once.
            if not waits:
                self._complete(self._launched)
                self._launched = []
            before = self._launched  # not in one line with the next: that would keep the results of the cycle before
            self._launched = self._launch(cycle)
            if waits:
                self._complete(before)

    def _launch(self, cycle):
        """Start the parts of a clock cycle, each on the shards of its round."""
        work = [(part, shard) for part, number in cycle for shard in self._batch.rounds[number]]
        contexts = [part.part.contexts[shard.replica] for part, shard in work]
        shards = [shard for _, shard in work]
        arguments = arguments_on_devices(self._executable, work, contexts, shards, self._batch.common)
        name = 'launch' if self._executable.on_devices else 'run'
        with self._timings.span(name):
            tasks = [functools.partial(part.run, shard.replica, given) for (part, shard), given in zip(work, arguments)]
            results = self._launcher.run(name, tasks, contexts, shards)
        for (part, shard), (outputs, _) in zip(work, results):
            shard.keep(part.part, outputs)
        results = iter(results)
        return [Launched(part, number, self._batch.rounds[number], [next(results) for _ in self._batch.rounds[number]])
                for part, number in cycle]

    def _complete(self, launched: Sequence[Launched]) -> None:
        """Wait for what was launched, add up its sums, and note the new values of the first round."""
        executable, batch = self._executable, self._batch
        if executable.on_devices and launched and (not batch.alone or self._timings.waits()):
            with self._timings.span('run'):
                work = [(each.part.part.contexts[shard.replica], shard, outputs) for each in launched
                        for shard, (outputs, _) in zip(each.shards, each.results)]
                contexts, shards, every_outputs = zip(*work)
                self._launcher.run('run', [functools.partial(wait, outputs) for outputs in every_outputs], contexts,
                                   shards)
        for compiled, number, shards, results in launched:
            part = compiled.part
            contexts = [part.contexts[shard.replica] for shard in shards]
            if not batch.alone:
                for group in part.sums:
                    sums = executable.sums[group]
                    sums.add(shards, contexts, number, len(batch.rounds))
                    if number == len(batch.rounds) - 1:
                        executable.over_ranks.start(sums, batch.idle)
            for j, variable in enumerate(compiled.updated):
                new = NewValue(variable, contexts, [values[j] for _, values in results])
                if variable.variable not in executable.streams:
                    self._new += [new] if number == 0 else []
                elif not batch.idle:
                    self._store([new])  # the next slice goes on there

    def _exchange(self, boundary: CompiledBoundary) -> None:
        """Add to what every shard knows what all of them have."""
        batch = self._batch
        if batch.alone:  # what one shard has stays on its device
            shard, = batch.shards
            for variable, source, reduction in boundary.exchanges:
                value = shard.values[source]
                batch.common[variable] = value.reshape((1,) + value.shape) if reduction == STACK else value
            return
        self._executable.over_ranks.finish(boundary.sums, batch.idle)
        for sums in boundary.sums:
            batch.common.update(sums.taken())
        if boundary.others:
            variables, sources, reductions = zip(*boundary.others)
            values = self._together(sources, reductions, self._executable.communicator)
            batch.common.update(zip(variables, values))

    def _together(self, variables, reductions, communicator):
        batch = self._batch
        with self._timings.span('device_to_host'):
            parts = [[fetch(shard.values[variable])
                      for shard in (batch.shards[:1] if reduction == SAME else batch.shards)]
                     for variable, reduction in zip(variables, reductions)]
        with self._timings.span('exchange'):
            return exchanged(parts, reductions, batch.lengths, communicator)

    # --- the update

    def _update(self) -> Values:
        """Compute what is made of exchanged values, and store what is new; return what the parts have computed."""
        executable, batch = self._executable, self._batch
        values: Values = {}
        for compiled in executable.update:
            part = compiled.part
            contexts = part.contexts[:1] if batch.alone else part.contexts
            arguments = self._broadcast(compiled, contexts)
            with self._timings.span('update'):
                tasks = [functools.partial(compiled.run, i, given) for i, given in enumerate(arguments)]
                results = self._launcher.run('update', tasks, contexts)
                if self._timings.waits():
                    wait(value for _, new in results for value in new)
            values.update(zip(part.outputs, results[0][0]))
            self._new += [NewValue(variable, contexts, each, part.copied_to)
                          for variable, each in zip(compiled.updated, zip(*[new for _, new in results]))]
        with self._timings.span('broadcast'):
            if executable.owners:
                own = {new.variable: new.values[0] for new in self._new}
                self._new += [NewValue(variable, [], [value], executable.plan.mesh.contexts)
                              for variable, value in executable.owners.exchange(own).items()]
            self._store(self._new)
            if executable.owners:
                self._transaction.then(executable.owners.leave)
        return values

    def _broadcast(self, compiled, contexts):
        """Return what each context is given of exchanged values."""
        executable, given = self._executable, compiled.part.given
        tasks = [functools.partial(Outbox({context: executable.update_buffers(context)}).arguments, given,
                                   compiled.takes[i], context, {}, self._batch.common)
                 for i, context in enumerate(contexts)]
        if not any(any(takes) for takes in compiled.takes):
            return [task() for task in tasks]
        with self._timings.span('broadcast'):
            return self._launcher.run('broadcast', tasks, contexts)

    def _store(self, every_new: Sequence[NewValue]) -> None:
        """Give copies of variables their new values."""
        transaction = self._transaction
        for variable, contexts, values, copied_to in every_new:
            copies = variable.copies
            stored = {}
            for context, value in zip(contexts, values):
                stored[copies[context]] = None
                transaction.replace(copies[context], value)
            others = [each for each in copied_to if each in copies and each not in contexts]
            for i, context in enumerate(others):
                if copies[context] not in stored:  # contexts on the host share a copy
                    with MemoryExplained(i, context, 'update'):
                        stored[copies[context]] = None
                        transaction.convert(copies[context], copy_to(context, values[0]))
            transaction.then(variable.commit, [*contexts, *others])

    # --- outputs

    def _results(self, values: Values) -> Dict[Output, np.ndarray]:
        """Return the results that are the same on each replica, on the host."""
        alike = [output for output in dict.fromkeys(self._executable.plan.results) if not output.has_rows]
        with self._timings.span('run'):  # results that stayed on the device may still be in progress
            return {output: self._on_host(output.variable, values) for output in alike}

    def _on_host(self, variable, values):
        for known in (values, self._batch.common, self._batch.shards[0].values):
            if variable in known:
                value = known[variable]
                return own_copy(variable, value.value if isinstance(value, Sum) else value)
        raise AssertionError('nothing has computed %s' % variable)

    def _gather_rows(self, outputs: Dict[Output, np.ndarray]) -> None:
        """Add the results with rows of samples to the outputs, and store the states with a row a sample."""
        plan, batch = self._executable.plan, self._batch
        outputs.update(self._gathered([output for output in dict.fromkeys(plan.results) if output.has_rows]))
        if plan.rows and not (plan.shares.is_sharded and batch.idle):
            states = self._gathered(list(plan.rows.values()))
            with self._timings.span('update'):
                for variable, output in plan.rows.items():
                    self._transaction.store_rows(variable, states[output])

    def _gathered(self, outputs):
        """Return outputs with rows of samples, put together on the host: those of all ranks, or of this rank's own.
        """
        if not outputs:
            return {}
        is_sharded = self._executable.plan.shares.is_sharded
        rows = self._together([output.variable for output in outputs], [output.reduction for output in outputs],
                              Alone() if is_sharded else self._executable.communicator)
        if is_sharded and self._batch.idle:
            rows = [np.moveaxis(np.moveaxis(value, output.reduction.axis, 0)[:0], 0, output.reduction.axis)
                    for output, value in zip(outputs, rows)]
        return dict(zip(outputs, rows))


def arguments_on_devices(executable: Executable, work: Sequence[Any], contexts: Sequence[Context],
                         shards: Sequence[Shard], common: Values) -> List[Any]:
    """Return the arguments of parts for shards, on the devices of their contexts.

    Parameters
    ----------
    executable : Executable
    work : list of (CompiledPart, Shard)
    contexts : list of Context
    shards : list of Shard
        Those of `work`.
    common : dict of theano.Variable to ndarray
    """
    tasks = [functools.partial(shard.outbox.arguments, part.part.given, part.takes[shard.replica], context,
                               shard.values, common) for (part, shard), context in zip(work, contexts)]
    if not executable.on_devices:
        return [task() for task in tasks]
    with executable.timings.span('host_to_device'):
        return executable.launcher.run('host_to_device', tasks, contexts, shards)


def send(executable: Executable, batch: Batch) -> None:
    """Send the inputs that the first stage reads of a batch to the devices; the run of the batch finds them there."""
    if executable.on_devices and executable.stages:
        work = [(part, shard) for part in executable.stages[0].parts if part.part.level == 0
                for shard in batch.rounds[0]]
        contexts = [part.part.contexts[shard.replica] for part, shard in work]
        arguments_on_devices(executable, work, contexts, [shard for _, shard in work], batch.common)
