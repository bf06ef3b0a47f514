"""Values that a graph prints, taken out of the graph: over several contexts they are printed whole, and once."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import theano
from theano.compile import SharedVariable
from theano.printing import Print

from .rewrites import rebuilt


def take_prints(outputs: Sequence[theano.Variable], updates: Mapping[Any, theano.Variable],
                ) -> tuple[list[Print], list[theano.Variable], dict[SharedVariable, theano.Variable]]:
    """Replace each `theano.printing.Print` of a graph by its input; return the ops in order, outputs, and updates.

    A replica would print its part of a value. The whole value becomes a further output, for `print_values`.
    """
    prints: list[tuple[Print, theano.Variable]] = []

    def taken(node, inputs):
        if isinstance(node.op, Print):
            prints.append((node.op, inputs[0]))
            return inputs
        return None
    whole = rebuilt(list(outputs) + list(updates.values()), taken)
    values = [value for _, value in prints]
    return [op for op, _ in prints], whole[:len(outputs)] + values, dict(zip(updates, whole[len(outputs):]))


def print_values(prints: Sequence[Print], values: Sequence[Any]) -> None:
    """Print values as these ops do, by the function that each of them calls."""
    for op, value in zip(prints, values):
        op.global_fn(op, value)
