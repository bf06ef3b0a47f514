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

from collections import Counter, OrderedDict
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import theano
from theano.gof.link import raise_with_op

from ..devices.context_map import Context
from ..devices.cuda_graphs import Arena, CannotCapture, Graph, Results, arena_of
from ..plan import Choice
from ..utils.tables import counted
from .graph_order import AFTER, BEFORE, DEVICE, Order, on_device

WARM_UP = 2  # calls of the same shapes before one is recorded: kernels are built, and algorithms chosen
MOST_GRAPHS, MOST_SETS, MOST_SHAPES = 8, 3, 32


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


class _OpByOp(Exception):
    """A call that is no graph; the text says why that holds for all calls, and is '' if it does not."""


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
        # The function itself has this object, and its memory should be freed at once when nobody has it.
        self._vm, self._outputs, self._call, self._context = function.fn, function.maker.fgraph.outputs, call, context
        self.why_not, self.launches = '', 0
        inputs = function.maker.fgraph.inputs
        cells = [container.storage for container in function.input_storage]
        self._given = cells[:n_inputs]
        self._on_device = [cell for cell, variable in zip(cells, inputs) if on_device(variable)]
        numbers = [getattr(variable, 'ndim', None) == 0 and variable.dtype.startswith(('int', 'uint', 'bool'))
                   for variable in inputs[:n_inputs]]
        self._numbers = [cell for cell, is_number in zip(cells, numbers) if is_number]
        of_host = [(cell, variable) for i, (cell, variable) in enumerate(zip(cells, inputs))
                   if not on_device(variable) and not (i < n_inputs and numbers[i])]
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
        if not self._is_warm(shapes):
            return self._call(*values)
        try:
            return self._computed(shapes)
        except _OpByOp as refused:
            results = self._call(*values)  # raises an error of the function itself
            self.why_not = str(refused)  # '' for this call alone
            return results
        finally:
            self._empty()

    def _is_warm(self, shapes):
        calls = self._seen[shapes] = self._seen.pop(shapes, 0) + 1
        if len(self._seen) > MOST_SHAPES:
            self._seen.popitem(last=False)
        return calls > WARM_UP

    def _computed(self, shapes):
        """Return the results by a graph, which may be recorded now."""
        order = self._order = self._order or Order(self._vm.nodes, self._vm.thunks, self._outputs, self._changing)
        arena = self._arena = self._arena or arena_of(self._context)
        if order.why_not or isinstance(arena, str):
            raise _OpByOp(order.why_not or arena)
        self._run_before()
        key = (shapes, tuple([cell[0].gpudata for cell in self._on_device]),
               tuple([self._vm.storage_map[variable][0].tobytes() for variable in order.numbers]))
        sets = self._sets.get(shapes, [])
        free = [number for number, results in enumerate(sets) if results.are_free()]
        for number in free:
            recorded = self._graphs.get((*key, number))
            if recorded is not None and recorded.age == arena.age:
                self._graphs.move_to_end((*key, number))
                self.launches += 1
                self._launch(recorded)
                return self._results(recorded)
        if not free and len(sets) == MOST_SETS:
            raise _OpByOp
        if self._recordings > MOST_GRAPHS and self._recordings * 4 > self.launches:
            raise _OpByOp('' if self.launches else 'its values lie elsewhere, or are other numbers, in each call')
        try:
            recorded = self._record(key, free)
        except Exception as error:
            self._forget()
            raise _OpByOp(str(error).strip().partition('\n')[0] or type(error).__name__) from error
        return self._results(recorded)

    def _launch(self, recorded):
        for cell, value in recorded.fixed:
            cell[0] = value
        if recorded.copied:
            recorded.graph.wait()  # for its last launch, which has copied from this memory
        for cell, memory in recorded.copied:
            memory[...] = cell[0]
        recorded.graph.launch()

    def _results(self, recorded):
        """Return the function's results, once those of a graph are computed, or will be."""
        cells = self._vm.storage_map
        for variable, array in zip(self._order.kept, recorded.results.arrays):
            cells[variable][0] = array.view()  # which is counted as a reference, as long as somebody has it
        self._run(self._order.nodes[AFTER])
        fixed = {id(cell) for cell, _ in recorded.fixed}
        results = [cells[variable] for variable in self._outputs]
        return [np.array(cell[0]) if id(cell) in fixed else cell[0] for cell in results]

    def _record(self, key, free):
        """Record a graph of the present arguments, whose results are computed, and return it."""
        self._recordings += 1
        order, arena, sets = self._order, self._arena, self._sets.setdefault(key[0], [])
        self._empty_device()
        n_arrays = arena.n_arrays()
        if not free:
            self._run_device()
            sets.append(Results(self._context, [cell[0] for cell in self._kept()]))
            self._empty_device()
            free = [len(sets) - 1]
        results, copied = sets[free[0]], []
        staging = arena.page_locked(max(arena.compute(lambda: self._run_device(results)), 1))
        expected = [np.asarray(array) for array in results.arrays]
        fixed = [(cell, cell[0]) for cell in (self._vm.storage_map[variable] for variable in order.fixed)]
        self._empty_device()
        if arena.n_arrays() == n_arrays:
            recorded = Recorded(arena.capture(lambda: self._run_device(results, staging, copied), staging), arena.age,
                                results, copied, fixed)
            self._empty_device()
        if arena.n_arrays() != n_arrays:
            raise CannotCapture('it keeps memory on the device from call to call')
        for array, value in zip(results.arrays, expected):  # the launch has to write each byte
            if value.size:
                array.write(np.frombuffer((~np.frombuffer(value.tobytes('A'), 'uint8')).tobytes(), value.dtype))
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
                raise_with_op(node, thunk, storage_map=self._vm.storage_map)
            after_each(i)

    def _run_before(self):
        order, cells = self._order, self._vm.storage_map
        saved = {}

        def after_each(i):
            saved.update((variable, cells[variable][0].copy()) for variable in order.nodes[BEFORE][i][0].outputs
                         if variable in order.saved)

        self._run(order.nodes[BEFORE], after_each)
        for variable, value in saved.items():
            cells[variable][0] = value

    def _run_device(self, results=None, staging=None, copied=None):
        """Compute the nodes of the device, into the arrays of results; while a graph is recorded, note its copies."""
        order, cells = self._order, self._vm.storage_map
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
        return [self._vm.storage_map[variable] for variable in self._order.kept]

    def _empty(self):
        """Empty the storage of arguments, and of all that the nodes have made."""
        for cell in self._given:
            cell[0] = None
        if self._order:
            self._empty_device()
            for node, _ in self._order.nodes[BEFORE] + self._order.nodes[AFTER]:
                for variable in node.outputs:
                    self._vm.storage_map[variable][0] = None

    def _empty_device(self):
        """Empty the storage of what nodes of the device have made, and that of the inner functions of loops."""
        for node, _ in self._order.nodes[DEVICE]:
            for variable in node.outputs:
                self._vm.storage_map[variable][0] = None
            _empty_inner(node.op)

    def _forget(self, n_kept=0):
        """Drop the graphs that were not launched for the longest time, and sets of results without a graph."""
        while len(self._graphs) > n_kept:
            self._graphs.popitem(last=False)
        shapes = {key[0] for key in self._graphs}
        self._sets = {key: sets for key, sets in self._sets.items() if key in shapes}


def _empty_inner(op):
    """Empty the storage of an op's inner function, which may keep arrays from call to call."""
    inner = getattr(getattr(op, 'fn', None), 'fn', None)
    for variable, cell in getattr(inner, 'storage_map', {}).items():
        if variable.owner is not None:
            cell[0] = None
            _empty_inner(variable.owner.op)


def changes(functions: Sequence[Any]) -> list[Choice]:
    """Return the choices of functions that calls have made: whether graphs are launched, and why not."""
    calls = [function.mgpu_call for function in functions if isinstance(function.mgpu_call, GraphCalls)]
    chosen = Counter((False, each.why_not) if each.why_not else (True, 'the first launch had the same bits as a call')
                     for each in calls if each.why_not or each.launches)
    return [Choice('CUDA graphs', '%d of %s %s' % (count, counted(len(calls), 'part'),
                                                  'in one launch each' if is_graph else 'op by op'), why)
            for (is_graph, why), count in sorted(chosen.items(), reverse=True)]
