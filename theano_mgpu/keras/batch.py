"""What a compiled Keras model feeds, updates and reports for each batch."""
from keras import backend as K
from theano import scalar
from theano.tensor.elemwise import DimShuffle, Elemwise

from ..any_length import AnyLength


def batch_inputs(model, targets=True):
    """Placeholders in the order in which Keras feeds them: inputs, targets, sample weights, learning phase."""
    inputs = list(model._feed_inputs)
    if targets:
        inputs += model._feed_targets + model._feed_sample_weights
    return inputs + ([K.learning_phase()] if model._uses_dynamic_learning_phase() else [])


def any_length(model, length=None):
    """An AnyLength for the graphs of a model and batches of `length`, by default that of its `batch_input_shape`."""
    inputs = [variable for variable in batch_inputs(model, targets=model._is_compiled) if variable.ndim > 0]
    return AnyLength(inputs, length or K.int_shape(inputs[0])[0])


def batch_updates(model, training=True):
    """New values of layer and metric states, as a dict; as in Keras, the first of several of one variable counts."""
    pairs = list(model.updates if training else model.state_updates)
    pairs += [pair for metric in model._get_training_eval_metrics() for pair in metric.updates]
    return first_of_each(pairs)


def first_of_each(pairs):
    """Update pairs as a dict with the first new value of each variable."""
    found = {}
    for variable, new in pairs:
        found.setdefault(variable, new)
    return found


def metric_values(model):
    """What the metrics report, as functions of their states."""
    return [metric._call_result for metric in model._get_training_eval_metrics() if hasattr(metric, '_call_result')]


def separate_means(total_loss):
    """A total loss with ``mean(losses of samples + regularisers)`` as a sum of means.

    Keras makes such a one where a loss has Reduction.NONE: regularisers that are sums over samples
    are added to the loss of each sample, and a term by itself is what sub-batches can add up.
    """
    whole = total_loss
    while whole.owner and not _adds(whole) and whole.owner.inputs[0].owner:
        whole = whole.owner.inputs[0]
    if not _adds(whole) or whole.ndim == 0:
        return total_loss
    return sum(K.mean(term) for term in _terms(whole))


def _adds(variable):
    op = variable.owner.op if variable.owner else None
    return isinstance(op, Elemwise) and op.scalar_op == scalar.add


def _terms(variable):
    if variable.owner and isinstance(variable.owner.op, DimShuffle) and variable.owner.inputs[0].ndim == 0:
        variable = variable.owner.inputs[0]
    return [term for part in variable.owner.inputs for term in _terms(part)] if _adds(variable) else [variable]


def members(data):
    """The members of data as Keras takes it: one array, a list, or a dict."""
    if data is None:
        return []
    if isinstance(data, dict):
        return list(data.values())
    return list(data) if isinstance(data, (list, tuple)) else [data]
