"""Variants of a compiled function: over several contexts or, for batches that cannot be divided, over one."""
import numpy as np

from ..errors import GraphError
from .batch import any_length


class Variants:
    """A function over the batches of a model, over all of its contexts as long as batches can be divided.

    Where the graph cannot be divided, or a batch fails before any batch was divided, it is tried again: over all
    contexts with a graph that does not have the length of the batch as a number, then whole on the first context. What
    succeeds is used from then on. If nothing does, the batch is at fault: its first error is raised, and the next batch
    is tried over all contexts again.

    Parameters
    ----------
    make : callable
        ``make(contexts, free)`` compiles the function, a ParallelFunction or TrainingFunction. ``free(outputs)``
        returns the expressions to compile in place of those of the model.
    model : keras.Model
    state : ParallelState
        Of the model.

    Attributes
    ----------
    function : ParallelFunction or TrainingFunction
        What runs the batches.
    """

    def __init__(self, make, model, state):
        self._make, self._model, self._state = make, model, state
        self._whole = None    # a function over one context, once there is need of it
        self._divided = False
        free = any_length(model)
        self.function = make(state.contexts, free)
        self._is_refused = bool(self.function.refused)  # and nobody knows it yet
        self._length = free.length if free.found else None  # the number of which the graph was freed

    def of(self, inputs):
        """The function for a batch."""
        if self._is_refused:
            self._is_refused = False
            self._free_or_tell(inputs)
        if self._length in (None, _samples(inputs)) or self.function.ranks.size > 1:
            return self.function
        return self._on_one_context()  # with the number in the graph: plain Keras computes, or fails, likewise

    def _free_or_tell(self, inputs):
        """Have a graph that cannot be divided made without the length of this batch, or tell that it is not."""
        try:
            freed = self._freed(inputs)
        except GraphError:
            freed = None
        if freed is None or freed.refused:
            self._state.cannot_divide(self.function)
        else:
            self.function, self._length = freed, _samples(inputs)

    def run(self, function, inputs):
        """Run a function for a batch, or another one where it fails; returns the one that ran, and its outputs."""
        divides = self._divides(function, inputs)
        try:
            outputs = function(*inputs)
        except Exception as error:
            # Of any class, since ops raise their own. A step that fails has changed nothing, and can be run again.
            found = self._run_otherwise(inputs) if divides and not self._divided and not self._state.strict else None
            if found is None:
                raise
            function, outputs = found
            self._keep(function, inputs, error)
        self._divided = self._divided or divides
        return function, outputs

    def _divides(self, function, inputs):
        """Whether the batch is divided among the contexts of this process, and only those."""
        samples = _samples(inputs)
        return bool(samples) and function.ranks.size == 1 and len(function.scatter.rounds(samples)[0]) > 1

    def _run_otherwise(self, inputs):
        for form in (self._freed, self._on_one_context):
            try:
                function = form(inputs)
                return function, function(*inputs)
            except Exception:  # this form cannot do it either: the error to raise is that of the first one
                continue
        return None

    def _freed(self, inputs):
        """The function without the length of this batch in its graph."""
        free = any_length(self._model, _samples(inputs))

        def freed(outputs):
            found = free(outputs)
            if not free.found or self._length is not None:
                raise GraphError('the graph has no length of a batch to be freed of')
            return found
        return self._make(self._state.contexts, freed)

    def _on_one_context(self, inputs=None):
        if self._whole is None:
            self._whole = self._make(self._state.contexts[:1], list)
        return self._whole

    def _keep(self, function, inputs, error):
        self.function = function
        if function is self._whole:
            self._length = None
            self._state.use_one_context(error)
        else:
            self._length = _samples(inputs)


def _samples(inputs):
    """Samples of a batch; 0 of what is none."""
    return len(inputs[0]) if inputs and np.ndim(inputs[0]) else 0
