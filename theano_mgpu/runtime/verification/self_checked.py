"""Functions over contexts that compare themselves with one device."""
from __future__ import annotations

import time
from typing import Any, Sequence

import numpy as np

from ...errors import GraphError, MgpuError
from ...graph.repeatable import unrepeatable_in
from .. import run
from ..data_parallel import Arguments, DataParallel
from .comparison import Verification
from .report import VerificationReport


class SelfChecked(DataParallel):
    """A function over a batch that can compute it with plain Theano, and on one context, too, and compare.

    With the flag ``mgpu.verify`` it compares the first call that several contexts compute.
    """

    _is_checked = False

    def locked_step(self, arguments: Arguments | None) -> list[np.ndarray] | None:
        if self.options.flags.verify and not self._is_checked and arguments and self._is_divided_for(*arguments):
            self._is_checked = True
            report = self._verified(*arguments)
            if not report.passed:
                raise GraphError('%s does not give the answer of one device, nothing was changed: %s'
                                 % (self.options.name or 'a function', report))
        return super().locked_step(arguments)

    def verify(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> VerificationReport:
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
        return self._verified(args, kwargs, tolerance)

    def _verified(self, args, kwargs, tolerance=None):
        if self.sharded:
            raise MgpuError('verify compares with one device, which has the whole batch: here each process has samples '
                            'of its own. Verify in one process, without mpirun')
        with self.lock:
            verification = Verification(self.arguments.inputs, *self.built.definition, self.options.mode)
            return verification.report(self.arguments.bind(args, kwargs), lambda: self._undone_step(args, kwargs),
                                       self.contexts, tolerance)

    def _undone_step(self, args, kwargs):
        """Return the outputs of a step, and the new values, which are undone."""
        before = [each.value() for each in self.updated]
        try:
            return self.locked_step((args, kwargs)) + [each.value() for each in self.updated]
        finally:
            for each, value in zip(self.updated, before):
                each.variable.set_value(value)

    def _is_divided_for(self, args, kwargs):
        """Return whether several contexts compute a call that one device could compute."""
        if self.sharded or len(self.mesh.places) > 1:
            return not self.sharded and not unrepeatable_in(self.built.definition.whole)
        length = self.inputs.length(self.arguments.bind(args, kwargs))
        return len(sum(self.built.splitter.rounds(length), [])) > 1

    def seconds_alone(self, args: Sequence[Any]) -> float:
        """Return the seconds that the first context alone takes for a batch: copies, stages and updates.

        Nothing is changed.

        Parameters
        ----------
        args : list of ndarray
            Of a call.
        """
        with self.lock:
            self.executable.refresh()
            began = time.perf_counter()
            values = self.arguments.bind(args, {})
            batch = self.split(values, alone=True)
            ready = time.perf_counter()
            result = run(self.executable, batch)
            try:
                done = time.perf_counter()
                result.new_values.wait()
                return ready - began + result.seconds + time.perf_counter() - done
            finally:
                result.new_values.roll_back()
