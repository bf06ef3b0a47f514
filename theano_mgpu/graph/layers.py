"""The layers of a model, or named parts of a graph: the ops of each, forward and backward, and their times.

The ops of one call in `EVERY` are timed, one after the other: on a device, from the launch until the results are there.
"""
from __future__ import annotations

import functools
import operator
import time
from collections import Counter, defaultdict
from typing import Any, Callable, Iterable, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Query
from theano.gof.graph import io_toposort
from theano.gof.vm import VM_Linker
from theano.tensor.elemwise import Elemwise

from ..utils import timeline
from ..utils.tables import table
from .traces import KEEP_LINES, layer_of, name_layer, put_in_layer

EVERY = 3     # the first calls build kernels and allocate; to wait for each op takes time
LEAST = 0.01  # the share of the time that has a row, or a table, of its own
BACKWARD = ', backward'  # the end of the name of a part that `theano.grad` has derived
UPDATE, EXCHANGE, OTHER, UNNAMED = 'update', 'exchange', 'other', 'a function'
THEANOS = 'mean', 'var', 'std', 'max', 'argmax', '.T', ')'  # ends of names that Theano gives variables

is_on = False
every: list[Times] = []

# ----------------------------------------------------------------------------------------------------------- the names


def name_function(outputs: Any, new_values: Iterable[Any] = ()) -> None:
    """Note of which part the ops of a function are, where no layer is known, if layers are timed.

    It is the next variable with a name or, if there is none, the matrix of weights that was read last.
    """
    if not is_on:
        return
    outputs = [getattr(each, 'variable', each) for each in (outputs if isinstance(outputs, list) else [outputs])]
    nodes = io_toposort([], [each for each in outputs if isinstance(each, theano.Variable)])
    for output in (output for node in nodes for output in node.outputs):
        if output.name and not output.name.endswith(THEANOS):
            name_layer([output], (), output.name)
    for node in nodes:
        read = [part for part in map(_part_read, node.inputs) if part]
        if read and not layer_of(node.outputs[0]):
            put_in_layer(node.outputs[0], read[-1])
    name_layer([each for each in new_values if isinstance(each, theano.Variable)], (), UPDATE)


def _part_read(variable):
    """Return the part that a variable is of; a matrix of weights is a part of its own."""
    if isinstance(variable, SharedVariable) and variable.name and getattr(variable, 'ndim', 0) > 1:
        return '%s %s' % (variable.name, getattr(variable.container.storage[0], 'shape', ''))  # many are called W
    return layer_of(variable)


def gradient_of(node: theano.Apply) -> str:
    """Return the part of the gradient of a node; '' if layers are not timed."""
    return (layer_of(node.outputs[0]) or OTHER).replace(BACKWARD, '') + BACKWARD if is_on else ''


def parts_of(nodes: Sequence[theano.Apply]) -> list[str]:
    """Return the part of each node of an optimised graph: the name of a layer, with `BACKWARD` for its gradient.

    A node that Theano's optimiser has added is part of what reads it. Where Theano has made one op of a product of
    gradients and the update, the product takes the time.
    """
    parts: dict[Any, str] = {}
    for node in reversed(nodes):
        readers = [parts[client] for output in node.outputs for client, _ in output.clients if client != 'output']
        parts[node] = next(filter(None, [*map(layer_of, node.outputs), *readers, OTHER]))
    for node in nodes:
        gradients = [part for part in (parts.get(v.owner, '') for v in node.inputs) if part.endswith(BACKWARD)]
        if gradients and parts[node] == UPDATE and not isinstance(node.op, Elemwise):
            parts[node] = gradients[0]  # such as of a transposed matrix
    return list(map(parts.__getitem__, nodes))


# ----------------------------------------------------------------------------------------------------------- the times


class Times:
    """The seconds of the ops of a function of some name on a context, by part; without a context, of plain Theano's."""

    def __init__(self, name: str | None, context: str | None, nodes: Sequence[theano.Apply]) -> None:
        self.name = (name or UNNAMED).partition(', stage ')[0]  # all stages of a plan are in one table
        self.context, self._parts = context, parts_of(nodes)
        self._counts = [0] * len(nodes)
        self._seconds: dict[str, float] = {}
        every.append(self)

    def timed(self, number: int, thunk: Callable[[], Any], cells: Sequence[list[Any]]) -> Callable[[], Any]:
        """Return a thunk that computes an op and times it; arrays of devices in the cells are waited for."""
        counts, part, track = self._counts, self._parts[number], self.context or 'one device'

        @functools.wraps(thunk, assigned=())
        def run():
            counts[number] += 1
            if counts[number] % EVERY:
                return thunk()
            _wait(cells)
            start = time.perf_counter()
            result = thunk()
            _wait(cells)
            timeline.note(self._seconds, part, track, start)
            return result
        vars(run).pop('cthunk', None)  # Theano's loop would call this one
        return run

    def a_call(self) -> dict[str, float]:
        """Return the seconds of each part in a call, in the order of the last op of each; nothing if none was timed."""
        timed, order = max(self._counts, default=0) // EVERY, dict.fromkeys(reversed(self._parts))
        return {part: self._seconds[part] / timed for part in reversed(order) if part in self._seconds}


