"""Calls of a compiled function by CUDA graphs: one launch in place of one for each op.

A graph computes what the ops on the device do, with the shapes and addresses of its recording. Values of the host that
may differ from call to call reach it by copies, from memory that each call fills anew: the ops on the host that
compute them run before the launch, and ops on the host that read from the device run after it. A call finds its graph
by the addresses and shapes of its arguments and of the shared variables, and by the values of whole numbers among the
arguments on the host, such as a number of samples, which shapes may depend on.

Each result lies in one of a few arrays of the function, which nobody else holds: new values of a variable alternate
between two arrays, and so there are two graphs.
"""
from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
from theano.gof.link import raise_with_op

from ..devices.context_map import Context
from ..devices.cuda_graphs import CannotCapture, Choices, Graph, GraphMemory, Result, layout, memory_of_graphs
from ..graph import layers
from ..plan import Choice
from ..utils.tables import counted
from .graph_order import AFTER, BEFORE, DEVICE, NodeOrder, on_device

MOST_GRAPHS, MOST_ARRAYS, MOST_LAYOUTS = 8, 3, 4  # of a function; for a result of one layout; for a result
MOST_SEEN, IN_VAIN, UNUSED = 64, 32, 64  # arguments that are remembered; calls without a launch, of all or one graph
TIMED = 12  # first calls, which are op by op where the time of layers is measured
SHORT = 'the device is short of memory'


