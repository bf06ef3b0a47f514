"""A Keras optimizer as the `updates` of `mgpu.training_function`."""
import keras
import theano.tensor as T
from keras import backend as K

from ..graphs import graph


def updates_of(optimizer, continued=False):
    """The updates of a Keras optimizer.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
    continued : bool
        Whether the updates continue with its present state (`weights`). Keras's optimizers make new state variables
        each time that they are asked for updates.

    Returns
    -------
    callable
        ``updates(gradients, params)``, as `mgpu.training_function` takes it. The optimizer gets the averaged gradients,
        so that it clips by the norm of the whole batch.
    """
    def updates(gradients, params):
        with K.name_scope('training'), K.name_scope(type(optimizer).__name__):  # Keras's names, also in files
            return _updates(optimizer, _loss_with(gradients, params), params, continued)
    return updates


class Continued(keras.optimizers.Optimizer):
    """An optimizer whose updates continue with the present state of another one."""

    def __init__(self, optimizer):
        super().__init__()
        self._optimizer = optimizer

    def get_updates(self, loss, params):
        return list(_updates(self._optimizer, loss, params, continued=True).items())


def _updates(optimizer, loss, params, continued):
    before = list(optimizer.weights) if continued else []
    pairs = optimizer.get_updates(loss=loss, params=params)
    kept = dict(zip(optimizer.weights, before)) if _same_types(before, optimizer.weights) else {}
    if kept:
        optimizer.weights = before
    new = graph.substitute([new for _, new in pairs], kept)
    found = {}
    for (variable, _), value in zip(pairs, new):
        found.setdefault(kept.get(variable, variable), value)
    return found


def _loss_with(gradients, params):
    """A loss with these gradients: the optimizer derives them from it, and clips them as usual."""
    return sum(((param * gradient).sum() for param, gradient in zip(params, gradients)),
               T.zeros((), params[0].dtype) if params else T.zeros(()))


def _same_types(before, after):
    return len(before) == len(after) and all(
        old.type == new.type and old.get_value().shape == new.get_value().shape for old, new in zip(before, after))
