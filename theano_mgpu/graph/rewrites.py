"""Copies of graphs in which something is replaced or left out."""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import theano
from theano.compile import SharedVariable
from theano.compile.builders import OpFromGraph
from theano.gof.graph import clone_get_equiv, io_toposort
from theano.printing import Print
from theano.scan_module.scan_op import Scan

from .placement.tags import place_of_node, placed_on


def substitute(outputs: Sequence[theano.Variable],
               replacements: Mapping[theano.Variable, theano.Variable]) -> list[theano.Variable]:
    """Copy a graph with some of its variables replaced.

    Parameters
    ----------
    replacements : dict of theano.Variable to theano.Variable
        Each replacement has the type of the variable that it replaces.
    """
    memo = {output: output for output in outputs if output.owner is None}  # Theano would clone them
    memo.update(replacements)
    clone_get_equiv(list(replacements), outputs, copy_inputs=False, copy_orphans=False, memo=memo)
    return [memo[output] for output in outputs]


def rebuilt(outputs: Sequence[theano.Variable],
            change: Callable[[theano.Apply, list[theano.Variable]], list[theano.Variable] | None],
            ) -> list[theano.Variable]:
    """Copy a graph node by node; nodes above which nothing changes stay in it.

    Parameters
    ----------
    change : callable
        Takes a node and its new inputs. Returns its new outputs, or None to apply the same op.
    """
    new: dict[theano.Variable, theano.Variable] = {}
    for node in io_toposort([], outputs):
        inputs = [new.get(variable, variable) for variable in node.inputs]
        with placed_on(place_of_node(node)):
            results = change(node, inputs)
            if results is None and inputs != node.inputs:
                results = node.clone_with_new_inputs(inputs).outputs
        new.update(zip(node.outputs, results or ()))
    return [new.get(output, output) for output in outputs]


def inlined(outputs: Sequence[theano.Variable], is_meant: Callable[[OpFromGraph], bool] = lambda op: True,
            ) -> list[theano.Variable]:
    """Replace each OpFromGraph that is meant, and with it its gradient, by its inner graph."""
    def is_inlined(node):
        return isinstance(node.op, OpFromGraph) and is_meant(node.op)
    while any(map(is_inlined, io_toposort([], outputs))):  # inner graphs may have some, too
        outputs = rebuilt(outputs, lambda node, inputs: inner_graph(node, inputs) if is_inlined(node) else None)
    return list(outputs)


def inner_outputs(op: theano.Op) -> list[theano.Variable]:
    """Return the outputs of an op's inner graph; an empty list for an op without one."""
    return op.outputs if isinstance(op, Scan) else getattr(op, 'local_outputs', [])


def inner_inputs(op: theano.Op) -> list[theano.Variable]:
    """Return the inputs of an op's inner graph; an empty list for an op without one."""
    return op.inputs if isinstance(op, Scan) else getattr(op, 'local_inputs', [])


def inner_graph(node: theano.Apply, inputs: list[theano.Variable]) -> list[theano.Variable]:
    """Return the outputs of an OpFromGraph, or of its gradient, as expressions of inputs."""
    return substitute(node.op.local_outputs, dict(zip(node.op.local_inputs, inputs)))


def merged(outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
    """Copy a graph so that no op is computed twice on a place; nodes without duplicates above them are reused.

    A duplicate would be exchanged, and saved for later stages, a second time. Gradients have ops of their own for
    values of the forward pass, such as the tanh in ``1 - tanh(x) ** 2``.
    """
    constants: dict[Any, theano.Variable] = {}
    firsts: dict[Any, list[theano.Variable]] = {}

    def once(node, inputs):
        inputs = [constants.setdefault(v.signature(), v) if isinstance(v, theano.Constant) else v for v in inputs]
        key = node.op, place_of_node(node), tuple(inputs), tuple(v.type for v in node.outputs)
        if key not in firsts:
            firsts[key] = node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
        return firsts[key]
    return rebuilt(outputs, once)


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
