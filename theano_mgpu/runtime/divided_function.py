"""A graph over a batch, run over several contexts: bind, split, run, commit."""
from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Sequence, Tuple

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable

from ..checks import verification
from ..checks.ranks import BatchCheck
from ..checks.sentinel import Sentinel
from ..comm.activities import AGREE
from ..comm.collectives import broadcast_object
from ..comm.mpi import choose_ranks
from ..devices.asked_contexts import resolve_contexts
from ..devices.contexts import check_process
from ..devices.shared_variables import add_step_lock
from ..errors import GraphError, LengthError, ReplicaError
from ..graph.rewrites import print_values
from ..options import Options
from ..plan import record
from ..utils import rank_process
from ..utils.attributes import temporarily
from ..utils.mpi_environment import STEP
from ..utils.timeline import HOST, note
from .batch import Batch
from .batches.prefetch import LookAhead
from .building import Updates, build, divide
from .call_hooks import CallHooks, Computed
from .overlap import ExchangeWatch, HostSums
from .remedies import Remedies
from .replicas.replicated import replicated
from .speeds import Speeds
from .step_run import StepAgain, StepResult, StepRun, send

Arguments = Tuple[Sequence[Any], Dict[str, Any]]


class DividedFunction:
    """A graph over a batch, computed in one sub-batch per context, with the result of one device.

    Its inputs have values as items, ``f['rate'] = 0.7``, as in a `theano.function`. With the flag ``mgpu.verify`` it
    compares the first call that several contexts compute with plain Theano.

    Attributes
    ----------
    plan : StepPlan
        The parts, their contexts, the exchanges, and the reasons. Print it.
    timings : Timings
        Seconds that the calls spent in each phase, see `timeline.PHASES`.
    contexts : list of Context
        The contexts that it runs on: of the first replica alone if the graph cannot be divided.
    refused : str or None
        Why the graph cannot be divided, if that is so.
    calls : int
        The calls so far, the present one among them.
    samples : int
        Samples of the last batch, on all ranks.
    seconds : float
        Duration of the last step up to its new values; gathering outputs with one row per sample is not included.
    """

    _n_outputs: int | None = None  # the outputs that a call returns; by default all of them

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Updates, options: Options):
        self.lock = threading.RLock()
        self.samples = self.calls = 0
        self.seconds = 0.0
        self.look_ahead = LookAhead(self._prepare)
        self.hooks = CallHooks(self._call)
        self._definition = inputs, outputs, updates
        self._remedies = Remedies(options.name, choose_ranks(options.executor))
        self._is_verified = not options.flags.verify
        self._build(options)

    # --- building

    def _build(self, options: Options) -> None:
        contexts, ranks = resolve_contexts(options.contexts), choose_ranks(options.executor)
        while True:
            divided = divide(*self._definition, options, contexts, ranks.size)
            try:
                self.built = build(divided, options, ranks)
                break
            except ReplicaError as error:
                options = self._remedies.for_build(error, divided, options)
            for variable in divided.inputs.slices.data_sets():
                replicated(variable).evict()  # another function may hold copies that this one has made
            gc.collect()
        self.options, self.inputs, self.arguments = options, self.built.inputs, self.built.inputs.arguments
        self.executable, self.updated, self.refused = self.built.executable, self.built.updated, self.built.refusal
        self.ranks, self.timings, self.plan = ranks, self.executable.timings, self.executable.plan
        self.mesh, self.contexts, self.functions = self.plan.mesh, self.plan.mesh.contexts, self.executable.functions
        self.n_replicas, self.sharded = self.plan.shares.n_replicas, self.plan.shares.is_sharded
        splitter, every = self.built.splitter, options.flags.check
        self._speeds = Speeds(options.name, splitter) if splitter.shares.adapts else None
        self._sentinel = Sentinel(self.built, options.name, every) if every else None
        self._watch, self._host_sums = ExchangeWatch(self.executable, options), HostSums(self.executable)
        has_rows = any(output.has_rows for output in self.plan.results)
        own = [i for i, split in enumerate(self.arguments.split) if split] if self.sharded else None
        self._check_batch = BatchCheck(ranks, self.built.number, options.name, has_rows,
                                       options.batch_of_rank_0, self.arguments.inputs, own, self.built.alike,
                                       calls=self.calls)
        for variable in self.built.variables:
            add_step_lock(variable, self.lock)

    def _rebuild(self, options: Options) -> None:
        """Build the function again in the middle of a call. Slices, and values that were set, stay."""
        slices, arguments = self.built.splitter.slices, self.arguments
        self.look_ahead.forget()  # it was split for the function before
        for variable in self.executable.variables:
            variable.evict()  # not every device may need it any more
        record.forget(self.timings)
        self._build(options)
        self.built.splitter.slices.update(slices)
        self.arguments.assigned.update(arguments.assigned)

    @property
    def profiles(self) -> list[Any]:
        """The ProfileStats of the compiled functions, where they are profiled."""
        return [function.profile for function in self.functions if function.profile]

    @property
    def is_settled(self) -> bool:
        """Return whether shares by speed, exchange and use of processes have settled: then a step's time counts."""
        forked = self.executable.forked
        return (self._speeds is None or self._speeds.is_settled) and self._watch.is_settled and \
            (forked is None or forked.is_settled(self.samples))

    @property
    def why_whole(self) -> str:
        """Return why batches as long as the last one stay whole: processes are slower; '' if they do not."""
        return self.executable.forked.why_whole(self.samples) if self.executable.forked else ''

    def dividing(self) -> Any:
        """Return a context manager in which batches are divided, also those that are faster as a whole on one core."""
        forked = self.executable.forked
        return contextlib.nullcontext() if forked is None else temporarily(forked, 'cores', False)

    # --- the values of inputs

    def __contains__(self, item: Any) -> bool:
        return item in self.arguments

    def __getitem__(self, item: Any) -> Any:
        """Return the value that an input, by position, name or variable, has in the next call without it; None if none.
        """
        return self.arguments[item]

    def __setitem__(self, item: Any, value: Any) -> None:
        """Set another value for the next call, of an input with a default, a ``theano.In(variable, value=...)``."""
        self.arguments[item] = value

    # --- a call

    def _call(self, arguments: Arguments) -> Computed:
        try:
            outputs = self.locked_step(arguments)
        finally:
            self.arguments.assigned.clear()
        assert outputs is not None
        return Computed(self._printed(outputs)[:self._n_outputs], self.samples, self.contexts, self)

    def locked_step(self, arguments: Arguments | None) -> list[np.ndarray] | None:
        """Compute a batch, and return the outputs and the values to print.

        The arguments are None for a process whose data has ended; once the data of all has, None is returned.
        """
        if not self._is_verified and arguments and verification.is_divided_for(self, *arguments):
            self._is_verified = True
            report = verification.verified(self, *arguments)
            if not report.passed:
                raise GraphError('%s does not give the answer of one device, nothing was changed: %s'
                                 % (self.options.name or 'a function', report))
        if self.executable.on_devices:
            check_process()
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self.lock: return self._step(arguments)  # noqa: E701

    def _step(self, arguments: Arguments | None) -> list[np.ndarray] | None:
        if self.plan.machine.size > self.ranks.size:  # a fork of a rank computes without the other ranks
            self._rebuild(self.options)
        with self.ranks.single_thread:
            began, values, batch, length, states = time.perf_counter(), None, None, 0, self.inputs.states()
            if arguments is not None:
                values, batch = self.look_ahead.take(*arguments) or (self.arguments.bind(*arguments), None)
                length = self.inputs.length(values, states)
            note(self.timings.seconds, 'scatter', HOST, began)
            lengths, own = [length], values
            if self.ranks.size > 1:
                with self.timings.span('wait'):
                    lengths, values = self._check_batch(length, own)
            self.calls += 1
            self.timings.calls += 1
            if not (sum(lengths) if self.sharded else lengths[0]):
                self.samples = 0
                if arguments is None:
                    return None
                raise LengthError('the batch is empty: no process has a sample of it')
            # A batch that was split ahead is of no use if rank 0 has sent other values.
            result = self._computed(values, states, lengths, batch if values is own else None)
            self.samples, self.seconds = result.samples, result.ended - began
            cost = self._host_sums.note(self.seconds)
            if cost:
                record.note_change('%s: %s' % (self.options.name or 'a function', cost))
            self._overlap(self._watch.note(self.seconds))
            rank_process.report(STEP)
            return result.outputs

    def _overlap(self, percent: int) -> None:
        """Build the function anew where the exchange takes some percent of a step, and the computation can hide it."""
        if percent:
            record.note_change('%s: gradients are exchanged while the next ones are computed, because that takes %d %% '
                               'of a step (mgpu.overlap=auto)' % (self.options.name or 'a function', percent))
            self._rebuild(replace(self.options, strategy=replace(self.options.strategy, exchange=percent)))

    def _computed(self, values: Any, states: Any, lengths: Sequence[int], batch: Batch | None) -> StepResult:
        """Compute a batch on every rank: again, in another way, each time that a device has too little memory."""
        while True:
            try:
                result = self._run(batch, functools.partial(self.split, values, states, lengths))
                if self._remedies.tried:
                    self._remedies.note(lengths, self.built)
                return result
            except BaseException as error:
                options = self._remedies.for_step(lengths, error, self.built, self.options)
            # Only now nothing has the arrays of the attempt any more: the traceback of the error had them.
            batch = None
            self.look_ahead.forget()
            gc.collect()
            if options is not self.options:
                self._rebuild(options)
                states = self.inputs.states()  # it may have other states with a row a sample, or none
                if values is not None:
                    self.inputs.length(values, states)

    def _run(self, batch: Batch | None, split: Callable[[], Batch]) -> StepResult:
        """Compute a batch on every rank; on an error nothing changes on any rank.

        The batch is None unless it was split and sent ahead; ``split()`` splits it, also a second time.
        """
        executable, ranks, timings, speeds = self.executable, self.ranks, self.timings, self._speeds
        began = time.perf_counter()
        batch = batch or split()
        executable.refresh()
        note(timings.seconds, 'scatter', HOST, began)
        if self._sentinel is not None:
            self._sentinel.compare(self.calls)
        timed = speeds.timed(batch.split) if speeds else None
        run = StepRun(executable, batch, timed)
        try:
            run.start()
            self.look_ahead.prepare()
            result = run.end()
            if self._sentinel is not None:
                self._sentinel.check(self.calls, result, lambda compute: StepAgain(executable, split(), compute))
            self._check(result.outputs)
            report = speeds.report(batch.split, timed, result.timed) if speeds else []
            reports: Any = [report]
            if ranks.size > 1:
                with timings.span('wait'):
                    reports = ranks.handshake((AGREE, len(report)), report).tolist()
            result.new_values.commit()
        except BaseException:
            run.undo()
            raise
        if not batch.split.division.waits_on_host:  # else it is in slices, for lack of memory
            self.built.meter.note(result.samples)
        if speeds and speeds.note(batch.split, reports if timed is not None else []):
            self.look_ahead.forget()  # it was split by the shares before
        return result

    def split(self, values: Any, states: Mapping[SharedVariable, np.ndarray] = {},
              lengths: Sequence[int] | None = None) -> Batch:
        """Return the batch of the arguments of a call; they are None where the data of this process has ended.

        The states have a row a sample. The lengths are the samples of each rank: by default all of `values`.
        """
        lengths = [self.inputs.length(values)] if lengths is None else lengths
        if self.sharded and min(lengths) == 0:
            values = self._or_example(values, lengths)
        given: Iterable[tuple[theano.Variable, Any]] = zip(self.arguments.inputs, values)
        if self.inputs.slices.stand_ins or states:
            given = [*given, *self.inputs.slices.taken(values).items(),
                     *((self.inputs.rows[variable], value) for variable, value in states.items())]
        forked, splitter = self.executable.forked, self.built.splitter
        return splitter.split(given, lengths, forked.crew(sum(splitter.key(lengths))) if forked else None)

    def _or_example(self, values: Any, lengths: Sequence[int]) -> Any:
        """Return the arguments of a call, or a sample of another rank where they are None; all ranks make the call."""
        sample = None if values is None else [value[:1] if split else value
                                              for value, split in zip(values, self.arguments.split)]
        example = broadcast_object(self.ranks, sample, int(np.argmax(lengths)))
        return example if values is None else values

    def _prepare(self, args: Sequence[Any]) -> tuple[Sequence[Any], Batch] | None:
        """Split and send a batch while the devices compute the one before; return its values and the Batch."""
        if self.sharded or self.inputs.rows or self.inputs.slices.on_host:
            return None  # a data set that is set before the next step counts for it
        with self.timings.span('scatter'):
            values = self.arguments.bind(args, {})
            batch = self.split(values)
        send(self.executable, batch)
        return values, batch

    def _check(self, outputs: list[np.ndarray]) -> None:
        """Raise an error where outputs show that the new values are not to be stored."""

    def _printed(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """Print the last outputs, if the graph has them printed, and return the others."""
        n = len(outputs) - len(self.built.prints)
        if self.sharded or self.ranks.rank == 0:
            print_values(self.built.prints, outputs[n:])
        return outputs[:n]

    # --- calls of processes with samples of their own

    def join(self) -> None:
        """Wait for the other processes, where each feeds its own data, once the data of this one has ended.

        Until the data of all has ended, this process takes part in the others' calls, without samples.
        """
        for _ in self.joined():
            pass

    def joined(self) -> Iterator[tuple[list[np.ndarray], int]]:
        """Do as `join`, and yield the outputs and the number of samples of each call."""
        while self.sharded:
            outputs = self.locked_step(None)
            if outputs is None:
                return
            printed = self._printed(outputs)
            if self.hooks.account is not None:
                self.hooks.account.note()
            yield printed, self.samples

    # --- comparisons with one device

    def verify(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> verification.VerificationReport:
        """Compute a batch with plain Theano on the host, and over the contexts, from the same state, and compare.

        Parameters
        ----------
        *args, **kwargs : array_like
            Of a call. With several processes, each makes the same one.
        tolerance : float, optional
            The largest relative difference that counts as rounding: 1e-5 for float32, 1e-10 for float64.

        Returns
        -------
        VerificationReport
            Of the outputs, and the new values of shared variables, which stay as they were. Print it.

        Raises
        ------
        MgpuError
            If each process has samples of its own.

        Examples
        --------
        ``print(step.verify(x[:31], y[:31]))``
        """
        return verification.verified(self, args, kwargs, tolerance)
