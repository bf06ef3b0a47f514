"""The graph that is analysed: without duplicates, and batch normalisation as simpler ops, which have rules."""
from functools import partial

import theano
from theano.gof.graph import io_toposort
from theano.ifelse import IfElse
from theano.tensor.nnet import bn

from ..analysis.rules.batch_norm import elementary
from ..analysis.sizes import number
from ..patches.placement_tags import place_of_node, placed_on

BATCH_NORM = bn.AbstractBatchNormTrain, bn.AbstractBatchNormTrainGrad


def lowered(outputs, statistics='exact'):
    """A copy of a graph in which the training of batch normalisation is simpler ops, and no node stands twice.

    With `statistics` of 'local', each replica normalises by those of its own samples, and these ops remain.

    What stands twice would be exchanged, and carried from stage to stage, twice. Of a branch whose condition is a
    known number, nothing remains.
    """
    outputs = _rebuilt(list(outputs), partial(_simpler, statistics=statistics))
    merged, constants = {}, {}

    def only_once(node, inputs):
        inputs = [constants.setdefault(v.signature(), v) if isinstance(v, theano.Constant) else v for v in inputs]
        first = merged.get((node.op, tuple(inputs)))
        if first is not None and [v.type for v in first.outputs] == [v.type for v in node.outputs]:
            return first.outputs
        new = node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
        merged[node.op, tuple(inputs)] = new[0].owner
        return new
    return _rebuilt(outputs, only_once)


def _rebuilt(outputs, rebuild):
    found = {}
    for node in io_toposort([], outputs):
        with placed_on(place_of_node(node)):
            new = rebuild(node, [found.get(variable, variable) for variable in node.inputs])
        found.update(zip(node.outputs, new))
    return [found.get(output, output) for output in outputs]


def _simpler(node, inputs, statistics):
    if isinstance(node.op, IfElse) and number(inputs[0]) is not None:  # as Keras's learning phase may be
        n = len(node.outputs)
        return inputs[1:n + 1] if number(inputs[0]) else inputs[n + 1:]
    if isinstance(node.op, BATCH_NORM) and statistics == 'exact':
        return elementary(node, inputs)
    return node.outputs if inputs == node.inputs else node.clone_with_new_inputs(inputs).outputs
