"""One optimised graph for all contexts on devices of one type: optimised once, linked for each context."""
from __future__ import annotations

import copy
from typing import Any, NamedTuple

import theano
from theano.compile.builders import OpFromGraph
from theano.compile.function_module import FunctionMaker, orig_function
from theano.compile.ops import Shape_i, deep_copy_op
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import Apply, ancestors, io_toposort
from theano.gof.vm import VM_Linker
from theano.gpuarray.basic_ops import HostFromGpu, as_gpuarray_variable
from theano.gpuarray.type import GpuArrayConstant, GpuArrayType
from theano.scan_module.scan_op import Scan

from ..devices.context_map import Context
from ..devices.theano_contexts import compiling_for
from ..devices.transfers import copy_to
from ..graph.layers import timed
from ..graph.traces import KEEP_LINES, keep_trace


class Optimised(NamedTuple):
    """A graph as Theano has optimised it for one context, with the replicas of that context."""

    maker: FunctionMaker
    context: Context
    replicas: dict[SharedVariable, SharedVariable]


class CannotRetarget(Exception):
    """A graph cannot be moved to another context; the text says why."""


def optimise(context: Context, inputs: list[theano.Variable], outputs: list[theano.Variable],
             replicas: dict[SharedVariable, SharedVariable], mode: theano.Mode, name: str | None = None) -> Optimised:
    """Optimise a graph, with replicas of the shared variables, on one context."""
    specs = [theano.In(variable) for variable in inputs]
    specs += [_shared_input(variable) for variable in dict.fromkeys(ancestors(outputs))
              if isinstance(variable, SharedVariable)]
    maker = FunctionMaker(specs, [theano.Out(output) for output in outputs], mode.register(KEEP_LINES),
                          on_unused_input='ignore', name=name)
    return Optimised(maker, context, replicas)


def link(optimised: Optimised, context: Context, replicas: dict[SharedVariable, SharedVariable],
         name: str | None = None) -> Any:
    """Link a graph on a context; it was optimised for a context on a device of the same type.

    The graph is built anew with the same ops on variables of the context, and linked; nothing is optimised a second
    time, which is most of the cost of a compilation. The same ops run on the same values, so that results are bitwise
    the same as after a compilation for that context. An input on the device that ops of the host need is an input on
    the host instead. Raise a CannotRetarget if an op holds something of its context that is not understood: an inner
    graph on a GPU.
    """
    maker = optimised.maker
    others = {own.container: replicas[variable] for variable, own in optimised.replicas.items()}
    move = _Move(optimised.context, context)
    inputs = []
    for spec, variable in zip(maker.inputs, maker.fgraph.inputs):
        if spec.value is None:
            inputs.append(theano.In(move.input(maker.fgraph, variable)))
        else:
            inputs.append(_shared_input(others.get(spec.value, spec.variable)))
        move.variables.setdefault(variable, inputs[-1].variable)
    outputs = [theano.Out(output, borrow=spec.borrow)
               for output, spec in zip(move.build(maker.fgraph.toposort(), maker.fgraph.outputs), maker.outputs)]
    profile = theano.compile.ProfileStats(message=name) if theano.config.profile else None
    mode = timed(theano.Mode(linker=copy.copy(maker.mode.linker), optimizer=None), name, context.name)
    if context.kind == 'cpu' and profile is None and theano.config.allow_gc:
        mode.function_maker = _Maker
    with compiling_for(context):
        function = orig_function(inputs, outputs, mode=mode, accept_inplace=True, name=name, profile=profile,
                                 on_unused_input='ignore')
    function.mgpu_optimised = optimised
    return function


class _Maker(FunctionMaker):
    """A maker of functions that may write outputs to the arrays that a caller has put in their storage.

    Theano empties the storage first. What calls the function has to empty it afterwards.
    """

    def create(self, *args, **kwargs):
        if isinstance(self.linker, VM_Linker):
            self.linker.no_recycling = [each for each in self.linker.no_recycling if each not in self.fgraph.outputs]
        return super().create(*args, **kwargs)


