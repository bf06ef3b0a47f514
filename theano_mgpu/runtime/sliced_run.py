"""The run of a batch; again, in another way, each time that a device has too little memory."""
from __future__ import annotations

import functools
import gc
import time
from typing import Any, Sequence

import numpy as np

from ..comm.activities import AGREE
from ..comm.choice import choose_ranks
from ..devices.choice import resolve_contexts
from ..errors import ReplicaError
from ..options import Options
from ..plan import record
from . import StepResult, StepRun, step_times
from .batch import Batch
from .building import BuiltFunction, Updates, build, divide
from .remedies import Remedies
from .replicas.replicated import replicated
from .sentinel import Sentinel
from .speeds import Speeds


class SlicedRun(BuiltFunction):
    """A base of functions over a batch, which splits and runs their batches.

    Attributes
    ----------
    calls : int
        The calls so far, the present one among them.
    """

    calls = 0

    def __init__(self, inputs: Any, outputs: Any, updates: Updates, options: Options) -> None:
        self._definition = inputs, outputs, updates
        self._remedies = Remedies(options.name, choose_ranks(options.executor))
        self._build(options)

    def _build(self, options: Options) -> None:
        """Build the function, at first or again."""
        contexts, ranks = resolve_contexts(options.contexts), choose_ranks(options.executor)
        while True:
            divided = divide(*self._definition, options, contexts, ranks.size)
            try:
                super().__init__(build(divided, options, ranks), options)
                break
            except ReplicaError as error:
                options = self._remedies.for_build(error, divided, options)
            for variable in divided.inputs.slices.data_sets():
                replicated(variable).evict()  # another function may hold copies that this one has made
            gc.collect()
        self._speeds = Speeds(options.name, self.built.splitter)
        every = options.flags.check
        self._sentinel = Sentinel(self.built, options.name, every) if every else None

    @property
    def is_settled(self) -> bool:
        """Return whether shares by speed have settled, so that the time of a step counts for a choice."""
        return self._speeds.is_settled

    def _computed(self, values: Any, states: Any, lengths: Sequence[int], batch: Batch | None) -> StepResult:
        """Compute a batch on every rank; on an error nothing changes on any rank.

        Parameters
        ----------
        values, states, lengths
            As for `split`.
        batch : Batch or None
            The batch of them, if it was split and sent ahead.
        """
        while True:
            try:
                began = time.perf_counter()
                with self.timings.span('scatter'):
                    batch = batch or self.split(values, states, lengths)
                    self.executable.refresh()
                if self._sentinel is not None:
                    self._sentinel.compare(self.calls)
                before = time.perf_counter() - began
                result = self._run(batch, values, states, lengths)
                self._remedies.note(lengths, self.built)
                return result._replace(seconds=before + result.seconds)
            except BaseException as error:
                options = self._remedies.for_step(lengths, error, self.built, self.options)
            # Only now nothing has the arrays of the attempt any more: the traceback of the error had them.
            batch = None
            self.look_ahead.forget()
            gc.collect()
            if options is not None:
                for variable in self.executable.variables:
                    variable.evict()  # not every device may need it any more
                self._rebuild(options)
                states = self.inputs.states()  # it may have other states with a row a sample, or none
                if values is not None:
                    self.inputs.length(values, states)

    def _rebuild(self, options: Options) -> None:
        """Build the function again in the middle of a call. Slices, values that were set, and a loop's batches stay."""
        splitter, arguments, look_ahead = self.built.splitter, self.arguments, self.look_ahead
        record.forget(self.timings)
        step_times.forget(self.timings)
        self._build(options)
        self.built.splitter.slices.update(splitter.slices)
        self.arguments.take_assigned(arguments)
        self.look_ahead = look_ahead

    def _run(self, batch: Batch, *arguments: Any) -> StepResult:
        """Run a batch, and prepare the next one meanwhile; commit the new values once no rank has failed.

        `split` makes the batch of the `arguments`.
        """
        timed = self._speeds.timed(batch)
        step = StepRun(self.executable, batch, timed)
        try:
            step.start()
            self.look_ahead.prepare()
            result = step.finish()
            if self._sentinel is not None:
                self._sentinel.check(self.calls, result, functools.partial(self.split, *arguments))
            self._check(result.outputs)
            with self.timings.span('wait'):
                report = self._speeds.report(batch, timed, result.timed)
                reports = self.ranks.handshake((AGREE, len(report)), report)
            with self.timings.span('update'):
                result.new_values.commit()
        except BaseException:
            step.undo()
            raise
        if self._speeds.note(batch, reports.tolist() if timed is not None else []):
            self.look_ahead.forget()  # it was split by the shares before
        return result

    def _check(self, outputs: list[np.ndarray]) -> None:
        """Raise an error where outputs show that the new values are not to be stored."""
