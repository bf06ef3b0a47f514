"""OpFromGraph: an op that is made of a graph."""
import theano
from theano.compile.builders import OpFromGraph
from theano.gof.graph import io_toposort

from ..patches.placement_tags import place_of_node, placed_on


def inlined(outputs):
    """Graphs with the inner graph of each OpFromGraph in its place, and so with that of its gradient."""
    found = {}
    nodes = io_toposort([], outputs)
    if not any(isinstance(node.op, OpFromGraph) for node in nodes):
        return list(outputs)
    for node in nodes:
        inputs = [found.get(variable, variable) for variable in node.inputs]
        with placed_on(place_of_node(node)):
            if isinstance(node.op, OpFromGraph):
                found.update(zip(node.outputs, inner_graph(node, inputs)))
            elif inputs != node.inputs:
                found.update(zip(node.outputs, node.clone_with_new_inputs(inputs).outputs))
    return inlined([found.get(output, output) for output in outputs])  # inner graphs may have such ops, too


def inner_graph(node, inputs):
    """The outputs of an OpFromGraph, or of its gradient, as expressions of inputs."""
    return theano.clone(node.op.local_outputs, dict(zip(node.op.local_inputs, inputs)))
