"""What a compiled Keras model feeds, updates and reports for each batch."""
from keras import backend as K

from ..batches.free_batch_size import FreeBatchSize


def batch_inputs(model, targets=True):
    """Placeholders in the order in which Keras feeds them: inputs, targets, sample weights, learning phase."""
    inputs = list(model._feed_inputs)
    if targets:
        inputs += model._feed_targets + model._feed_sample_weights
    return inputs + ([K.learning_phase()] if model._uses_dynamic_learning_phase() else [])


def any_length(inputs, length=None):
    """A FreeBatchSize for graphs over inputs of a model and batches of `length`, by default the `batch_input_shape`'s.

    A length that is given is looked for in indices, too.
    """
    inputs = [variable for variable in inputs if variable.ndim > 0]
    return FreeBatchSize(inputs, length or K.int_shape(inputs[0])[0], in_indices=length is not None)


def test_updates(model):
    """New values of layer and metric states in a test, as a dict. If a variable has several, the first counts."""
    return first_of_each(list(model.state_updates) + _metric_updates(model))


def training_updates(model, optimizer_updates):
    """New values of a training step, as a dict. If a variable has several, the first counts, in the order of Keras.

    Parameters
    ----------
    model : keras.Model
    optimizer_updates : list of (SharedVariable, theano.Variable)

    Returns
    -------
    dict of SharedVariable to theano.Variable
        Of layers, then of the optimizer, then of metrics.
    """
    return first_of_each(list(model.updates) + list(optimizer_updates) + _metric_updates(model))


def _metric_updates(model):
    return [pair for metric in model._get_training_eval_metrics() for pair in metric.updates]


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
