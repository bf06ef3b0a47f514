"""A dry run of a compiled function: the order of its ops, and the memory that each takes and frees."""
from __future__ import annotations

from typing import Any, Callable, Collection, Dict, List, Mapping, Sequence

import numpy as np
import theano
from theano.gof.graph import Apply
from theano.gpuarray import basic_ops, blas, dnn
from theano.gpuarray.type import GpuArrayType
from theano.ifelse import IfElse
from theano.scan_module.scan_op import Scan
from theano.tensor import DimShuffle, Reshape, Subtensor, TensorType
from theano.tensor.subtensor import get_idx_list

from .arrays import Array, Memory
from .shapes import Shapes, ShapesOf

Storage = Dict[theano.Variable, Any]  # of arrays; None for a value that is not on the device
INNER_STEPS = 2  # of a scan: the second one finds the arrays that the first has left
SMALL = 1000  # elements of a shared array on the host whose values may be sizes


class UnknownShape(Exception):
    """The shape of a value on the device does not follow from the shapes of the inputs."""


class DryFunction:
    """A function that was compiled by Theano for a context, without its computation.

    Parameters
    ----------
    function : theano.compile.function_module.Function
    kind : str
        Of the context: values in the host's memory count on `cpu` alone.
    numbers : collection of int
        The places of the inputs whose values are given in place of a shape.
    n_given : int, optional
        The number of inputs that are given; by default, all but the shared variables.
    outer : list of bool
        For each result whether it is written where the caller has memory for it, as a scan has.
    """

    def __init__(self, function: Any, kind: str, numbers: Collection[int] = (), n_given: int | None = None,
                 outer: Sequence[bool] = ()) -> None:
        self._graph, self.kind, self.numbers, self._compiled = function.maker.fgraph, kind, frozenset(numbers), function
        self._type: type = TensorType if kind == 'cpu' else GpuArrayType
        self.allow_gc = bool(getattr(function.fn, 'allow_gc', False))
        self._outer = {each for each, is_outer in zip(self._graph.outputs, outer) if is_outer}
        self._conditions = [node.inputs[0] for node in self._graph.apply_nodes if isinstance(node.op, IfElse)]
        self._steps_for: dict[Any, Any] = {}
        if n_given is None:
            n_given = sum(spec.value is None for spec in function.maker.inputs)
        self.given, self._shared = self._graph.inputs[:n_given], self._graph.inputs[n_given:]
        self.storages = [each.storage for each in function.input_storage[n_given:]]
        scans = [node for node in self._graph.apply_nodes if isinstance(node.op, Scan)]
        wanted = [*self._graph.outputs, *self._conditions, *[v for node in scans for v in node.inputs]]
        self._shapes_of = ShapesOf(self.given, {self.given[i] for i in numbers}, wanted, {
            variable: _known(storage[0]) for variable, storage in zip(self._shared, self.storages)},
            self._graph.toposort())
        self._cache: dict[Any, Shapes] = {}
        self._scans: dict[Scan, Any] = {}
        self.has_dnn = any(isinstance(node.op, dnn.DnnBase) for node in self._graph.apply_nodes)
        self.constants = sum(each.data.size * each.data.itemsize for each in self._graph.variables
                             if isinstance(each, theano.Constant) and isinstance(each.type, self._type))

    def shapes(self, given: Sequence[Any]) -> Shapes:
        """Return the shapes of all values.

        Parameters
        ----------
        given : list of (tuple of int, or ndarray)
            For each argument its shape, or its value.
        """
        key = tuple(value if isinstance(value, tuple) else value.tobytes() for value in given)
        if key not in self._cache:
            self._cache[key] = self._shapes_of(given)
        return self._cache[key]

    def run(self, memory: Memory, arguments: Sequence[Any], shared: Sequence[Any], shapes: Shapes,
            kept: Storage) -> list[Any]:
        """Take and free memory as a call does, and return the results.

        Parameters
        ----------
        memory : Memory
        arguments, shared : list of (Array or None)
            Of the given inputs, and of the shared variables. None for values that are not on the device.
        shapes : Shapes
        kept : dict of theano.Variable to Array
            What earlier calls have left.

        Returns
        -------
        list of (Array, or tuple of int, or ndarray)
            For each result; of a value that is not on the device, the shape, or the value if it is known.

        Raises
        ------
        UnknownShape
        """
        storage = kept
        storage.update(zip(self.given, arguments))
        storage.update(zip(self._shared, shared))
        for node, freed in self._steps(shapes.numbers):
            for variable in node.outputs:
                storage[variable] = None  # memory of an earlier call is used again
            self._compute(memory, node, storage, shapes)
            for variable in freed:
                storage[variable] = None
        results = []
        for variable in self._graph.outputs:
            result, value = storage.get(variable), shapes.numbers.get(variable)
            if result is not None:
                result = result.view(result.shape, result.strides)
                result.value = value
            results.append(result or (shapes.of[variable] if value is None else value))
        for variable in [*self.given, *self._shared, *(self._graph.outputs if self.allow_gc else ())]:
            storage[variable] = None
        return results

    def _steps(self, numbers):
        """Return the ops that run, each with the values that are freed after it."""
        known = {each: int(numbers[each]) if each in numbers else None for each in self._conditions}
        key = tuple(known.values())
        if key not in self._steps_for:
            nodes = order_of(self._compiled, known)
            self._steps_for[key] = list(zip(nodes, _freed_after(nodes, self._graph.outputs, self.allow_gc)))
        return self._steps_for[key]

    def _compute(self, memory, node, storage, shapes):
        """Put the outputs of a node into the storage."""
        if isinstance(node.op, Scan):
            self._scan(memory, node, storage, shapes)
            return
        if isinstance(node.op, IfElse):
            for source, variable in zip(_taken(node, shapes.numbers.get(node.inputs[0])), node.outputs):
                array = storage.get(source)
                storage[variable] = array if array is None or node.op.as_view else \
                    memory.array(array.shape, variable.dtype)
            return
        for number, variable in enumerate(node.outputs):
            if isinstance(variable.type, self._type):
                storage[variable] = self._output(memory, node, number, variable, storage, shapes)
        # The workspace of an op is freed once the op has run; so it counts in the peak, and only there.
        memory.array([workspace(node, storage, shapes)], 'int8')

    def _output(self, memory, node, number, variable, storage, shapes):
        """Return the array of an output: a view, the array of an input that is overwritten, or a new one."""
        op, shape = node.op, self._shape(variable, shapes)
        source = [*(getattr(op, 'destroy_map', None) or {}).get(number, ()),
                  *(getattr(op, 'view_map', None) or {}).get(number, ())]
        array = storage.get(node.inputs[source[0]]) if source else None
        if array is not None:
            make = next((make for cls, make in VIEWS.items() if isinstance(op, cls)), _same_strides)
            view = make(node, array, shape)
            if view is not None:
                return view
        if variable in self._outer:
            return None  # memory of the caller, that counts there
        return memory.array(shape, variable.dtype)

    def _shape(self, variable, shapes):
        if shapes.of[variable] is None:
            raise UnknownShape('%s, of %s' % (variable, variable.owner))
        return shapes.of[variable]

    def _scan(self, memory, node, storage, shapes):
        """Take the memory of a scan: its results, and the values of one step, which stay until it ends."""
        op, inputs = node.op, node.inputs
        destroyed = getattr(op, 'destroy_map', None) or {}
        for number, variable in enumerate(node.outputs):
            if isinstance(variable.type, self._type):
                source = storage.get(inputs[destroyed[number][0]]) if number in destroyed else None
                storage[variable] = source or memory.array(self._shape(variable, shapes), variable.dtype)
        sources = _inner_inputs(op)
        numbers = [i for i, (outer, is_step) in enumerate(sources) if not is_step and inputs[outer] in shapes.numbers]
        inner = self._inner(op, numbers)
        given = [shapes.numbers[inputs[outer]] if i in numbers else
                 (shapes.of[inputs[outer]] or ())[1 if is_step else 0:] for i, (outer, is_step) in enumerate(sources)]
        arguments, kept, before = [storage.get(inputs[outer]) for outer, _ in sources], {}, None
        for _ in range(INNER_STEPS):
            before = inner.run(memory, arguments, [], inner.shapes(given), kept)
        del before

    def _inner(self, op, numbers):
        """Return the dry run of a scan's step."""
        if op not in self._scans:
            n_mit_mot = op.n_mit_mot_outs - sum(op.mitmots_preallocated)
            n_written = op.n_mit_sot + op.n_sit_sot + op.n_nit_sot
            is_preallocated = theano.config.scan.allow_output_prealloc
            self._scans[op] = DryFunction(op.fn, self.kind, numbers, len(op.fn.maker.fgraph.inputs),
                                          [False] * n_mit_mot + [is_preallocated] * n_written)
        return self._scans[op]


