"""Calls of a compiled function by CUDA graphs: one launch in place of one for each op.

A graph computes what the ops on the device do, with the shapes and addresses of its recording. Values of the host that
may differ from call to call reach it by copies, from memory that each call fills anew: the ops on the host that compute
them run before the launch, and ops on the host that read from the device run after it. A call finds its graph by the
addresses and shapes of its arguments and of the shared variables, and by the values of whole numbers among the arguments
on the host, such as a number of samples, which shapes may depend on.

Results lie in arrays of their own for each graph. If somebody still holds one of these, another set of arrays takes its
place: new values of variables alternate between two sets, and each set has graphs that write to it.
"""
from __future__ import annotations

from collections import OrderedDict
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import theano
from theano.gof.link import gc_helper, raise_with_op
from theano.gpuarray.basic_ops import GpuFromHost
from theano.gpuarray.type import GpuArrayType

from ..devices.context_map import Context
from ..devices.cuda_graphs import Arena, CannotCapture, Graph, Results, arena_of
from ..errors import named

WARM_UP = 2  # calls of the same shapes before one is recorded: kernels are built, and algorithms chosen
MOST_GRAPHS, MOST_SETS, MOST_SHAPES = 8, 3, 32
BEFORE, DEVICE, AFTER = 'before', 'device', 'after'  # when a node runs


class Recorded(NamedTuple):
    """A graph of a function, and what a call needs beside it.

    Attributes
    ----------
    graph : Graph
    age : int
        The arena's, see `Arena.age`.
    results : Results
        The arrays that it writes: the values of `Order.kept`.
    copied : list of (cell, array)
        Values of the host, and the memory that the graph copies them from.
    fixed : list of (cell, value)
        Values of the host that are the same in each call of the graph.
    """

    graph: Graph
    age: int
    results: Results
    copied: list[tuple[list[Any], np.ndarray]]
    fixed: list[tuple[list[Any], Any]]


class Order:
    """The nodes of a function, by when they run; `why_not` says why that cannot be.

    Attributes
    ----------
    nodes : dict of str to list of (node, thunk)
        `BEFORE`, `DEVICE` and `AFTER` are nodes that compute values of the host, which may differ from call to call; those of the device, with the nodes
        of the host that depend on shapes alone; and those that read from the device.
    copies : set of Apply
        Nodes that copy values of `before`, or arguments, to the device.
    kept : list of Variable
        Values on the device that are outputs, or that nodes of `after` take.
    fixed : list of Variable
        Values of the host that depend on shapes alone, and are outputs, or taken by nodes of `before` and `after`.
    ended : list of list of Variable
        Values that no node of `device` takes after the one of the same number.
    """

    def __init__(self, function: Any, changing: set[theano.Variable]) -> None:
        self.nodes: dict[str, list[tuple[Any, Any]]] = {BEFORE: [], DEVICE: [], AFTER: []}
        self.copies, self.why_not = set(), ''
        when: dict[Any, str] = {variable: BEFORE for variable in changing}
        for node, thunk in zip(function.fn.nodes, function.fn.thunks):
            time = self._time(node, thunk, {when.get(variable) for variable in node.inputs} - {None, DEVICE})
            self.nodes[time].append((node, thunk))
            when.update((output, time if _on_device(output) or time != DEVICE else None) for output in node.outputs)
        self._check_destroyed(when)
        outputs = function.maker.fgraph.outputs
        taken = [variable for node, _ in self.nodes[AFTER] for variable in node.inputs]
        self.kept = [variable for variable in dict.fromkeys([*outputs, *taken])
                     if _on_device(variable) and variable.owner is not None]
        taken += [*outputs, *(variable for node, _ in self.nodes[BEFORE] for variable in node.inputs)]
        self.fixed = [variable for variable in dict.fromkeys(taken)
                      if not _on_device(variable) and variable.owner is not None and when[variable] is None]
        made, last = gc_helper([node for node, _ in self.nodes[DEVICE]])
        stays = {*self.kept, *self.fixed, *outputs}
        self.ended = [[variable for variable in {*node.inputs, *node.outputs} if variable in made
                       and variable not in stays and last.get(variable, node) is node]
                      for node, _ in self.nodes[DEVICE]]

    def _time(self, node, thunk, inputs):
        if getattr(thunk, 'lazy', False):
            self._refuse('%s computes one of several values' % node.op)
        if any(map(_on_device, node.outputs)):
            if AFTER in inputs:
                self._refuse('%s takes a value that the host has read from the device' % named(node.op))
            if BEFORE in inputs:
                if isinstance(node.op, GpuFromHost):
                    self.copies.add(node)
                else:
                    self._refuse('%s takes a value of the host that may differ in each call' % named(node.op))
            return DEVICE
        reads = any(map(_on_device, node.inputs)) and not type(node.op).__name__.startswith('Shape')
        return AFTER if reads or AFTER in inputs else BEFORE if BEFORE in inputs else DEVICE

    def _refuse(self, why):
        self.why_not = self.why_not or why

    def _check_destroyed(self, when):
        """Refuse ops of the host that work in place on a value which another part, or the next call, needs."""
        for time in BEFORE, AFTER:
            for node, _ in self.nodes[time]:
                for destroyed in getattr(node.op, 'destroy_map', {}).values():
                    if any(when.get(node.inputs[i]) != time or node.inputs[i].owner is None for i in destroyed):
                        self._refuse('%s works in place on a value that is needed again' % named(node.op))


