"""The updates of a Keras model's optimizer, as plain Keras asks for them."""
from __future__ import annotations

from typing import Any

import keras
import theano
from keras import backend as K

from ...graph import graph


class Given(keras.optimizers.Optimizer):
    """An optimizer whose updates are known, so that Keras makes a function of them and asks for no others.

    Parameters
    ----------
    updates : list of (SharedVariable, theano.Variable)
    """

    def __init__(self, updates: list[Any]) -> None:
        super().__init__()
        self._updates = updates

    def get_updates(self, loss: theano.Variable, params: list[Any]) -> list[Any]:
        return list(self._updates)


def optimizer_updates(model: keras.Model, state: Any) -> list[tuple[Any, theano.Variable]]:
    """Ask the optimizer of a compiled model for its updates of the model's loss.

    An optimizer may take more of the loss than the gradients: its value, its curvature, its gradients elsewhere. It
    makes new state variables each time that it is asked. So a train function asks once, as in plain Keras.

    Parameters
    ----------
    model : keras.Model
    state : ParallelState
        If it is `continued`, the updates continue with the present state of the optimizer: its `weights`, and the
        variables of its `updates`.

    Returns
    -------
    list of (SharedVariable, theano.Variable)
        A variable may have several new values: the first counts.
    """
    optimizer, params = model.optimizer, model._collected_trainable_weights
    before = _states(optimizer)
    with K.name_scope('training'), K.name_scope(type(optimizer).__name__):  # Keras's names, also in files
        updates = list(optimizer.get_updates(params=params, loss=model.total_loss))
    if not state.continued:
        return updates
    earlier: dict[Any, Any] = {}
    for old, new in zip(before, _states(optimizer)):
        earlier.update(_pairs_of_states(old, new))
    _replace(optimizer, earlier)
    values = graph.substitute([value for _, value in updates], earlier)
    return [(earlier.get(variable, variable), value) for (variable, _), value in zip(updates, values)]


def _states(optimizer):
    """Return the state variables that an optimizer names, in the two lists that Keras's optimizers have."""
    return list(optimizer.weights), [pair[0] for pair in optimizer.updates if isinstance(pair, tuple)]


def _pairs_of_states(before, after):
    """Map state variables that an optimizer has just made to the earlier ones, if they are alike."""
    alike = len(before) == len(after) and all(
        old.type == new.type and old.get_value().shape == new.get_value().shape for old, new in zip(before, after))
    return dict(zip(after, before)) if alike else {}


def _replace(optimizer, earlier):
    """Have an optimizer, and those that it wraps, know earlier state variables in place of new ones."""
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, keras.optimizers.Optimizer) and value is not optimizer:
            _replace(value, earlier)
        elif isinstance(value, theano.Variable):
            setattr(optimizer, name, earlier.get(value, value))
        elif isinstance(value, list):
            value[:] = [earlier.get(each, each) if isinstance(each, theano.Variable) else each for each in value]
