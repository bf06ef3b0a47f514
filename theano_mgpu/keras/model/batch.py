"""The inputs, new values and metrics of the functions of a Keras model, and the arrays in a user's data."""
from __future__ import annotations

from typing import Any, Iterable

import keras
import numpy as np
import theano
from keras import backend as K


def batch_inputs(model: keras.Model, targets: bool = True) -> list[theano.Variable]:
    """List placeholders in the order in which Keras feeds them: inputs, targets, sample weights, learning phase."""
    inputs = list(model._feed_inputs)
    if targets:
        inputs += model._feed_targets + model._feed_sample_weights
    return inputs + ([K.learning_phase()] if model._uses_dynamic_learning_phase() else [])


def new_values(model: keras.Model, kind: str, optimizer_updates: Iterable[Any] = ()) -> dict[Any, theano.Variable]:
    """Return the new values that a batch gives to variables, in the order of Keras.

    Parameters
    ----------
    model : keras.Model
    kind : {'train', 'test', 'predict'}
    optimizer_updates : list of (SharedVariable, theano.Variable)

    Returns
    -------
    dict of SharedVariable to theano.Variable
        Of layers, then of the optimizer, then of metrics. If a variable has several, the first counts.
    """
    pairs = [*(model.updates if kind == 'train' else model.state_updates), *optimizer_updates]
    if kind != 'predict':
        pairs += [pair for metric in model._get_training_eval_metrics() for pair in metric.updates]
    return first_of_each(pairs)


def first_of_each(pairs: Iterable[Any]) -> dict[Any, theano.Variable]:
    """Return pairs of updates as a dict, with the first new value of each variable."""
    updates: dict[Any, theano.Variable] = {}
    for variable, new in pairs:
        updates.setdefault(variable, new)
    return updates


def metric_values(model: keras.Model) -> list[theano.Variable]:
    """Return the results of the metrics, as functions of their states."""
    return [metric._call_result for metric in model._get_training_eval_metrics() if hasattr(metric, '_call_result')]


def members(data: Any) -> list[Any]:
    """List the arrays in data as Keras takes it: one array, a list, a dict, or None."""
    if isinstance(data, dict):
        return list(data.values())
    if isinstance(data, (list, tuple)):
        return list(data)
    return [] if data is None else [data]


def length_of(inputs: list[Any]) -> int:
    """Return the number of samples of a batch; 0 if it has none."""
    shape = np.shape(inputs[0]) if inputs else ()
    return shape[0] if shape else 0