def order_of(function: Any, conditions: Mapping[theano.Variable, int | None] = {}) -> list[Apply]:
    """Return the ops of a compiled function in the order in which they run.

    Theano's virtual machine in C computes all ops of the first output, then those that the second one needs, too, and
    so on. Each op has its inputs computed first, in order. The machines in Python follow a list.

    Parameters
    ----------
    function : theano.compile.function_module.Function
    conditions : dict of theano.Variable to (int or None)
        The known values of the conditions of IfElse ops. One branch is computed; both if the condition is not known.
    """
    graph = function.maker.fgraph
    if type(function.fn).__name__ != 'CVM':
        return list(graph.toposort())
    before, done, order = graph.orderings(), set(), []
    stack = [output.owner for output in reversed(graph.outputs) if output.owner]
    while stack:
        node = stack[-1]
        if node in done:
            stack.pop()
            continue
        needed = [each for each in before.get(node, ()) if each not in done]
        needed += [v.owner for v in _read(node, conditions) if v.owner and v.owner not in done]
        if needed:
            stack.append(needed[0])
        else:
            done.add(node)
            order.append(stack.pop())
    return order


def _read(node: Apply, conditions: Mapping[theano.Variable, int | None]) -> Sequence[theano.Variable]:
    """Return the inputs that a node needs, in the order in which they are computed."""
    if not isinstance(node.op, IfElse):
        return node.inputs
    condition = node.inputs[0]
    return node.inputs if conditions.get(condition) is None else [condition, *_taken(node, conditions[condition])]


