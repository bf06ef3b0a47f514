"""A graph for inference: its inputs, its shared variables, and how it is compiled."""
from __future__ import annotations

from typing import Any, Iterator, Sequence

import numpy as np
import theano

from ..batches.arguments import check_input, converted, no_samples, sample_axes
from ..devices.mesh import Mesh
from ..errors import BatchError, GraphError
from ..graphs.graph import shared_variables
from ..graphs.updates import with_givens
from ..placement.layout import placed
from ..plan.pieces import Places, cut
from ..replicas.random_streams import is_random_state


class InferenceGraph:
    """A graph for inference, which each replica compiles.

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
        All that the graph reads, its weights, and the states of its random streams.
    pieces : list of Piece
        The parts that one device computes at a time, in order; see `lay_out`.

    Raises
    ------
    GraphError
        If no input has samples, or a call changes what the next one computes.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], broadcast: Sequence = (),
                 givens: Any = None, mode: Any = None, name: str | None = None,
                 allow_input_downcast: bool | None = None) -> None:
        self.inputs = [check_input(variable) for variable in inputs]
        axes = sample_axes(self.inputs, broadcast=broadcast)
        if not axes:
            raise no_samples(self.inputs)
        self.split = [variable in axes for variable in self.inputs]
        self.outputs, updates = with_givens(outputs, {}, givens)
        states = [variable for variable in updates if not is_random_state(variable)]
        if states:
            raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                             'several batches at a time: use mgpu.function, which computes one after the other'
                             % ', '.join(map(str, states)))
        self.shared = shared_variables(self.outputs)
        self.streams = [variable for variable in self.shared if is_random_state(variable)]
        self.variables = [variable for variable in self.shared if variable not in self.streams]
        self.name, self.mode, self._allow_input_downcast = name, mode, allow_input_downcast
        self.pieces: list[Any] = []

    def lay_out(self, contexts: Sequence[Any]) -> Mesh:
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

    def by_input(self, arrays: Any) -> list[Any]:
        """Return arrays in the order of the inputs; raise a BatchError unless there is one for each.

        Parameters
        ----------
        arrays : list or dict of array_like
        """
        names = [str(variable) for variable in self.inputs]
        if isinstance(arrays, dict) and set(arrays) == set(names):
            return [arrays[name] for name in names]
        if isinstance(arrays, dict) or len(arrays) != len(names):
            text = 'arrays for %s' % sorted(arrays) if isinstance(arrays, dict) else '%d arrays' % len(arrays)
            raise BatchError('%s were given for the inputs %s: pass one for each' % (text, names))
        return [array if hasattr(array, 'shape') else self.converted(variable, array)
                for array, variable in zip(arrays, self.inputs)]

    def converted(self, variable: theano.Variable, value: Any) -> np.ndarray:
        """Return a value as an array of an input's type; raise a BatchError if it cannot be one."""
        return converted(variable, value, self._allow_input_downcast)

    def slices(self, arrays: Sequence[Any], length: int, batch_size: int) -> Iterator[list[Any]]:
        """Yield the batches of `batch_size` that arrays of a length consist of; the last one may be smaller."""
        for start in range(0, length, batch_size):
            stop = min(start + batch_size, length)  # Keras's HDF5Matrix has no slices beyond its end
            yield [array[start:stop] if split else array for array, split in zip(arrays, self.split)]
