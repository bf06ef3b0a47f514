"""Theano graphs as TensorBoard draws them: a GraphDef of TensorFlow's format."""
from __future__ import annotations

import re
from collections import Counter
from typing import Any, Sequence

import theano
from tensorboardX.proto.attr_value_pb2 import AttrValue
from tensorboardX.proto.graph_pb2 import GraphDef
from tensorboardX.proto.node_def_pb2 import NodeDef
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.proto.types_pb2 import DataType
from theano.gof.graph import ancestors, io_toposort

from ...errors import MgpuError, named

DATA_TYPES = {'float16': 'DT_HALF', 'float32': 'DT_FLOAT', 'float64': 'DT_DOUBLE'}  # others: DT_INT8, DT_BOOL ...


def graph_def(graph: Any, scopes: Sequence[tuple[str, Any]] = ()) -> GraphDef:
    """Return a GraphDef of an expression or a function; arguments as for `Summary.graph`.

    Returns
    -------
    tensorboardX.proto.graph_pb2.GraphDef
    """
    if isinstance(graph, theano.Variable):
        graph = [graph]
    nodes = _Nodes()
    if isinstance(graph, (list, tuple)):
        for scope, outputs in scopes:
            nodes.add(outputs, scope)
        nodes.add(graph)
    else:
        for function in _compiled(graph):
            context = getattr(function, 'mgpu_context', None)
            nodes.add(function.maker.fgraph.outputs, context and context.name, context and context.device)
    return GraphDef(node=nodes.defs)


def _compiled(function):
    """Return the compiled functions that one consists of."""
    functions = getattr(function, 'functions', [function])
    if not all(isinstance(each, theano.compile.function_module.Function) for each in functions):
        raise MgpuError('graph: %s was given; give Theano variables, or what theano.function, mgpu.function or '
                        'mgpu.training_function returned' % named(function))
    return functions


class _Nodes:
    """Nodes of Theano graphs, under names that are unique."""

    def __init__(self):
        self.defs = []
        self._of = {}           # variable -> the name of the node that makes it
        self._names = Counter()

    def add(self, outputs: Any, scope: str | None = None, device: str | None = None) -> None:
        """Add the nodes that outputs need, and that are not there yet."""
        for variable in ancestors(outputs):
            if variable.owner is None and variable not in self._of:
                kind = ('Const' if isinstance(variable, theano.Constant) else
                        'Variable' if hasattr(variable, 'container') else 'Placeholder')
                name = None if kind == 'Const' else variable.name
                self._add([variable], name or kind, kind, scope, device)
        for node in io_toposort([], outputs):
            if node.outputs[0] not in self._of:
                self._add(node.outputs, _short(node.op), str(node.op), scope, device,
                          [self._of[variable] for variable in node.inputs])

    def _add(self, outputs, name, op, scope, device, inputs=()):
        name = self._unique('/'.join(re.sub(r'[^\w.-]+', '_', part).strip('_') or 'node'
                                     for part in ([scope] if scope else []) + [name]))
        for i, variable in enumerate(outputs):
            self._of[variable] = name + ':%d' % i * bool(i)
        types = [variable.type for variable in outputs]
        node = NodeDef(name=name, op=op, input=inputs, device=device or getattr(types[0], 'context_name', None) or '')
        dtype = getattr(types[0], 'dtype', '')
        dtype = DATA_TYPES.get(dtype, 'DT_' + dtype.upper())
        if dtype in DataType.keys():  # the format has no uint32 and no uint64
            node.attr['dtype'].CopyFrom(AttrValue(type=DataType.Value(dtype)))
        node.attr['_output_shapes'].CopyFrom(AttrValue(list=AttrValue.ListValue(shape=[_shape(t) for t in types])))
        self.defs.append(node)

    def _unique(self, name):
        """Return the name, with a number if it is taken."""
        unique = name
        while self._names[unique]:
            self._names[name] += 1
            unique = '%s_%d' % (name, self._names[name] - 1)
        self._names[unique] += 1
        return unique


def _short(op):
    """Return a word for an op: the name of the scalar op, if it is elementwise."""
    words = re.findall(r'\w+', str(op)) or [type(op).__name__]
    return words[1] if words[0] in ('Elemwise', 'GpuElemwise') and len(words) > 1 else words[0]


def _shape(kind):
    """Return the shape of a type; the length of an axis is known where it is broadcast."""
    broadcast = getattr(kind, 'broadcastable', None)
    if broadcast is None:
        return TensorShapeProto(unknown_rank=True)
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=1 if one else -1) for one in broadcast])