class RecordedGraph(NamedTuple):
    """A graph of a function, and what a call needs beside it.

    Attributes
    ----------
    graph : Graph
    results : list of Result
        The arrays that it writes: the values of `NodeOrder.kept`.
    copied : list of (cell, array)
        Values of the host, and the memory that the graph copies them from.
    fixed : list of (cell, value)
        Values of the host that are the same in each call of the graph.
    """

    graph: Graph
    results: Sequence[Result]
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
    op_by_op : callable
        The `call`.
    why_not : str
        Why its calls are no graphs; '' as long as they may be.
    launches : int
        Of graphs.
    unchecked : list of (Graph, sequence)
        Launches, with their arguments, that have not been asked whether an index was out of bounds; see `check`.
    """

    def __init__(self, function: Any, call: Callable[..., list[Any]], context: Context, n_inputs: int) -> None:
        # The function itself has this object, and its memory should be freed at once when nobody has it.
        inputs, self._outputs = function.maker.fgraph.inputs, function.maker.fgraph.outputs
        self._vm, self.op_by_op, self._context = function.fn, call, context
        self.why_not, self.launches = '', 0
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
        self._memory: GraphMemory | str | None = None
        self._seen: OrderedDict[Any, None] = OrderedDict()  # shapes, and arguments, of calls
        self._graphs: OrderedDict[Any, RecordedGraph] = OrderedDict()  # by arguments and the arrays of results
        self._layouts: dict[Any, Any] = {}  # of the values that are kept, by shapes
        self._arrays: list[dict[Any, list[Result]]] = []  # for each value that is kept, by layout
        self.unchecked: list[tuple[Graph, Sequence[Any]]] = []
        self._choices: dict[Any, Choices] = {}  # of the same, by shapes
        self._emptied = list(self._given)  # storage that is emptied after each call
        self._launched: dict[Any, int] = {}  # the numbers of the calls that have launched the graphs last
        self._calls, self._n_timed = 0, TIMED if layers.is_on else 0
        self._order: NodeOrder | None = None

    def __call__(self, *values: Any, into: Any = ()) -> list[Any]:
        """Compute the function; return its results, as `call` does."""
        if self.why_not:
            return self.op_by_op(*values)
        self._take(values)
        shapes = tuple([(cell[0].shape, cell[0].strides) for cell in self._on_device] +
                       [np.shape(cell[0]) for cell in self._of_host] + [int(cell[0]) for cell in self._numbers])
        if self._n_timed or not self._has_seen(shapes):
            self._n_timed = max(self._n_timed - 1, 0)
            return self.op_by_op(*values)  # kernels are built, algorithms chosen, and layers timed
        try:
            return self._computed(shapes, values)
        except _OpByOp as refused:
            why_not = str(refused)
            if self._order:
                self._empty_device()
        finally:
            for cell in self._emptied:
                cell[0] = None
        if why_not:
            self._forget()
        results = self.op_by_op(*values)  # raises an error of the function itself
        self.why_not = self.why_not or why_not
        return results

    def _take(self, values):
        for cell, value in zip(self._given, values):
            cell[0] = value

    def check(self) -> None:
        """Raise the error of an index that was out of bounds in a launch since the last check; wait for it."""
        unchecked, self.unchecked = self.unchecked, []
        if sum(graph.takes_error() for graph, _ in unchecked):  # it waits for each
            for _, values in unchecked:
                self.op_by_op(*values)

    def drop(self) -> None:
        """Forget launches of a step that has failed."""
        unchecked, self.unchecked = self.unchecked, []
        with contextlib.suppress(RuntimeError):  # the device may be lost
            for graph, _ in unchecked:
                graph.takes_error()

    def _has_seen(self, arguments):
        has = arguments in self._seen
        self._seen[arguments] = self._seen.pop(arguments, None)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return has

    def _computed(self, shapes, values):
        """Return the results, by a graph where there is one, or one can be recorded."""
        try:
            if self._order is None:
                self._prepare()
            if self._memory.is_short:
                raise _OpByOp(SHORT)
            order = self._order
            self._calls += 1
            self._run_before()
            numbers = [_bits(self._vm.storage_map[variable][0]) for variable in order.numbers]
            kind = shapes, *(number for number, variable in zip(numbers, order.numbers) if _is_whole(variable))
            key = (kind, *numbers, *(cell[0].gpudata for cell in self._on_device))
            results = self._free_arrays(kind, values)
            place = (key, *map(id, results))
            recorded = self._graphs.get(place)
            if recorded is None:
                return self._without_graph(key, place, results)
        except _OpByOp:
            raise
        except Exception as error:
            why_not = str(error).strip().partition('\n')[0] or type(error).__name__
            traced: BaseException | None = error
            while traced is not None:  # thunks keep their last error, whose frames and callers have arrays
                traced = traced.with_traceback(None).__context__
            raise _OpByOp(why_not) from None
        self._note_launch(place, recorded)
        self.launches += 1
        self._launch(recorded)
        if recorded.graph.finds_errors:
            self.unchecked.append((recorded.graph, values))
        return self._results(results)

    def _without_graph(self, key, place, results):
        """Return the results of a call that has no graph yet."""
        if self._calls > IN_VAIN and not self.launches:
            raise _OpByOp('its values lie elsewhere, or are other numbers, in each call')
        if self._has_seen(key) and self._has_room():
            return self._recorded(place, results)
        self._run_device(results)  # into arrays that a graph may have: new values of variables lie where it reads them
        return self._results(results)

    def _has_room(self):
        """Return whether one more graph may be recorded; the one that was not launched for a long time goes."""
        if len(self._graphs) == MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            if self._calls - self._launched[oldest] < UNUSED:
                return False
            del self._graphs[oldest], self._launched[oldest]
        return True

    def _prepare(self):
        """Put the nodes in order, and take the memory of the context."""
        thunks = list(map(layers.untimed, self._vm.thunks))
        order = self._order = NodeOrder(self._vm.nodes, thunks, self._outputs, self._changing)
        made = [each for time in (BEFORE, AFTER) for node, _ in order.nodes[time] for each in node.outputs]
        self._emptied += [self._vm.storage_map[variable] for variable in {*made, *order.kept, *order.fixed}]
        self._arrays = [{} for _ in order.kept]
        self._memory = memory_of_graphs(self._context)
        if order.why_not or isinstance(self._memory, str):
            raise _OpByOp(order.why_not or self._memory)
        self._memory.users.add(self)

    def _free_arrays(self, kind, values):
        """Return an array for each result that is kept, which nobody holds, for calls of a kind."""
        if kind not in self._layouts:
            self._learn(kind, values)
        if kind not in self._choices:
            arrays = [each.setdefault(wanted, []) for each, wanted in zip(self._arrays, self._layouts[kind])]
            self._choices[kind] = Choices(arrays)
        free = self._choices[kind].free()
        if None not in free:
            return free
        for arrays, wanted, chosen in zip(self._arrays, self._layouts[kind], free):
            if chosen is None:
                if len(arrays[wanted]) == MOST_ARRAYS:
                    raise _OpByOp  # somebody holds all of them
                arrays[wanted].append(Result(self._context, wanted))
                self._drop_layouts(arrays, wanted)
        self._choices.clear()
        return self._free_arrays(kind, values)

    def _drop_layouts(self, arrays, wanted):
        """Drop the arrays of a result with other layouts, where these are many, but for the results of graphs."""
        if len(arrays) > MOST_LAYOUTS:
            used = {id(result) for recorded in self._graphs.values() for result in recorded.results}
            for each in [each for each in arrays if each != wanted]:
                if used.isdisjoint(map(id, arrays[each])):
                    del arrays[each]

    def _learn(self, kind, values):
        """Find the layouts of the values that are kept, and compare a pass over the nodes with Theano's own call."""
        expected = [_bits(each) for each in self.op_by_op(*values)]
        self._take(values)
        self._run_device()
        self._layouts[kind] = [layout(cell[0]) for cell in self._kept()]
        self._run(self._order.nodes[AFTER])
        if [_bits(self._vm.storage_map[variable][0]) for variable in self._outputs] != expected:
            raise CannotCapture('its ops have other results in another order')
        while len(self._layouts) > MOST_SEEN:
            del self._layouts[next(iter(self._layouts))]
        self._empty_device()

    def _launch(self, recorded):
        for cell, value in recorded.fixed:
            cell[0] = copy.copy(value)  # ops may work in place on it
        if recorded.copied:
            recorded.graph.wait()  # for its last launch, which has copied from this memory
        for cell, memory in recorded.copied:
            memory[...] = cell[0]
        recorded.graph.launch()

    def _results(self, results):
        """Return the function's results, once the nodes of the device are computed, or will be."""
        for cell, result in zip(self._kept(), results):
            cell[0] = result.array.view()  # a view is counted as a reference, as long as somebody has it
        self._run(self._order.nodes[AFTER])
        return [self._vm.storage_map[variable][0] for variable in self._outputs]

    def _recorded(self, place, results):
        """Return the results by a new graph of the present arguments, with the same bits as Theano's own call has."""
        recorded = self._record(results)
        computed = [np.asarray(result.array) for result in results]
        for result, value in zip(results, computed):  # the launch has to write each byte
            if value.size:
                others = ~np.frombuffer(value.tobytes('A'), 'uint8')
                result.array.write(np.frombuffer(others.tobytes(), value.dtype))
        self._launch(recorded)
        if [_bits(result.array) for result in results] != list(map(_bits, computed)):
            raise CannotCapture('its first launch had another result than the call')
        outputs = self._results(results)
        if self.why_not:
            raise _OpByOp(self.why_not)
        self._note_launch(place, recorded)
        return outputs

    def _note_launch(self, place, recorded):
        self._graphs[place], self._launched[place] = recorded, self._calls
        self._graphs.move_to_end(place)

    def _record(self, results):
        """Record a graph of the present arguments, which writes to some arrays."""
        order, memory, copied = self._order, self._memory, []
        self._empty_device()
        n_arrays = memory.n_arrays()
        staging = memory.page_locked(max(memory.compute(lambda: self._run_device(results)), 1))
        fixed = [(cell, copy.copy(cell[0])) for cell in (self._vm.storage_map[variable] for variable in order.fixed)]
        self._empty_device()
        if memory.n_arrays() == n_arrays:
            graph = memory.capture(lambda: self._run_device(results, staging, copied), staging)
            self._empty_device()
        if memory.n_arrays() != n_arrays:
            raise CannotCapture('it keeps memory on the device from call to call')
        return RecordedGraph(graph, results, copied, fixed)

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

    def _run_device(self, results=(), staging=None, copied=None):
        """Compute the nodes of the device, into the arrays of results; while a graph is recorded, note its copies."""
        order, cells = self._order, self._vm.storage_map
        self._run_before()  # nodes of the device may work in place on its values
        for cell, result in zip(self._kept(), results):
            cell[0] = result.array.view()
        place = 0

        def after_each(i):
            nonlocal place
            node = order.nodes[DEVICE][i][0]
            if copied is not None and node in order.copies:
                value = cells[node.inputs[0]][0]
                if value.nbytes and self._memory.staged() - place < value.nbytes:
                    raise CannotCapture('%s copies nothing' % node.op)
                memory = staging[place:place + value.nbytes].view(value.dtype).reshape(value.shape)
                copied.append((cells[node.inputs[0]], memory))
            place = self._memory.staged() if copied is not None else 0
            for variable in order.ended[i]:
                cells[variable][0] = None

        self._run(order.nodes[DEVICE], after_each)
        for cell, result in zip(self._kept(), results):
            result.fill(cell[0])

    def _kept(self):
        return [self._vm.storage_map[variable] for variable in self._order.kept]

    def _empty_device(self):
        """Clear the storage of values that nodes of the device have made, and of the inner functions of loops."""
        for node, _ in self._order.nodes[DEVICE]:
            for variable in node.outputs:
                self._vm.storage_map[variable][0] = None
            _empty_inner(node.op)

    def _forget(self):
        self._graphs.clear()
        self._launched.clear()
        self._seen.clear()
        self._choices.clear()
        self._arrays = [{} for _ in self._arrays]

    def give_back(self) -> None:
        """Free all memory of graphs, where the device is short of it: the function is computed op by op from now on."""
        self.why_not = SHORT
        self._forget()


def _bits(value):
    """Return the bytes of an array, on the device or the host."""
    return np.asarray(value).tobytes()


def _is_whole(variable):
    """Return whether a value of the host is a whole number, on which shapes may depend."""
    return not str(getattr(variable.type, 'dtype', '')).startswith('float')


def _empty_inner(op):
    """Clear the storage of an op's inner function, which may keep arrays from call to call."""
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
