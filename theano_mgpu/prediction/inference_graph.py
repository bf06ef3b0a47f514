"""A graph for inference: its inputs, its shared variables, and how it is compiled."""
from ..batches.arguments import check_input, converted, no_samples, sample_axes
from ..errors import BatchError, GraphError
from ..graphs import graph
from ..graphs.graph import shared_variables
from ..graphs.updates import with_givens
from ..placement.layout import placed
from ..plan.pieces import Places, cut
from ..replicas.random_streams import is_random_state


class InferenceGraph:
    """What each replica compiles.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    broadcast, givens, mode, name, allow_input_downcast
        As for `mgpu.function`.

    Attributes
    ----------
    inputs, outputs : list of theano.Variable
    split : list of bool
        For each input, whether it has samples, along axis 0.
    shared, variables, streams : list of SharedVariable
        What the graph reads: all, the weights, and the states of random streams.
    pieces : list of Piece
        What one device computes at a time, in order; see `lay_out`.

    Raises
    ------
    GraphError
        If no input has samples, or a call changes what the next one computes.
    """

    def __init__(self, inputs, outputs, broadcast=(), givens=None, mode=None, name=None, allow_input_downcast=None):
        self.inputs = [check_input(variable) for variable in inputs]
        axes = sample_axes(self.inputs, broadcast=broadcast)
        if not axes:
            raise no_samples(self.inputs)
        self.split = [variable in axes for variable in self.inputs]
        self.outputs, updates = with_givens(outputs, {}, givens)
        check_independent(updates)
        self.shared = shared_variables(self.outputs)
        self.streams = [variable for variable in self.shared if is_random_state(variable)]
        self.variables = [variable for variable in self.shared if variable not in self.streams]
        self.name, self._mode, self._allow_input_downcast = name, mode, allow_input_downcast
        self.pieces = []

    def lay_out(self, contexts):
        """Cut the graph where the device changes, and lay out contexts for it.

        Parameters
        ----------
        contexts : list of Context, or list of list of Context
            As `resolve_contexts` returns them.

        Returns
        -------
        Mesh
            Its columns are the places of `pieces`: one piece and place, if the graph is not placed.

        Raises
        ------
        ContextError
            If the graph is placed on contexts that it cannot run on.
        """
        self.outputs, _, mesh = placed(self.outputs, {}, contexts)
        self.pieces = cut(self.inputs, self.outputs, Places(mesh).of)
        return mesh

    def compile(self, piece, context, copies, like):
        """A piece of the graph compiled for a context.

        Parameters
        ----------
        piece : Piece
        context : Context
        copies : dict of SharedVariable to SharedVariable
            What replaces the variables and streams there.
        like : list of theano.compile.function_module.Function
            The same piece compiled for other contexts.
        """
        return graph.compile_for(context, piece.stand_ins, piece.graphs, {}, copies, self._mode, self.name, like)

    def by_input(self, arrays):
        """Arrays in the order of the inputs; a BatchError if there are too few or too many, or their names are unknown.

        Parameters
        ----------
        arrays : list or dict of array_like
        """
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            given = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: pass one for each' % (given, names))
        return [array if hasattr(array, 'shape') else self.converted(variable, array)
                for array, variable in zip(arrays, self.inputs)]

    def converted(self, variable, value):
        """A value as an array of an input's type; a BatchError if it cannot be one."""
        return converted(variable, value, self._allow_input_downcast)

    def slices(self, arrays, length, batch_size):
        """The batches of `batch_size` that arrays of a length consist of; the last one may be smaller."""
        for start in range(0, length, batch_size):
            stop = min(start + batch_size, length)  # Keras's HDF5Matrix has no slices beyond its end
            yield [array[start:stop] if split else array for array, split in zip(arrays, self.split)]


def check_independent(updates):
    """Raise a GraphError where a call changes what the next one computes, because both run at the same time."""
    states = [variable for variable in updates if not is_random_state(variable)]
    if states:
        raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                         'several batches at a time: use mgpu.function, which computes one after the other'
                         % ', '.join(map(str, states)))
