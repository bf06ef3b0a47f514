"""Variants of a compiled function: over several contexts or, for batches that cannot be divided, over one."""
import numpy as np

from ..devices.context_map import HOST
from ..errors import GraphError
from ..graphs.own_flags import builds_graphs
from .batch import any_length


class Variants:
    """A function over the batches of a model; it runs over all contexts of the model if batches can be divided.

    If the graph cannot be divided, or a batch fails before any batch was divided, other variants are tried: over all
    contexts with a graph in which the length of the batch is not a fixed number, then whole on the first context, or
    on the contexts of the first replica if the model is placed. The first that succeeds is used from then on. If none
    does, the batch is wrong: its first error is raised, and the next batch is tried over all contexts again.

    Parameters
    ----------
    make : callable
        ``make(contexts, free)`` compiles the function, a ParallelFunction or TrainingFunction. ``free(outputs)``
        returns the expressions to compile in place of those of the model.
    inputs : list of theano.Variable
        What it takes; see `batch.batch_inputs`.
    state : ParallelState
        The model's.

    Attributes
    ----------
    function : ParallelFunction or TrainingFunction
        The variant in use; compiled when it is first needed.
    """

    def __init__(self, make, inputs, state):
        self._make, self._inputs, self.state = make, inputs, state
        self._whole = None    # the variant on one context, once it is needed
        self._divided = False
        self._function = None

    @property
    def compiled(self):
        """Whether there is a function yet."""
        return self._function is not None

    @property
    def function(self):
        self.compile()
        return self._function

    @builds_graphs
    def compile(self):
        """Make the function, unless it is there."""
        if self._function is None:
            free = any_length(self._inputs)
            self._function = self._make(self.state.contexts, free)
            self._is_refused = bool(self._function.refused)  # and the user does not know yet
            self._length = free.length if free.found else None  # the fixed length that the graph had

    def of(self, inputs):
        """The function for a batch."""
        self.compile()
        if self._is_refused:
            self._is_refused = False
            self._free_or_notify(inputs)
        if self._length in (None, length_of(inputs)) or self.function.ranks.size > 1:
            return self.function
        return self._on_one_context()  # with the fixed length in the graph: it computes, or fails, as plain Keras does

    def _free_or_notify(self, inputs):
        """If a graph cannot be divided, use the variant without a fixed length; if that cannot, notify the user."""
        try:
            freed = self._freed(inputs)
        except GraphError:
            freed = None
        if freed is None or freed.refused:
            self.state.cannot_divide(self.function)
        else:
            self._function, self._length = freed, length_of(inputs)

    def run(self, function, inputs):
        """Run a function for a batch, or other variants if it fails; returns the one that ran, and its outputs."""
        divides = self._divides(function, inputs)
        try:
            outputs = function(*inputs)
        except Exception as error:
            # Of any class: ops raise their own. A step that fails has changed nothing, and can be run again.
            found = self._run_otherwise(inputs) if divides and not self._divided and not self.state.strict else None
            if found is None:
                raise
            function, outputs = found
            self._keep(function, inputs, error)
        self._divided = self._divided or divides
        return function, outputs

    def _divides(self, function, inputs):
        """Whether the batch is divided among the contexts of this process alone."""
        samples = length_of(inputs)
        return bool(samples) and function.ranks.size == 1 and len(function.built.splitter.rounds(samples)[0]) > 1

    def _run_otherwise(self, inputs):
        for variant in (self._freed, self._on_one_context):
            try:
                function = variant(inputs)
                return function, function(*inputs)
            except Exception:  # this variant fails, too: the error to raise is that of the first one
                continue
        return None

    @builds_graphs
    def _freed(self, inputs):
        """The variant without the length of this batch in its graph."""
        free = any_length(self._inputs, length_of(inputs))

        def freed(outputs):
            found = free(outputs)
            if not free.found or self._length is not None:
                raise GraphError('the graph has no fixed length of a batch')
            return found
        return self._make(self.state.contexts, freed)

    def _on_one_context(self, inputs=None):
        if self._whole is None:
            self._whole = self._make(self._first(), list)
        return self._whole

    def _first(self):
        """The contexts of the first replica: several, if the model is placed."""
        return [context for context in self.function.mesh.replicas[0] if context != HOST] or self.state.contexts[:1]

    def _keep(self, function, inputs, error):
        self._function = function
        if function is self._whole:
            self._length = None
            self.state.use_one_replica(self._first(), error)
        else:
            self._length = length_of(inputs)


def length_of(inputs):
    """Number of samples of a batch; 0 if it has none."""
    shape = getattr(inputs[0], 'shape', None) if inputs else ()
    if shape is None:
        shape = np.shape(inputs[0])
    return shape[0] if shape else 0