class GraphCalls:
    """Calls of a function that is compiled for a CUDA context.

    Parameters
    ----------
    function : theano function
        Without updates and defaults.
    call : callable
        ``call(*values)`` computes it op by op.
    context : Context
    n_inputs : int
        The number of its arguments; the values of shared variables follow.

    Attributes
    ----------
    why_not : str
        Why its calls are no graphs; '' as long as they may be.
    """

    def __init__(self, function: Any, call: Callable[..., list[Any]], context: Context, n_inputs: int) -> None:
        self._function, self._call, self._context = function, call, context
        self.why_not, self.launches = '', 0
        inputs = function.maker.fgraph.inputs
        cells = [container.storage for container in function.input_storage]
        self._given = cells[:n_inputs]
        self._on_device = [cell for cell, variable in zip(cells, inputs) if _on_device(variable)]
        numbers = [getattr(variable, 'ndim', None) == 0 and variable.dtype.startswith(('int', 'uint', 'bool'))
                   for variable in inputs[:n_inputs]]
        self._numbers = [cell for cell, is_number in zip(cells, numbers) if is_number]
        of_host = [(cell, variable) for i, (cell, variable) in enumerate(zip(cells, inputs))
                   if not _on_device(variable) and not (i < n_inputs and numbers[i])]
        self._of_host = [cell for cell, _ in of_host]
        self._changing = {variable for _, variable in of_host}
        self._arena: Arena | None = None
        self._seen: OrderedDict[Any, int] = OrderedDict()  # calls, by shapes
        self._graphs: OrderedDict[Any, Recorded] = OrderedDict()  # by addresses, shapes, and the set of results
        self._sets: dict[Any, list[Results]] = {}  # sets of results, by shapes
        self._recordings = 0
        self._order: Order | None = None

    def __call__(self, *values: Any, into: Any = ()) -> list[Any]:
        """Compute the function; return its results, as `call` does."""
        if self.why_not:
            return self._call(*values)
        for cell, value in zip(self._given, values):
            cell[0] = value
        shapes = tuple([(cell[0].shape, cell[0].strides) for cell in self._on_device] +
                       [np.shape(cell[0]) for cell in self._of_host] + [int(cell[0]) for cell in self._numbers])
        key = shapes, tuple([cell[0].gpudata for cell in self._on_device])
        free = [number for number, results in enumerate(self._sets.get(shapes, ())) if results.are_free()]
        for number in free:
            recorded = self._graphs.get((*key, number))
            if recorded is not None and recorded.age == self._arena.age:
                self._graphs.move_to_end((*key, number))
                self.launches += 1
                return self._finish(recorded)
        if self._is_worth_recording(shapes):
            try:
                return self._finish(self._record(key, free), is_computed=True)
            except Exception as error:
                self._forget()
                results = self._call(*values)  # raises an error of the function itself
                self.why_not = str(error).strip().partition('\n')[0] or type(error).__name__
                return results
        return self._call(*values)

    def _is_worth_recording(self, shapes):
        seen = self._seen[shapes] = self._seen.pop(shapes, 0) + 1
        if len(self._seen) > MOST_SHAPES:
            self._seen.popitem(last=False)
        changes = self._recordings > MOST_GRAPHS and self._recordings * 4 > self.launches
        return seen > WARM_UP and not changes and len(self._sets.get(shapes, ())) < MOST_SETS

    def _finish(self, recorded, is_computed=False):
        """Return the results of a graph, which is launched here unless its results are computed."""
        order, cells = self._order, self._function.fn.storage_map
        try:
            if not is_computed:
                for cell, value in recorded.fixed:
                    cell[0] = value
                self._run(order.nodes[BEFORE])
                if recorded.copied:
                    recorded.graph.wait()
                for cell, memory in recorded.copied:
                    memory[...] = cell[0]
                recorded.graph.launch()
            for variable, array in zip(order.kept, recorded.results.arrays):
                cells[variable][0] = array.view()
            self._run(order.nodes[AFTER])
            own = {id(cell) for cell, _ in recorded.fixed}
            results = [cells[variable] for variable in self._function.maker.fgraph.outputs]
            return [np.array(cell[0]) if id(cell) in own else cell[0] for cell in results]
        finally:
            self._empty(BEFORE, DEVICE, AFTER)

    def _record(self, key, free):
        """Record a graph of the present arguments, whose results are computed, and return it."""
        order = self._order = self._order or Order(self._function, self._changing)
        arena = arena_of(self._context)
        if order.why_not or isinstance(arena, str):
            raise CannotCapture(order.why_not or arena)
        self._recordings += 1
        self._arena, n_arrays, shapes = arena, arena.n_arrays(), key[0]
        self._run(order.nodes[BEFORE])
        self._empty(DEVICE)
        sets = self._sets.setdefault(shapes, [])
        if not free:
            self._run_device()
            sets.append(Results(self._context, [cell[0] for cell in self._kept()]))
            self._empty(DEVICE)
            free = [len(sets) - 1]
        results, copied = sets[free[0]], []
        staging = arena.page_locked(max(arena.compute(lambda: self._run_device(results)), 1))
        expected = [np.asarray(array) for array in results.arrays]
        fixed = [(cell, cell[0]) for cell in (self._function.fn.storage_map[variable] for variable in order.fixed)]
        self._empty(DEVICE)
        if arena.n_arrays() == n_arrays:
            recorded = Recorded(arena.capture(lambda: self._run_device(results, staging, copied), staging), arena.age,
                                results, copied, fixed)
            self._empty(DEVICE)
        if arena.n_arrays() != n_arrays:
            raise CannotCapture('it keeps memory on the device from call to call')
        for array, value in zip(results.arrays, expected):  # the launch has to write each byte
            array.write(np.frombuffer(bytes(~np.frombuffer(value.tobytes('A'), 'uint8')), value.dtype))
        recorded.graph.launch()
        if any(np.asarray(array).tobytes() != value.tobytes() for array, value in zip(results.arrays, expected)):
            raise CannotCapture('its first launch had another result than the call')
        self._graphs[(*key, free[0])] = recorded
        self._forget(MOST_GRAPHS)
        for cell, value in fixed:
            cell[0] = value
        return recorded

    def _run(self, nodes, after_each=lambda i: None):
        for i, (node, thunk) in enumerate(nodes):
            try:
                thunk()
            except Exception:
                raise_with_op(node, thunk, storage_map=self._function.fn.storage_map)
            after_each(i)

    def _run_device(self, results=None, staging=None, copied=None):
        """Compute the nodes of the device, into the arrays of results; while a graph is recorded, note its copies."""
        order, cells = self._order, self._function.fn.storage_map
        for cell, array in zip(self._kept(), results.arrays if results else ()):
            cell[0] = array.view()
        place = 0

        def after_each(i):
            nonlocal place
            node = order.nodes[DEVICE][i][0]
            if copied is not None and node in order.copies:
                value = cells[node.inputs[0]][0]
                if value.nbytes and self._arena.staged() - place < value.nbytes:
                    raise CannotCapture('%s copies nothing' % node.op)
                memory = staging[place:place + value.nbytes].view(value.dtype).reshape(value.shape)
                copied.append((cells[node.inputs[0]], memory))
            place = self._arena.staged() if copied is not None else 0
            for variable in order.ended[i]:
                cells[variable][0] = None

        self._run(order.nodes[DEVICE], after_each)
        for cell, array in zip(self._kept(), results.arrays if results else ()):
            made = cell[0]
            if (made.gpudata, made.shape, made.strides) != (array.gpudata, array.shape, array.strides):
                if not made.ndim:
                    array, made = array.reshape((1,)), made.reshape((1,))  # pygpu assigns no array without axes
                array[...] = made

    def _kept(self):
        return [self._function.fn.storage_map[variable] for variable in self._order.kept]

    def _empty(self, *times):
        """Empty the storage of what nodes have made, and of the inner functions of loops; of all, that of arguments."""
        for time in times:
            for node, _ in self._order.nodes[time]:
                for variable in node.outputs:
                    self._function.fn.storage_map[variable][0] = None
                _empty_inner(node.op)
        if len(times) > 1:
            for cell in self._given:
                cell[0] = None

    def _forget(self, n_kept=0):
        """Drop the graphs that were not launched for the longest time, and sets of results without a graph."""
        while len(self._graphs) > n_kept:
            self._graphs.popitem(last=False)
        shapes = {key[0] for key in self._graphs}
        self._sets = {key: sets for key, sets in self._sets.items() if key in shapes}


def _on_device(variable):
    return isinstance(variable.type, GpuArrayType)


def _empty_inner(op):
    """Empty the storage of an op's inner function, which may keep arrays from call to call."""
    inner = getattr(getattr(op, 'fn', None), 'fn', None)
    for variable, cell in getattr(inner, 'storage_map', {}).items():
        if variable.owner is not None:
            cell[0] = None
            _empty_inner(variable.owner.op)