def _taken(node: Apply, condition: int | None) -> Sequence[theano.Variable]:
    """Return the inputs of an IfElse that its outputs are, for a condition; for None, the first branch."""
    n = node.op.n_outs
    return node.inputs[1:1 + n] if condition is None or condition else node.inputs[1 + n:]


def _freed_after(nodes: Sequence[Apply], outputs: Sequence[theano.Variable],
                 allow_gc: bool) -> list[list[theano.Variable]]:
    """Return the values that are freed after each node: those that every reader has read.

    A value with a reader that does not run, in a branch that is not taken, stays.
    """
    freed: list[list[theano.Variable]] = [[] for _ in nodes]
    last = {variable: i for i, node in enumerate(nodes) for variable in node.inputs}
    ran, kept = set(nodes), set(outputs)
    for variable, i in last.items() if allow_gc else ():
        if variable.owner and variable not in kept and all(reader in ran for reader, _ in variable.clients):
            freed[i].append(variable)
    return freed


def _known(value: Any) -> Any:
    """Return the value of a shared variable if it is small and on the host, or else its shape."""
    if isinstance(value, np.ndarray) and value.size <= SMALL and value.dtype.kind in 'iub':
        return value
    return tuple(getattr(value, 'shape', ()))


# --- views

def _same_strides(node, array, shape):
    """Return an array as it is, or a part of it, such as of a Split."""
    return array.view(shape, array.strides) if len(shape) == len(array.shape) else array.part(shape)


def _shuffled(node, array, shape):
    strides = tuple(0 if axis == 'x' else array.strides[axis] for axis in node.op.new_order)
    return array.view(shape, strides)


def _part(node, array, shape):
    """Return a view of the part of an array that a Subtensor takes."""
    index = list(get_idx_list(node.inputs, node.op.idx_list))
    index += [slice(None)] * (len(array.shape) - len(index))
    strides = [stride * _step(each) for each, stride in zip(index, array.strides) if isinstance(each, slice)]
    return array.view(shape, strides)


def _step(each):
    step = getattr(each.step, 'data', each.step)
    return 1 if step is None or isinstance(step, theano.Variable) else int(step)


VIEWS: dict[Any, Callable[[Apply, Array, Any], Array | None]] = {
    DimShuffle: _shuffled,
    Subtensor: _part,
    Reshape: lambda node, array, shape: array.reshaped(shape),
    basic_ops.GpuContiguous: lambda node, array, shape: array if array.is_contiguous else None}


# --- workspaces

def workspace(node: Apply, storage: Mapping[theano.Variable, Any], shapes: Shapes) -> int:
    """Return the bytes that an op takes while it runs, beside its inputs and outputs."""
    rule = next((rule for cls, rule in WORKSPACES.items() if isinstance(node.op, cls)), None)
    return rule(node, storage, shapes) if rule else 0


def _columns(image, kernel, top):
    """Return the bytes of the columns that one sample of a convolution is copied to."""
    def rule(node, storage, shapes):
        images, weights, results = ([*node.inputs, *node.outputs][i] for i in (image, kernel, top))
        n_axes, of = images.ndim - 2, shapes.of
        return int(np.prod([of[images][1], *of[weights][-n_axes:], *of[results][2:]], dtype='int64')
                   ) * np.dtype(images.dtype).itemsize
    return rule


def _contiguous_copy(node, storage, shapes):
    """Return the bytes of an array that is made contiguous on the device before it is fetched."""
    array = storage.get(node.inputs[0])
    return 0 if array is None or array.is_contiguous else array.nbytes


WORKSPACES: dict[Any, Callable[[Apply, Mapping[Any, Any], Shapes], int]] = {
    blas.GpuCorrMM: _columns(0, 1, -1), blas.GpuCorr3dMM: _columns(0, 1, -1),
    blas.GpuCorrMM_gradWeights: _columns(0, -1, 1), blas.GpuCorr3dMM_gradWeights: _columns(0, -1, 1),
    blas.GpuCorrMM_gradInputs: _columns(-1, 0, 1), blas.GpuCorr3dMM_gradInputs: _columns(-1, 0, 1),
    basic_ops.HostFromGpu: _contiguous_copy}


# --- scans

def _inner_inputs(op: Scan) -> list[tuple[int, bool]]:
    """Return for each input of a scan's step the outer input that it comes from, and whether it is a step of it."""
    outer = 1
    result: List[Any] = []
    for _ in range(op.n_seqs):
        result.append((outer, True))
        outer += 1
    for taps in op.tap_array:
        result += [(outer, True)] * len(taps)
        outer += 1
    for _ in range(op.n_shared_outs):
        result.append((outer, False))
        outer += 1
    outer += op.n_nit_sot
    n_others = len(op.inputs) - len(result)
    return result + [(outer + i, False) for i in range(n_others)]

