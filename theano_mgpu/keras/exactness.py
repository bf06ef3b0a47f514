"""What of a Keras model cannot be exactly as on one device, by the names that its user gave."""
from keras import backend as K
from theano.gof.graph import ancestors
from theano.ifelse import IfElse
from theano.scalar import Switch
from theano.tensor.elemwise import All, DimShuffle
from theano.tensor.nnet.bn import AbstractBatchNormTrain

from .. import graph, launched
from ..samples import analyse
from ..statistics import BatchUpdates
from .batch import any_length, batch_inputs, batch_updates
from .spread import spread_of


def has_batch_normalization(variable):
    """Whether a graph normalises by the statistics of its batch."""
    return any(v.owner and isinstance(v.owner.op, AbstractBatchNormTrain) for v in ancestors([variable]))


def inexact_parts(model, weighted=True):
    """What replicas of a model compute differently from one device with the whole batch.

    Parameters
    ----------
    model : keras.Model
        If it is not compiled, its prediction alone is looked at.
    weighted : bool
        Whether batches may come with sample or class weights; without, Keras gives each sample a 1.

    Returns
    -------
    list of (str, str)
        The name of a layer, loss or metric, and the reason. Empty if training is exact.
    """
    compiled = model._is_compiled
    carriers = [v for v in batch_inputs(model, targets=compiled) if v.ndim > 0]
    free = any_length(model)
    outputs = free(graph.host_graph(([model.total_loss] if compiled else []) + model.outputs))
    uniform = model._feed_sample_weights if compiled and not weighted else ()
    couplings = [c for c in analyse(outputs, carriers, uniform).couplings if not _asks_for_label_format(model, c)]
    if not compiled:
        used = nodes_of_prediction(outputs)
        couplings = [c for c in couplings if c.node in used]
    parts = [(place_of(model, free.original(coupling.node.outputs[0])), coupling.reason) for coupling in couplings]
    updates = batch_updates(model, training=compiled)
    states = BatchUpdates(dict(zip(updates, free(graph.host_graph(list(updates.values()))))), carriers)
    for variable, mixing in states.approximate.items():
        owner = _owner(model, variable)
        parts += [(place_of(model, free.original(c.node.outputs[0]), owner), c.reason) for c in mixing
                  if not _asks_for_label_format(model, c)]
        if not mixing:
            parts.append((owner, 'its state %s is the mean of those that the replicas compute' % variable))
    return list(dict.fromkeys(parts))


def tell_inexact_parts(model):
    """Have a model's Spread say, by name, what cannot be exact on its contexts; nothing on one context.

    What is exact as long as no sample or class weights are given is kept for `tell_of_weights`.
    """
    if _n_contexts(model) == 1:
        return
    always = inexact_parts(model, weighted=False)
    if always:
        _tell(model, always)
    spread_of(model).inexact_if_weighted = [part for part in inexact_parts(model) if part not in always]


def tell_of_weights(model):
    """Have a model's Spread say what is not exact with the sample or class weights that were just given."""
    if spread_of(model).inexact_if_weighted:
        _tell(model, spread_of(model).inexact_if_weighted, ' with sample or class weights')


def _tell(model, parts, circumstance=''):
    spread_of(model).say(
        'on %d contexts is not exactly as on one%s, since each replica sees its sub-batch only: %s. '
        'theano_mgpu.keras.verify(model, x, y) shows what it amounts to'
        % (_n_contexts(model), circumstance, '; '.join('%s %s' % part for part in parts)))


def _n_contexts(model):
    """Contexts of all processes; each is expected to have as many."""
    return len(spread_of(model).contexts) * (launched.size() if launched.trains_together() else 1)


def _asks_for_label_format(model, coupling):
    """Whether a node asks if all labels are 0 or 1, as Keras's hinge losses do.

    Sub-batches answer like the batch, but for one that has the label 1 only: it is 1 in both formats.
    """
    node = coupling.node
    inputs = set(model._feed_inputs)
    return isinstance(node.op, All) and model._is_compiled and not inputs & set(ancestors(node.outputs))


def nodes_of_prediction(outputs):
    """The nodes of a graph that count where Keras's learning phase is 0: what is for the training alone is not among.
    """
    found, pending = set(), [output.owner for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found.add(node)
        chooses = isinstance(node.op, IfElse) or isinstance(getattr(node.op, 'scalar_op', None), Switch)
        # Of a condition, values if it holds, and values if not, the last ones.
        first = 1 + len(node.outputs) if chooses and _is_learning_phase(node.inputs[0]) else 0
        pending += [variable.owner for variable in node.inputs[first:]]
    return found


def _is_learning_phase(variable):
    while variable.owner and isinstance(variable.owner.op, DimShuffle):
        variable, = variable.owner.inputs
    return variable is K.learning_phase()


def place_of(model, variable, otherwise=None):
    """Name of the layer that a variable of the graph belongs to, with those of the models around it; else what is
    given, else of the loss.
    """
    path = _layer_path(model, variable)
    if path:
        return 'layer %s' % path
    if otherwise:
        return otherwise
    for name, target in zip(model.output_names, getattr(model, 'targets', ())):
        if target is not None and target in ancestors([variable]):
            return 'the loss of %s' % name
    return 'the loss'


def _layer_path(model, variable):
    for layer in getattr(model, 'layers', ()):
        for inbound in layer._inbound_nodes:
            if variable in ancestors(inbound.output_tensors, blockers=inbound.input_tensors):
                # A model that is called computes its own graph once more: the layer is found in its own.
                own = _counterpart(variable, inbound.output_tensors, getattr(layer, 'outputs', None) or ())
                within = own is not None and _layer_path(layer, own)
                return '%s/%s' % (layer.name, within) if within else layer.name
    return None


def _counterpart(variable, outputs, others):
    """The variable at the same place in another graph that was built alike; None if there is none."""
    seen, pending = set(), list(zip(outputs, others))
    while pending:
        here, there = pending.pop()
        if here is variable:
            return there
        if here in seen or not here.owner or not there.owner or type(here.owner.op) is not type(there.owner.op):
            continue
        seen.add(here)
        pending += zip(here.owner.inputs, there.owner.inputs)
        pending += [pair for pair in zip(here.owner.outputs, there.owner.outputs) if pair[0] not in seen]
    return None


def _owner(model, variable):
    """Name of the metric or layer that keeps a state."""
    for metric in model._get_training_eval_metrics():
        if any(variable is weight for weight in metric.weights):
            return 'metric %s' % metric.name
    return 'layer %s' % _keeper(model, variable) if _keeper(model, variable) else 'the model'


def _keeper(model, variable):
    for layer in getattr(model, 'layers', ()):
        if any(variable is weight for weight in layer.weights):
            within = _keeper(layer, variable)
            return '%s/%s' % (layer.name, within) if within else layer.name
    return None
