"""A trial of one context against several, on the first batches of a training that is divided anyway."""
from __future__ import annotations

from typing import Any, Sequence

from ..training import TrainingFunction
from .chooser import WARM_UP, Chooser, State, Way


class Trial:
    """A comparison of the time of training steps with the time that one context takes for the same batches.

    Parameters
    ----------
    step : TrainingFunction

    Attributes
    ----------
    step : TrainingFunction
    """

    def __init__(self, step: TrainingFunction) -> None:
        self.step, self._calls = step, 0
        is_possible = len(step.mesh.replicas) > 1 == len(step.mesh.places) and step.ranks.size == 1 and \
            not step.inputs.rows and not step.options.divides_always
        self._chooser = Chooser(State.TIMES_BOTH if is_possible else State.SEVERAL, step.ranks)

    @property
    def is_open(self) -> bool:
        """Return whether it is still measuring."""
        return self._chooser.state is State.TIMES_BOTH

    def after(self, args: Sequence[Any]) -> tuple[str, bool] | None:
        """Measure a batch after each step, by the step's arguments.

        Returns
        -------
        (str, bool) or None
            A text for the user, without the name of the model, and whether it belongs into the summary. Returned once,
            if one context is faster or cannot be measured.
        """
        self._calls += 1
        if not self.is_open or self._calls <= WARM_UP or not self.step.is_settled:
            return None
        try:
            one = self.step.seconds_alone(args)
        except Exception as error:  # GpuArrayException, MemoryError, ...: the whole batch may not fit on one context
            self._chooser.settle(Way.SEVERAL)
            if getattr(error, 'out_of_memory', False):
                return None  # several contexts have more memory, too
            return ('trains on %d contexts; whether one is faster is not known, because it failed on a whole batch: %s'
                    % (len(self.step.contexts), error)), True
        self._chooser.add({Way.ONE: one, Way.SEVERAL: self.step.seconds})
        return (self._advice(), False) if self._chooser.state is State.ONE else None

    def _advice(self):
        contexts = self.step.contexts
        on_host = all(context.kind == 'cpu' for context in contexts)
        return ('trains on %d contexts, but one context is faster: %s. Give larger batches, or use %s'
                % (len(contexts), self._chooser.reason(),
                   'the cores by processes (theano-mgpu launch)' if on_host else 'one context (gpus=1)'))
