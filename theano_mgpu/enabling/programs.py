"""The programs of a `theano.function` of `enable`: one for each way to take its arguments as a batch."""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable

from ..errors import GraphError
from ..graphs.own_flags import builds_graphs
from ..parallel_function import ParallelFunction
from ..plan import CannotCut
from .batch_finder import BatchFinder
from .definition import Refusal

REFUSALS = 6  # ways to take the batch that are analysed


class Programs:
    """The ParallelFunctions of a graph, and the one that computes the usual batch.

    A choice by the first calls does not hold for ever. Where a batch is along other axes than before, or where there is
    a batch for the first time, another program is made for it.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
    make : callable
        ``make(inputs, outputs, updates, **options)`` returns a ParallelFunction.

    Attributes
    ----------
    step : ParallelFunction or None
        The one that was chosen last.
    """

    @builds_graphs
    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updates: Mapping[SharedVariable, theano.Variable], make: Callable[..., ParallelFunction]) -> None:
        self._graph, self._make = (inputs, outputs, updates), make
        self._finder = BatchFinder(inputs, [*outputs, *updates.values()], updates)
        self._steps: dict[Any, ParallelFunction] = {}  # by the key of a BatchWay
        self._refused: set[Any] = set()
        self.step: ParallelFunction | None = None

    @property
    def may_divide(self) -> bool:
        """Return whether a later call may have a batch that is divided."""
        return bool(self._finder) and len(self._refused) < REFUSALS

    def is_news(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call may show a batch that no call before has shown."""
        return self._finder.is_news(args, kwargs, of_slices=self.step is None)

    def choose(self, values: Sequence[Any]) -> bool:
        """Choose the step of the likeliest batch of a call; keep the present one if there is no other.

        Parameters
        ----------
        values : list
            The values of the inputs.

        Returns
        -------
        bool
            Whether another step was chosen.

        Raises
        ------
        Refusal
            If there is a batch that cannot be divided, and this was not known.
        """
        if self.step is not None:
            ways = list(self._finder.ways(values))
            own = [way.length for way in ways if self._steps.get(way.key) is self.step]
            if not own or own[0] == ways[0].length:
                return False
        return self.change(values)

    def change(self, values: Sequence[Any]) -> bool:
        """Choose the step of a batch that the present one cannot compute, see `choose`."""
        return self._take(self._step_for(values))

    def choose_made(self, values: Sequence[Any]) -> bool:
        """Choose a step that was made for a batch such as this one; return whether it is another one."""
        return self._take(next((self._steps[way.key] for way in self._finder.ways(values) if way.key in self._steps),
                               None))

    def _take(self, step):
        """Take a step, if there is one; return whether it is another one than before."""
        before, self.step = self.step, step or self.step
        return self.step is not before

    def whole(self) -> ParallelFunction:
        """Make the ParallelFunction that divides no batch."""
        return self._make(*self._graph, samples={}, whole=True)

    def forget_refusals(self) -> None:
        """Have refused ways analysed, and refused, again."""
        self._refused.clear()
        self._finder.forget_calls()

    def _step_for(self, values):
        """Return the ParallelFunction for a batch such as this one; None without one, or for a known refusal."""
        refusal = None
        for axes, length, key in self._finder.ways(values):
            if key in self._refused or len(self._refused) >= REFUSALS:
                continue
            try:
                if key not in self._steps:
                    self._steps[key] = self._make(*self._graph, samples=axes, length=length, example=values,
                                                  must_divide=True)
                return self._steps[key]
            except GraphError as error:
                refusal = refusal or error
                self._refused.add(key)
        if refusal is None:
            return None
        if isinstance(refusal.__cause__, CannotCut):  # the text says all that the errors before this one do
            raise Refusal('it cannot be computed in parts: %s' % refusal.__cause__) from None
        raise Refusal(str(refusal)) from refusal
