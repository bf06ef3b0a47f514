"""The graph that is analysed: without duplicates, and batch normalisation as simpler ops, which have rules."""
from theano.gof.graph import io_toposort
from theano.ifelse import IfElse
from theano.tensor.nnet import bn

from ..analysis.rules.batch_norm import elementary
from ..analysis.sizes import number
from ..graphs.rewrites import inlined, merged
from ..patches.placement_tags import place_of_node, placed_on

BATCH_NORM = bn.AbstractBatchNormTrain, bn.AbstractBatchNormTrainGrad


def lowered(outputs, statistics='exact'):
    """A copy of a graph in which the training of batch normalisation is simpler ops, and no node stands twice.

    The graph inside of an OpFromGraph stands in its place. With `statistics` of 'local', each replica normalises by
    those of its own samples, and these ops remain. Of a branch whose condition is a known number, nothing remains.
    """
    found, outputs = {}, inlined(outputs)
    for node in io_toposort([], outputs):
        with placed_on(place_of_node(node)):
            new = _simpler(node, [found.get(variable, variable) for variable in node.inputs], statistics)
        found.update(zip(node.outputs, new))
    return merged([found.get(output, output) for output in outputs])


def _simpler(node, inputs, statistics):
    if isinstance(node.op, IfElse) and number(inputs[0]) is not None:  # as Keras's learning phase may be
        n = len(node.outputs)
        return inputs[1:n + 1] if number(inputs[0]) else inputs[n + 1:]
    if isinstance(node.op, BATCH_NORM) and statistics == 'exact':
        return elementary(node, inputs)
    return node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
