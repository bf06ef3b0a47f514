"""What of a Keras model cannot be exactly as on one device, by the names that its user gave."""
import warnings

from theano.gof.graph import ancestors
from theano.tensor.nnet.bn import AbstractBatchNormTrain

from .. import graph
from ..errors import MgpuWarning
from ..samples import analyse
from ..statistics import BatchUpdates
from .batch import batch_inputs, batch_updates


def has_batch_normalization(variable):
    """Whether a graph normalises by the statistics of its batch."""
    return any(v.owner and isinstance(v.owner.op, AbstractBatchNormTrain) for v in ancestors([variable]))


def inexact_parts(model):
    """What replicas of a compiled model compute differently from one device with the whole batch.

    Parameters
    ----------
    model : keras.Model

    Returns
    -------
    list of (str, str)
        The name of a layer, loss or metric, and the reason. Empty if training is exact.
    """
    carriers = [v for v in batch_inputs(model) if v.ndim > 0]
    outputs = graph.host_graph([model.total_loss] + model.outputs)
    couplings = analyse(outputs, carriers).couplings
    parts = [(place_of(model, coupling.node.outputs[0]), coupling.reason) for coupling in couplings]
    updates = batch_updates(model)
    states = BatchUpdates(dict(zip(updates, graph.host_graph(list(updates.values())))), carriers)
    parts += [(_owner(model, variable), 'its state %s is the mean of those that the replicas compute' % variable)
              for variable in states.approximate]
    return list(dict.fromkeys(parts))


def warn_of_inexact_parts(model):
    """Name, in one warning, what cannot be exact on the contexts of a ParallelModel; nothing on one context."""
    parts = inexact_parts(model) if len(model.contexts) > 1 else []
    if parts:
        warnings.warn('%s on %d contexts is not exactly as on one, since each replica sees its sub-batch only: %s. '
                      'theano_mgpu.keras.verify(model, x, y) shows what it amounts to'
                      % (model.name, len(model.contexts), '; '.join('%s %s' % part for part in parts)),
                      MgpuWarning, stacklevel=3)


def place_of(model, variable):
    """Name of the layer that a variable of the graph belongs to, else of the loss."""
    for layer in model.layers:
        for inbound in layer._inbound_nodes:
            if variable in ancestors(inbound.output_tensors, blockers=inbound.input_tensors):
                return 'layer %s' % layer.name
    for name, target in zip(model.output_names, model.targets):
        if target is not None and target in ancestors([variable]):
            return 'the loss of %s' % name
    return 'the loss'


def _owner(model, variable):
    """Name of the metric or layer that keeps a state."""
    for metric in model._get_training_eval_metrics():
        if any(variable is weight for weight in metric.weights):
            return 'metric %s' % metric.name
    for layer in model.layers:
        if any(variable is weight for weight in layer.weights):
            return 'layer %s' % layer.name
    return 'the model'
