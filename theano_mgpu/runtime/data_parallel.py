"""A graph over a batch, run over several contexts: bind, split, run, commit."""
from __future__ import annotations

import threading
import time
from typing import Any, Dict, Iterator, NamedTuple, Sequence, Tuple

import numpy as np
import theano

from ..compat.shared_variables import add_step_lock
from ..devices.contexts import check_process
from ..errors import LengthError
from ..options import Options
from ..utils import rank_process
from ..utils.mpi_environment import STEP
from .building import Updates
from .consistency import BatchCheck
from .sliced_run import SlicedRun

Arguments = Tuple[Sequence[Any], Dict[str, Any]]


class Bound(NamedTuple):
    """The arguments of a call, bound to the inputs.

    Attributes
    ----------
    values : list of ndarray, or None
        None for a process whose data has ended.
    states : dict of SharedVariable to ndarray
        The values of states with a row a sample.
    length : int
        Samples that this process was given.
    batch : Batch, optional
        The batch that was made of the values during the step before.
    """

    values: Sequence[Any] | None
    states: dict[Any, np.ndarray]
    length: int
    batch: Any = None


class DataParallel(SlicedRun):
    """A graph over a batch, computed in one sub-batch per context, with the result of one device.

    Parameters
    ----------
    inputs : list of theano.Variable
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values. Default updates are added.
    options : Options

    Attributes
    ----------
    samples : int
        Samples of the last batch, on all ranks.
    seconds : float
        Duration of the last step up to its new values; gathering outputs with one row per sample is not included.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Updates, options: Options):
        self.lock = threading.RLock()
        self.samples = self.calls = 0
        self.seconds = 0.0
        super().__init__(inputs, outputs, updates, options)

    def _build(self, options: Options) -> None:
        super()._build(options)
        has_rows = any(output.has_rows for output in self.plan.results)
        self._check_batch = BatchCheck(self.ranks, self.built.number, options.name, self.arguments, self.sharded,
                                       options.internal.batch_of_rank_0, has_rows, self.built.alike)
        for variable in self.built.variables:
            add_step_lock(variable, self.lock)

    def step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute a batch on every rank, and return the outputs; on an error nothing changes on any rank."""
        try:
            return self.print_last(self.locked_step((args, kwargs)))
        finally:
            self.arguments.forget_assigned()

    def locked_step(self, arguments: Arguments | None) -> list[np.ndarray] | None:
        """Compute a batch, and return the outputs and the values to print.

        Parameters
        ----------
        arguments : tuple of args and kwargs, or None
            None for a process whose data has ended; once the data of all has, None is returned.
        """
        if self.executable.on_devices:
            check_process()
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self.lock: return self._step(arguments)  # noqa: E701

    def _step(self, arguments: Arguments | None) -> list[np.ndarray] | None:
        if self.plan.machine.size > self.ranks.size:  # a fork of a rank computes alone what the ranks have shared
            self._rebuild(self.options)
        with self.ranks.single_thread:
            began = time.perf_counter()
            self.timings.begin_call()
            with self.timings.span('scatter'):
                bound = self._bind(arguments)
            with self.timings.span('wait'):
                lengths, values = self._check_batch(self.calls, bound.length, bound.values)
            self.calls += 1
            self.timings.calls += 1
            if not (sum(lengths) if self.sharded else lengths[0]):
                self.samples = 0
                if arguments is None:
                    return None
                raise LengthError('the batch is empty: no process has a sample of it')
            # A batch that was split ahead is of no use if rank 0 has sent other values.
            bound, ahead = bound._replace(batch=None), bound.batch if values is bound.values else None
            before = time.perf_counter() - began
            result = self._computed(values, bound.states, lengths, ahead)
            self.samples, self.seconds = result.samples, before + result.seconds
            if self.timings.is_sampling and self.is_settled:
                self.timings.end_call(self.seconds)
            rank_process.report(STEP)
            return result.outputs

    def _bind(self, arguments: Arguments | None) -> Bound:
        states = self.inputs.states()
        if arguments is None:
            return Bound(None, states, 0)
        values, batch = self.look_ahead.take(*arguments) or (self.arguments.bind(*arguments), None)
        return Bound(values, states, self.inputs.length(values, states), batch)

    def join(self) -> None:
        """Wait for the other processes, where each feeds its own data, once the data of this one has ended.

        Until the data of all has ended, this process takes part in the others' calls, without samples.
        """
        for _ in self.joined():
            pass

    def joined(self) -> Iterator[tuple[list[np.ndarray], int]]:
        """Do as `join`, and yield the outputs and the number of samples of each call."""
        while self.sharded:
            outputs = self.print_last(self.locked_step(None))
            if outputs is None:
                return
            yield outputs, self.samples
