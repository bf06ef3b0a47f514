"""Add up what a replica computes for several micro-batches, on its device."""
from typing import Any, List, Sequence

import theano

from ..devices.context_map import Context
from ..graphs.graph import compile_for
from ..replicas.transfers import Sender


class Accumulator:
    """Sums of arrays, such as the gradients of micro-batches, on devices: only the whole sums are fetched.

    Parameters
    ----------
    variables : list of theano.Variable
        What is added up.
    """

    def __init__(self, variables: Sequence[theano.Variable]):
        self._types = [variable.type for variable in variables]
        self._functions = {}

    def add(self, context: Context, totals: List[Any], values: List[Any]) -> List[Any]:
        """The totals with values added; new arrays, on the context's device.

        Parameters
        ----------
        context : Context
            One of those that `prepare` was given.
        totals, values : list of (pygpu.gpuarray.GpuArray or ndarray)
            Of the variables.
        """
        function, sender = self._functions[context]
        return function.unwatched_call(*sender.send(list(totals) + list(values)))

    def prepare(self, contexts: Sequence[Context]) -> None:
        """Compile what `add` needs on contexts, unless it is compiled."""
        for context in contexts:
            if context not in self._functions:
                totals, values = [each() for each in self._types], [each() for each in self._types]
                sums = [total + value for total, value in zip(totals, values)]
                function = compile_for(context, totals + values, sums, {}, {}, name='sums of micro-batches',
                                       like=[other for other, _ in self._functions.values()])
                self._functions[context] = function, Sender(function)