def untimed(thunk: Callable[[], Any]) -> Callable[[], Any]:
    """Return the thunk itself, in place of one that times it."""
    return getattr(thunk, '__wrapped__', thunk)


def _wait(cells):
    for cell in cells:
        if hasattr(cell[0], 'sync'):
            cell[0].sync()


class TimedLinker(VM_Linker):
    """Theano's linker, for a function that times its ops: the `subject` has the name of the function, and its context.
    """

    subject: tuple[str | None, str | None] = None, None

    def make_vm(self, nodes, thunks, inputs, outputs, storage_map, *others):
        times = Times(*self.subject, nodes)
        thunks = [thunk if thunk.lazy else times.timed(i, thunk, [storage_map[v] for v in node.inputs + node.outputs])
                  for i, (node, thunk) in enumerate(zip(nodes, thunks))]
        return super().make_vm(nodes, thunks, inputs, outputs, storage_map, *others)


def timed(mode: Any, name: str | None, context: str | None = None) -> Any:
    """Return a mode in which a function of a name on a context, or of plain Theano, times its ops, if layers are timed.

    The linker of a mode for a context must be its own.
    """
    mode = theano.compile.get_mode(mode)
    if is_on and isinstance(mode.linker, VM_Linker) and isinstance(mode.provided_optimizer, Query):
        if context is None:
            mode = mode.register(KEEP_LINES)  # this copies the linker
        mode.linker.__class__, mode.linker.subject = TimedLinker, (name, context)
    return mode


# ---------------------------------------------------------------------------------------------------------- the tables


def tables(exchanges: Iterable[tuple[Any, float]]) -> list[str]:
    """Return a table for each name of functions, the longest first: the time of each layer on one device and divided.

    Where a function is divided, the slowest context counts for a layer. `exchanges` are names with the seconds in which
    values are copied and added in a call.
    """
    sums: dict[Any, Any] = defaultdict(Counter)
    for times in every:
        sums[times.name, times.context].update(times.a_call())
    least = LEAST * max((sum(each.values()) for each in sums.values()), default=0)
    longest = sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    names = dict.fromkeys(name for (name, _), each in longest if sum(each.values()) > least)
    for name, seconds in exchanges:
        sums[name or UNNAMED, EXCHANGE][EXCHANGE] += seconds
    found = []
    for name in names:
        divided = [each for (other, context), each in sums.items() if other == name and context]
        sides = {'ONE DEVICE': sums[name, None], 'DIVIDED': functools.reduce(operator.or_, divided, Counter())}
        sides = {head: side for head, side in sides.items() if side}
        found.append('%s: milliseconds of a call\n\n%s' % (name, _table(sides)))
    return found


def _table(sides):
    """Return the times on one device and divided as a table; small parts share a row."""
    rows: dict[str, list[str]] = {}
    layers = list(dict.fromkeys(part.replace(BACKWARD, '') for side in sides.values() for part in side))
    for layer in layers:
        is_large = any(side[layer] + side[layer + BACKWARD] > LEAST * sum(side.values()) for side in sides.values())
        rows.setdefault(layer if is_large else OTHER, []).append(layer)
    rows.update({row: rows.pop(row) for row in (UPDATE, EXCHANGE, OTHER) if row in rows}, all=layers)
    lines = [['LAYER', *(cell for head in sides for cell in (head + ': FORWARD', 'BACKWARD', 'SHARE'))]]
    for row, members in rows.items():
        lines.append([row])
        for side in sides.values():
            pair = [sum(side[layer + end] for layer in members) for end in ('', BACKWARD)]
            lines[-1] += ['%.3f' % (1e3 * seconds) if seconds else '' for seconds in pair]
            lines[-1].append('%.1f %%' % (100 * sum(pair) / sum(side.values())) if any(pair) else '')
    return table(lines, right=range(1, len(lines[0])))
