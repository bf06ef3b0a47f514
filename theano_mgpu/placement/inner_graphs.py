"""Placements inside of the inner graph of an op, a scan above all: it runs as a whole on one device."""
from theano.compile.builders import OpFromGraph
from theano.gof.graph import io_toposort
from theano.scan_module.scan_op import Scan

from ..errors import GraphError
from ..patches.placement_tags import place_of_node


def inner_outputs(op):
    """The outputs of an op's inner graph; an empty list for an op without one."""
    if isinstance(op, Scan):
        return op.outputs
    return op.local_outputs if isinstance(op, OpFromGraph) else []


def check(node, place):
    """Raise a GraphError if what a node computes inside is placed elsewhere.

    What does not change from step to step of a scan is not looked at: Theano copies such expressions from around the
    scan into it, and moves them out of it again.

    Parameters
    ----------
    node : theano.Apply
    place : str
        Where the node is.
    """
    outputs = inner_outputs(node.op)
    if not outputs:
        return
    steps = _inputs_of_steps(node.op)
    for inner in io_toposort([], outputs):
        if steps.isdisjoint(inner.inputs):
            continue
        steps.update(inner.outputs)
        own = place_of_node(inner)
        if isinstance(own, str) and own != place:
            raise GraphError('%s is placed on %r inside of %s, which is on %r: a scan runs as a whole on one device. '
                             'Put the call of theano.scan, not its steps, into mgpu.device(%r)'
                             % (inner, own, node.op, place, own))
        check(inner, place)


def _inputs_of_steps(op):
    """The inputs of an op's inner graph; of a scan, those that change from step to step."""
    if not isinstance(op, Scan):
        return set(op.local_inputs)
    return set(op.inputs) - set(op.inner_non_seqs(op.inputs)) - set(op.inner_shared(op.inputs))
