"""One optimised graph for all contexts on devices of one type: optimised once, linked for each context."""
import copy
from collections import namedtuple

import theano
from theano.compile.builders import OpFromGraph
from theano.compile.function_module import FunctionMaker, orig_function
from theano.compile.ops import deep_copy_op
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import Apply, ancestors, io_toposort
from theano.gpuarray.basic_ops import HostFromGpu, as_gpuarray_variable
from theano.gpuarray.type import GpuArrayConstant, GpuArrayType
from theano.scan_module.scan_op import Scan

from ..devices.contexts import compiling_for, gpu_context

Optimised = namedtuple('Optimised', 'maker context replicas')
Optimised.__doc__ = """What Theano has made of a graph for one context, with that context's replicas."""


class CannotRetarget(Exception):
    """A graph cannot be moved to another context; the text says why."""


def optimise(context, inputs, outputs, replicas, mode, name=None):
    """Optimise a graph on one context.

    Parameters
    ----------
    context : Context
    inputs, outputs : list of theano.Variable
        On that context.
    replicas : dict of SharedVariable to SharedVariable
        What the user's shared variables are on it.
    mode : theano.Mode
    name : str, optional

    Returns
    -------
    Optimised
    """
    given = [theano.In(variable) for variable in inputs]
    given += [_shared_input(variable) for variable in dict.fromkeys(ancestors(outputs))
              if isinstance(variable, SharedVariable)]
    maker = FunctionMaker(given, [theano.Out(output) for output in outputs], mode, on_unused_input='ignore', name=name)
    return Optimised(maker, context, replicas)


def link(optimised, context, replicas, name=None):
    """A function on a context, of a graph that was optimised for a context on a device of the same type.

    The graph is built anew with the same ops on variables of the context, and linked; nothing is optimised a second
    time, which is most of what a compilation costs. The same ops run on the same values, so that results are
    bitwise those of compiling for that context.

    Parameters
    ----------
    optimised : Optimised
    context : Context
        See `contexts.alike`.
    replicas : dict of SharedVariable to SharedVariable
        As for `optimise`: those on `context`.
    name : str, optional

    Returns
    -------
    theano.compile.function_module.Function
        An input on the device that ops of the host need is an input on the host instead.

    Raises
    ------
    CannotRetarget
        If an op holds something of its context that is not understood: an inner graph on a GPU.
    """
    maker = optimised.maker
    others = {own.container: replicas[variable] for variable, own in optimised.replicas.items()}
    move = _Move(optimised.context, context)
    inputs = []
    for given, variable in zip(maker.inputs, maker.fgraph.inputs):
        if given.value is None:
            inputs.append(theano.In(move.input(maker.fgraph, variable)))
        else:
            inputs.append(_shared_input(others.get(given.value, given.variable)))
        move.variables.setdefault(variable, inputs[-1].variable)
    outputs = [theano.Out(output, borrow=spec.borrow)
               for output, spec in zip(move.outputs(maker.fgraph), maker.outputs)]
    with compiling_for(context):
        return orig_function(inputs, outputs, mode=theano.Mode(linker=maker.mode.provided_linker, optimizer=None),
                             accept_inplace=True, name=name, profile=_profile(name), on_unused_input='ignore')


def _shared_input(replica):
    """As `theano.function` makes it of a shared variable."""
    return theano.In(replica, value=replica.container, borrow=True, implicit=True, shared=True)


def _profile(name):
    return theano.compile.ProfileStats(message=name) if theano.config.profile else None


class _Move:
    """Builds a graph anew, node by node, on another context.

    Attributes
    ----------
    variables : dict of theano.Variable to theano.Variable
        What each variable has become.
    """

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.variables = {}

    def input(self, fgraph, variable):
        """An input of the function: where it was, but on the host if it is copied there from the device."""
        to_host = [client.outputs[0] for client, _ in variable.clients
                   if client != 'output' and isinstance(client.op, HostFromGpu)]
        if not to_host:
            return self._type(variable.type)(variable.name)
        here = to_host[0].type(variable.name)
        if len(to_host) < len(variable.clients):
            self.variables[variable] = as_gpuarray_variable(here, self.target.name)
        # Who works in place has had an array of its own; what the caller gives must not change.
        self.variables.update((output, deep_copy_op(here) if fgraph.has_destroyers([output]) else here)
                              for output in to_host)
        return here

    def outputs(self, fgraph):
        """Build all nodes; returns the outputs."""
        return self._build(fgraph.toposort(), fgraph.outputs)

    def _build(self, nodes, outputs):
        for node in nodes:
            if node.outputs[0] in self.variables:
                continue
            results = [self._type(output.type)(output.name) for output in node.outputs]
            Apply(self._op(node.op), [self._variable(variable) for variable in node.inputs], results)
            self.variables.update(zip(node.outputs, results))
        return [self._variable(output) for output in outputs]

    def _variable(self, variable):
        if variable not in self.variables:  # a constant
            moved = variable
            if isinstance(variable, GpuArrayConstant):
                data = variable.data.transfer(gpu_context(self.target))
                moved = GpuArrayConstant(self._type(variable.type), data, variable.name)
            self.variables[variable] = moved
        return self.variables[variable]

    def _type(self, type_):
        if not isinstance(type_, GpuArrayType):
            return type_
        self._check(type_.context_name)
        return GpuArrayType(type_.dtype, type_.broadcastable, context_name=self.target.name, name=type_.name)

    def _op(self, op):
        """The op itself, or a copy of it that names the other context."""
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
        """A scan whose inner graph is on the other context."""
        inner = _Move(self.source, self.target)
        moved = copy.copy(op)
        moved.inputs = [self._type(variable.type)(variable.name) for variable in op.inputs]
        inner.variables.update(zip(op.inputs, moved.inputs))
        moved.outputs = inner._build(io_toposort(op.inputs, op.outputs), op.outputs)
        moved.output_types = [self._type(type_) for type_ in op.output_types]
        return moved

    def _check(self, name):
        if name != self.source.name and self.source != self.target:
            raise CannotRetarget('context %s is named in a graph of context %s' % (name, self.source.name))
