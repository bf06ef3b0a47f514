"""A compiled function for another context of the same model of device, without optimising its graph again."""
import copy

import theano
from theano.compile.builders import OpFromGraph
from theano.compile.function_module import orig_function
from theano.gof.graph import Apply
from theano.gpuarray.type import GpuArrayConstant, GpuArrayType
from theano.scan_module.scan_op import Scan

from .contexts import compiling_for, gpu_context


class CannotRetarget(Exception):
    """A graph cannot be moved to another context; the text says why."""


def retarget(function, context, replicas, name=None):
    """The same function on another context.

    The graph that Theano has optimised is built anew with the same ops on variables of the other context, and
    linked; nothing is optimised a second time, which is most of what a compilation costs. The same ops run on the same
    values, so that results are bitwise those of compiling for that context.

    Parameters
    ----------
    function : theano.compile.function_module.Function
        Compiled by `graph.compile_for`.
    context : Context
        Of the same model of device as the function's own, see `contexts.alike`.
    replicas : dict of SharedVariable to SharedVariable
        As for `graph.compile_for`: those on `context`.
    name : str, optional

    Returns
    -------
    theano.compile.function_module.Function

    Raises
    ------
    CannotRetarget
        If an op holds something of its context that is not understood: an inner graph on a GPU.
    """
    maker = function.maker
    if type(maker.mode) is not theano.Mode:
        raise CannotRetarget('the mode %s may keep things of its own' % type(maker.mode).__name__)
    others = {own.container: replicas[variable] for variable, own in function.mgpu_replicas.items()}
    move = _Move(function.mgpu_context, context)
    inputs = []
    for given, variable in zip(maker.inputs, maker.fgraph.inputs):
        replica = others[given.value] if given.value is not None else None
        inputs.append(_input(variable, replica))
        move.variables[variable] = inputs[-1].variable
    outputs = [theano.Out(output, borrow=spec.borrow)
               for output, spec in zip(move.outputs(maker.fgraph), maker.outputs)]
    mode = theano.Mode(linker=maker.mode.provided_linker, optimizer=None)
    with compiling_for(context):
        return orig_function(inputs, outputs, mode=mode, accept_inplace=True, name=name, on_unused_input='ignore')


def _input(variable, replica):
    """As `theano.function` makes them of explicit inputs, and of shared variables."""
    if replica is None:
        return theano.In(variable.type(variable.name))
    return theano.In(replica, value=replica.container, borrow=True, implicit=True, shared=True)


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

    def outputs(self, fgraph):
        for node in fgraph.toposort():
            results = [self._type(output.type)(output.name) for output in node.outputs]
            Apply(self._op(node.op), [self._variable(variable) for variable in node.inputs], results)
            self.variables.update(zip(node.outputs, results))
        return [self._variable(output) for output in fgraph.outputs]

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
        if isinstance(op, (Scan, OpFromGraph)) and self.source.kind != 'cpu':
            inner = op.outputs if isinstance(op, Scan) else op.local_outputs
            if any(isinstance(v.type, GpuArrayType) for v in theano.gof.graph.ancestors(inner)):
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

    def _check(self, name):
        if name != self.source.name:
            raise CannotRetarget('context %s is named in a graph of context %s' % (name, self.source.name))
