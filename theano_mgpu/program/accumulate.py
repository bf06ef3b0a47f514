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
        totals, values : list of (pygpu.gpuarray.GpuArray or ndarray)
            Of the variables.
        """
        if context not in self._functions:
            function = self._compiled(context)
            self._functions[context] = function, Sender(function)
        function, sender = self._functions[context]
        return function.unwatched_call(*sender.send(list(totals) + list(values)))

    def _compiled(self, context):
        totals, values = [each() for each in self._types], [each() for each in self._types]
        others = [function for function, _ in self._functions.values()]
        return compile_for(context, totals + values, [total + value for total, value in zip(totals, values)], {}, {},
                           name='sums of micro-batches', like=others)
