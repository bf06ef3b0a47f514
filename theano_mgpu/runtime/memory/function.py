"""A dry run of a compiled function: the order of its ops, and the memory that each takes and frees."""
from __future__ import annotations

from typing import Any, Collection, Dict, Mapping, Sequence

import numpy as np
import theano
from theano.gof.graph import Apply
from theano.gpuarray import basic_ops, dnn
from theano.gpuarray.type import GpuArrayType
from theano.ifelse import IfElse
from theano.scan_module.scan_op import Scan
from theano.tensor import DimShuffle, Reshape, Subtensor, TensorType

from .arrays import Array, Memory, Shape
from .shapes import Shapes, content, taken

Storage = Dict[theano.Variable, Any]  # of arrays; None for a value that is not on the device


class DryFunction:
    """A function that was compiled by Theano for a context, without its computation.

    On a context of the `kind` ``cpu`` alone, values in the host's memory count. Results with a number in `outer` are
    written where the caller has memory for them, as a scan has.
    """

    def __init__(self, function: Any, kind: str, outer: Collection[int] = ()) -> None:
        self._graph = graph = function.maker.fgraph
        self._kind, self._type = kind, TensorType if kind == 'cpu' else GpuArrayType
        self._is_lazy, self._allow_gc = type(function.fn).__name__ == 'CVM', getattr(function.fn, 'allow_gc', False)
        self._outer = {graph.outputs[i] for i in outer}
        self._conditions = [node.inputs[0] for node in graph.apply_nodes if isinstance(node.op, IfElse)]
        self._steps_for: dict[Any, Any] = {}
        self._symbolic: dict[theano.Variable, Any] = {}
        self._shapes: dict[Any, Shapes] = {}
        self._scans: dict[Scan, DryFunction] = {}
        self.has_dnn = any(isinstance(node.op, dnn.DnnBase) for node in graph.apply_nodes)
        self.constants = sum(each.data.size * each.data.itemsize for each in graph.variables
                             if isinstance(each, theano.Constant) and isinstance(each.type, self._type))

    def run(self, memory: Memory, host: Memory, given: Sequence[Any], kept: Storage) -> list[Any]:
        """Take and free memory as a call does, and return the results: arrays of NumPy where the values are known.

        Parameters
        ----------
        memory, host : Memory
            Of the device, and for results on the host.
        given : list of (Array or ndarray)
            All inputs, shared variables, too.
        kept : dict of theano.Variable to Array
            What earlier calls have left.
        """
        inputs = dict(zip(self._graph.inputs, given))
        key = tuple((getattr(each, 'shape', ()), None if number is None else np.asarray(number).tobytes())
                    for each, number in zip(given, map(content, given)))
        shapes = self._shapes[key] = self._shapes.get(key) or Shapes(self._symbolic, inputs)
        storage = kept
        storage.update((variable, each if isinstance(each, Array) and each.memory is memory else None)
                       for variable, each in inputs.items())
        for node, freed in self._steps(shapes):
            storage.update(dict.fromkeys(node.outputs))  # memory of an earlier call is used again
            self._compute(memory, node, storage, shapes)
            storage.update(dict.fromkeys(freed))
        results = [self._result(host, variable, storage.get(variable), shapes) for variable in self._graph.outputs]
        storage.update(dict.fromkeys([*inputs, *(self._graph.outputs if self._allow_gc else ())]))
        return results

    def _result(self, host, variable, array, shapes):
        value = shapes.number(variable)
        if array is not None:
            return array.view(array.shape, array.is_contiguous, value)
        return host.array(shapes.of(variable), getattr(variable, 'dtype', 'int8')) if value is None else value

    def _compute(self, memory, node, storage, shapes):
        """Put the outputs of a node into the storage."""
        if isinstance(node.op, IfElse):
            for source, variable in zip(taken(node, shapes.number(node.inputs[0])), node.outputs):
                array = storage.get(source)
                storage[variable] = array if array is None or node.op.as_view else \
                    memory.array(array.shape, array.dtype)
            return
        for number, variable in enumerate(node.outputs):
            if isinstance(variable.type, self._type):
                storage[variable] = self._output(memory, node, number, variable, storage, shapes)
        if isinstance(node.op, Scan):
            self._loop(memory, node, storage, shapes)
    def _output(self, memory, node, number, variable, storage, shapes):
        """Return the array of an output: a view, the array of an input that is overwritten, or a new one."""
        shape = shapes.of(variable)
        sources = {**(getattr(node.op, 'view_map', None) or {}), **(getattr(node.op, 'destroy_map', None) or {})}
        array = storage.get(node.inputs[sources[number][0]]) if sources.get(number) else None
        is_copy = isinstance(node.op, basic_ops.GpuContiguous) or isinstance(node.op, Reshape) and \
            array is not None and shape != array.shape
        if array is not None and (array.is_contiguous or not is_copy):
            return array.view(shape, array.is_contiguous and _keeps_order(node.op, array.shape, shape))
        return None if variable in self._outer else memory.array(shape, variable.dtype)

    def _loop(self, memory, node, storage, shapes):
        """Take the memory of a scan's steps: the values of one step stay until it ends."""
        op, sources = node.op, node.op.get_oinp_iinp_iout_oout_mappings()['outer_inp_from_inner_inp']
        first_whole = 1 + op.n_seqs + len(op.tap_array)  # of the inputs that are not taken step by step
        if op not in self._scans:
            n_mit_mot = op.n_mit_mot_outs - sum(op.mitmots_preallocated)
            n_written = op.n_mit_sot + op.n_sit_sot + op.n_nit_sot if theano.config.scan.allow_output_prealloc else 0
            self._scans[op] = DryFunction(op.fn, self._kind, range(n_mit_mot, n_mit_mot + n_written))
        given: list[Any] = []
        for i in sorted(sources):
            variable, array = node.inputs[sources[i]], storage.get(node.inputs[sources[i]])
            is_step = sources[i] < first_whole
            number = None if is_step or array is not None else shapes.number(variable)
            array = array or Memory().array(shapes.of(variable), getattr(variable, 'dtype', 'int8'))
            given.append(array.view(array.shape[is_step:], array.is_contiguous) if number is None else number)
        self._scans[op].run(memory, Memory(), given, {})

    def _steps(self, shapes):
        """Return the ops that run, each with the values that are freed after it: those that every reader has read.

        Theano's virtual machine in C computes all ops of the first output, then those that the second one needs, too,
        and so on. Each op has its inputs computed first, in order; of an IfElse, one branch, or both if the condition
        is not known. The machines in Python follow a list. A value with a reader that does not run stays.
        """
        conditions = {each: shapes.number(each) for each in self._conditions}
        key = tuple(None if each is None else bool(each) for each in conditions.values())
        if key in self._steps_for:
            return self._steps_for[key]
        graph, before = self._graph, self._graph.orderings()
        order: dict[Apply, None] = {}
        stack = [output.owner for output in reversed(graph.outputs)] if self._is_lazy else graph.toposort()[::-1]
        while stack:
            node = stack[-1]
            needed = [] if node is None or node in order else \
                [each for each in [*before.get(node, ()), *_owners(node, conditions)] if each not in order]
            if needed:
                stack.append(needed[0])
            elif stack.pop() is not None:
                order[node] = None
        last = {variable: node for node in order for variable in node.inputs}
        freed: dict[Apply, list[theano.Variable]] = {node: [] for node in order}
        kept = set(graph.outputs)
        for variable, node in last.items() if self._allow_gc else ():
            if variable.owner and variable not in kept and all(reader in order for reader, _ in variable.clients):
                freed[node].append(variable)
        self._steps_for[key] = list(freed.items())
        return self._steps_for[key]


def _owners(node: Apply, conditions: Mapping[theano.Variable, Any]) -> list[Apply]:
    """Return the ops whose results a node needs, in the order in which they are computed."""
    read = node.inputs
    if isinstance(node.op, IfElse) and conditions[node.inputs[0]] is not None:
        read = [node.inputs[0], *taken(node, conditions[node.inputs[0]])]
    return [variable.owner for variable in read if variable.owner]


def _keeps_order(op: theano.Op, before: Shape, after: Shape) -> bool:
    """Return whether a view of a C-contiguous array is C-contiguous, too; of a part, if it has whole rows."""
    if isinstance(op, DimShuffle):
        axes = [axis for axis in op.new_order if axis != 'x' and before[axis] > 1]
        return axes == sorted(axes)
    if isinstance(op, Subtensor) and op.idx_list:
        return getattr(op.idx_list[0], 'step', None) is None and after in (before[1:], (*after[:1], *before[1:]))
    return True
