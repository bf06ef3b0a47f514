"""What a compiled Keras model feeds, updates and reports for each batch."""
from keras import backend as K

from ..batches.any_length import AnyLength


def batch_inputs(model, targets=True):
    """Placeholders in the order in which Keras feeds them: inputs, targets, sample weights, learning phase."""
    inputs = list(model._feed_inputs)
    if targets:
        inputs += model._feed_targets + model._feed_sample_weights
    return inputs + ([K.learning_phase()] if model._uses_dynamic_learning_phase() else [])


def any_length(model, length=None):
    """An AnyLength for the graphs of a model and batches of `length`, by default that of its `batch_input_shape`.

    A length that is given is looked for in indices, too.
    """
    inputs = [variable for variable in batch_inputs(model, targets=model._is_compiled) if variable.ndim > 0]
    return AnyLength(inputs, length or K.int_shape(inputs[0])[0], in_indices=length is not None)


def batch_updates(model, training=True):
    """New values of layer and metric states, as a dict. If a variable has several, the first counts, as in Keras."""
    pairs = list(model.updates if training else model.state_updates)
    pairs += [pair for metric in model._get_training_eval_metrics() for pair in metric.updates]
    return first_of_each(pairs)


def first_of_each(pairs):
    """Pairs of updates as a dict, with the first new value of each variable."""
    found = {}
    for variable, new in pairs:
        found.setdefault(variable, new)
    return found


def metric_values(model):
    """The results of the metrics, as functions of their states."""
    return [metric._call_result for metric in model._get_training_eval_metrics() if hasattr(metric, '_call_result')]


def members(data):
    """The arrays of data as Keras takes it: one array, a list, or a dict."""
    if data is None:
        return []
    if isinstance(data, dict):
        return list(data.values())
    return list(data) if isinstance(data, (list, tuple)) else [data]
