"""Variants of a compiled function: over several contexts or, for batches that cannot be divided, over one."""
from __future__ import annotations

from typing import Any, Callable

import theano
from keras import backend as K

from ...auto.fallback import FAILED
from ...devices.context_map import HOST
from ...errors import in_one_line
from ...graph.own_flags import builds_graphs
from ...runtime.batches.free_batch_size import FreeBatchSize, written_lengths
from .batch import length_of
from .parallel_state import ParallelState


class Variants:
    """A function over the batches of a model; it runs over all contexts of the model if batches can be divided.

    Where a graph has the length of its batches as a number, batches of this length have a variant without the number.
    A graph that cannot be divided runs whole on the first context, or on the contexts of the first replica if the model
    is placed. So does one whose first batch has failed over the contexts, and was computed by plain Keras.

    Parameters
    ----------
    outputs : list of theano.Variable
        The expressions of the model.
    make : callable
        ``make(contexts, outputs)`` compiles expressions; it returns a ParallelFunction or TrainingFunction.
    inputs : list of theano.Variable
        See `batch.batch_inputs`.
    state : ParallelState
    """

    def __init__(self, outputs: list[theano.Variable], make: Callable[..., Any], inputs: list[theano.Variable],
                 state: ParallelState) -> None:
        self._outputs, self._make, self._inputs, self._state = outputs, make, inputs, state
        self._function: Any = None  # the variant for the batches of the usual length
        self._whole: Any = None     # the variant on one replica, once it is needed
        self._length: int | None = None  # the one length that the usual variant is for
        self._of_length: dict[int, Any] = {}
        self._numbers: set[int] | None = None
        self._is_new, self._has_divided = True, False

    @property
    def compiled(self) -> bool:
        """True once the function is compiled."""
        return self._function is not None

    @property
    def function(self) -> Any:
        """The ParallelFunction or TrainingFunction that runs batches of the usual length; compiled if need be."""
        if self._function is None:
            self.compile()
        return self._function

    @builds_graphs
    def compile(self) -> None:
        """Make the function for batches of the usual length."""
        free = self._free_batch_size()
        self._function = self._make(self._state.contexts, free(self._outputs))
        self._length = free.length if free.found else None

    def of(self, inputs: list[Any]) -> Any:
        """Return the function for a batch."""
        function, length = self.function, length_of(inputs)
        if self._is_new:
            self._is_new = False
            function = self._decide(length)
        if self._length == length or function.ranks.size > 1:
            return function
        if self._length is not None:  # the graph has another length: it computes, or fails, as plain Keras does
            return self._on_one_replica()
        if length not in self._of_length:
            self._of_length[length] = self._without(length) if self._has_number(length) else None
        return self._of_length[length] or function

    def _decide(self, length):
        """Take a graph without the length of the first batch if the graph cannot be divided, or else tell the user."""
        if self._function.refused:
            freed = None if self._length is not None else self._without(length)
            if freed is None:
                self._state.cannot_divide(self._function)
            else:
                self._function, self._length = freed, length
        return self._function

    def _has_number(self, length):
        if self._function is self._whole or self._function.refused:
            return False
        if self._numbers is None:
            self._numbers = written_lengths(self._outputs)
        return length in self._numbers

    @builds_graphs
    def _without(self, length):
        """Return the variant without a length in its graph; None if the graph does not have it, or is not divided."""
        free = self._free_batch_size(length)
        outputs = free(self._outputs)
        function = self._make(self._state.contexts, outputs) if free.found else None
        return function if function is not None and not function.refused else None

    def _free_batch_size(self, length=None):
        """Return a FreeBatchSize for batches of a length, also in indices; by default of the `batch_input_shape`."""
        inputs = [variable for variable in self._inputs if variable.ndim > 0]
        return FreeBatchSize(inputs, length or K.int_shape(inputs[0])[0], in_indices=length is not None)

    def _divides(self, function, inputs):
        """Return whether a batch is divided among the contexts of this process alone."""
        samples = length_of(inputs)
        return bool(samples) and function.ranks.size == 1 and len(function.built.splitter.rounds(samples)[0]) > 1

    def note_success(self, function: Any, inputs: list[Any]) -> None:
        """Note that a function has computed a batch."""
        self._has_divided = self._has_divided or self._divides(function, inputs)

    def note_failure(self, inputs: list[Any], error: Exception) -> None:
        """Note that a batch has failed over the contexts, and that plain Keras has computed it.

        If no batch was divided so far, go on with one replica.
        """
        if self._has_divided or not self._divides(self._function, inputs):
            self._state.notify('has left a batch to plain Keras, on one device: %s' % FAILED % in_one_line(error))
            return
        self._function, self._length, self._of_length = self._on_one_replica(), None, {}
        self._state.use_one_replica(self._first(), error)

    def _on_one_replica(self):
        if self._whole is None:
            self._whole = self._make(self._first(), self._outputs)
        return self._whole

    def _first(self):
        """Return the contexts of the first replica: several, if the model is placed."""
        return [context for context in self._function.mesh.replicas[0] if context != HOST] or self._state.contexts[:1]