def _shared_input(replica):
    """Return an input as `theano.function` makes it of a shared variable."""
    return theano.In(replica, value=replica.container, borrow=True, implicit=True, shared=True)


class _Move:
    """A move of a graph to another context, node by node.
    """

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.variables = {}

    def input(self, fgraph, variable):
        """Return an input of the function: where it was, but on the host if it is copied there from the device."""
        to_host = [client.outputs[0] for client, _ in variable.clients
                   if client != 'output' and isinstance(client.op, HostFromGpu)]
        if not to_host:
            return self._new(variable)
        here = to_host[0].type(variable.name)
        if len(to_host) < len(variable.clients):
            self.variables[variable] = as_gpuarray_variable(here, self.target.name)
        # An op that works in place needs a copy: the caller's array must not change. FAST_COMPILE has no such ops.
        works_in_place = getattr(fgraph, 'has_destroyers', lambda variables: False)
        self.variables.update((output, deep_copy_op(here) if works_in_place([output]) else here) for output in to_host)
        return here

    def build(self, nodes, outputs):
        """Move all nodes, and return the new outputs."""
        for node in nodes:
            if node.outputs[0] in self.variables:
                continue
            results, inputs = list(map(self._new, node.outputs)), list(map(self._variable, node.inputs))
            if isinstance(node.op, Shape_i):  # Theano copies a value to the host for its shape
                inputs = [each.owner.inputs[0] if each.owner and isinstance(each.owner.op, HostFromGpu) else each
                          for each in inputs]
            Apply(self._op(node.op), inputs, results)
            self.variables.update(zip(node.outputs, results))
        return [self._variable(output) for output in outputs]

    def _new(self, variable):
        new = self._type(variable.type)(variable.name)
        keep_trace([new], variable)
        return new

    def _variable(self, variable):
        if variable not in self.variables:  # a constant
            moved = variable
            if isinstance(variable, GpuArrayConstant):
                data = copy_to(self.target, variable.data)
                moved = GpuArrayConstant(self._type(variable.type), data, variable.name)
            self.variables[variable] = moved
        return self.variables[variable]

    def _type(self, type_):
        if not isinstance(type_, GpuArrayType):
            return type_
        self._check(type_.context_name)
        return GpuArrayType(type_.dtype, type_.broadcastable, context_name=self.target.name, name=type_.name)

    def _op(self, op):
        """Return the op itself, or a copy of it that names the other context."""
        if self.source == self.target:
            return op
        if isinstance(op, Scan) and self.source.kind != 'cpu':
            return self._scan(op)
        if isinstance(op, OpFromGraph) and any(isinstance(variable.type, GpuArrayType)
                                               for variable in ancestors(op.local_outputs)):
            raise CannotRetarget('%s has an inner graph on its context' % op)
        changed = {name: self._type(value) for name, value in vars(op).items() if isinstance(value, GpuArrayType)}
        if hasattr(op, 'context_name'):
            self._check(op.context_name)
            changed['context_name'] = self.target.name
        if not changed:
            return op
        moved = copy.copy(op)
        vars(moved).update(changed)
        return moved

    def _scan(self, op):
        """Return a scan whose inner graph is on the other context."""
        inner = _Move(self.source, self.target)
        moved = copy.copy(op)
        moved.inputs = [self._type(variable.type)(variable.name) for variable in op.inputs]
        inner.variables.update(zip(op.inputs, moved.inputs))
        moved.outputs = inner.build(io_toposort(op.inputs, op.outputs), op.outputs)
        moved.output_types = [self._type(type_) for type_ in op.output_types]
        return moved

    def _check(self, name):
        if name != self.source.name and self.source != self.target:
            raise CannotRetarget('context %s is named in a graph of context %s' % (name, self.source.name))
