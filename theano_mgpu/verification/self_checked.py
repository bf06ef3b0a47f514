"""Functions over contexts that compare themselves with one device."""
import time
from typing import Any, Dict, Sequence

from ..data_parallel import DataParallel
from ..runtime import run
from . import self_check


class SelfChecked(DataParallel):
    """A function over a batch that can compute it with plain Theano, and on one context, too, and compare.

    With the flag ``mgpu.verify`` it compares the first call that several contexts compute.
    """

    _is_checked = False

    def locked_step(self, arguments):
        if self.options.flags.verify and not self._is_checked and arguments and self.is_divided_for(*arguments):
            self._is_checked = True
            self_check.check(self, *arguments)
        return super().locked_step(arguments)

    def verify(self, *args, tolerance=None, **kwargs):
        """Compute a batch with plain Theano on the host, and over the contexts, from the same state, and compare.

        Parameters
        ----------
        *args, **kwargs : array_like
            Of a call. With several processes, each makes the same one.
        tolerance : float, optional
            The largest relative difference that counts as rounding: 1e-5 for float32, 1e-10 for float64.

        Returns
        -------
        Certificate
            Of the outputs, and the new values of shared variables, which stay as they were. Print it.

        Raises
        ------
        MgpuError
            If each process has samples of its own.

        Examples
        --------
        ``print(step.verify(x[:31], y[:31]))``
        """
        return self_check.certificate(self, args, kwargs, tolerance)

    def is_divided_for(self, args: Sequence[Any], kwargs: Dict[str, Any]) -> bool:
        """Return whether several contexts compute a call that one device could compute."""
        if self.sharded or len(self.mesh.places) > 1:
            return not self.sharded
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
