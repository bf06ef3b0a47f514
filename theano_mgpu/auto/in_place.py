"""Updates that plain Theano makes in place, in memory that the script refers to, too."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from theano.compile.function_module import alias_root

from ..devices.shared_variables import watcher_of
from ..runtime.replicas.borrowed import is_lent


class InPlaceUpdates:
    """The shared variables whose memory a `theano.function` writes their new values into.

    A script that has borrowed this memory, as with ``theano.shared(array, borrow=True)``, sees the new values there,
    and edits of the memory count. A divided function makes new arrays, whose values are then copied to that memory.
    """

    def __init__(self, function: Any) -> None:
        graph = function.maker.fgraph
        updated = [(each, variable) for each, variable in zip(function.maker.expanded_inputs, graph.inputs)
                   if each.update is not None]
        new = graph.outputs[function.n_returned_outputs:]
        self._variables = [each.variable for (each, variable), value in zip(updated, new)
                           if each.shared and alias_root(value) is variable]

    def lent(self) -> list[tuple[Any, Any]]:
        """Return the variables whose memory something else refers to, with their arrays."""
        return [(variable, variable.container.storage[0]) for variable in self._variables
                if is_lent(variable.container.storage)]

    def write(self, lent: Sequence[tuple[Any, Any]]) -> None:
        """Write the new values into the memory that `lent` has returned before the step."""
        for variable, array in lent:
            watcher = watcher_of(variable)
            if watcher is not None and watcher.divided:
                continue  # one process alone has the value, and reading it takes all of them
            value = variable.get_value(borrow=True, return_internal_type=True)
            fits = isinstance(array, np.ndarray) and (array.shape, array.dtype) == (value.shape, value.dtype)
            if fits and array.flags.writeable:
                array[...] = value
                variable.container.storage[0] = array
                if watcher is not None:
                    watcher.lend()  # a copy on a device would miss values that are written there
