"""Compute nothing twice."""
import theano
from theano.gof.graph import io_toposort

from ..patches.placement_tags import place_of_node, placed_on


def merged(outputs):
    """A graph in which no op is computed twice on a place.

    What stands twice would be exchanged, and carried from stage to stage, twice. Gradients have ops of their own for
    values of the forward pass, such as the tanh in ``1 - tanh(x) ** 2``.

    Parameters
    ----------
    outputs : list of theano.Variable

    Returns
    -------
    list of theano.Variable
        Nodes above which nothing stands twice are those of the graph that was given.
    """
    found, constants, firsts = {}, {}, {}
    for node in io_toposort([], outputs):
        inputs = [constants.setdefault(v.signature(), v) if isinstance(v, theano.Constant) else firsts.get(v, v)
                  for v in node.inputs]
        place = place_of_node(node)
        key = node.op, place, tuple(inputs), tuple(v.type for v in node.outputs)
        if key not in found:
            with placed_on(place):
                found[key] = node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
        firsts.update(zip(node.outputs, found[key]))
    return [firsts.get(output, output) for output in outputs]
