"""A Keras optimizer as the `updates` of `mgpu.training_function`."""
import theano.tensor as T
from keras import backend as K

from ..graphs import graph


def updates_of(optimizer, continued=False):
    """The updates of a Keras optimizer.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
    continued : bool
        Whether it has a state from before (`weights`) that the updates go on with. Keras's optimizers make
        new state variables each time they are asked for updates.

    Returns
    -------
    callable
        ``updates(gradients, params)``, as `mgpu.training_function` takes it. The optimizer sees the averaged
        gradients, so that clipping by norm is that of the whole batch.
    """
    def updates(gradients, params):
        before = list(optimizer.weights) if continued else []
        with K.name_scope('training'), K.name_scope(type(optimizer).__name__):  # Keras's names, in files too
            pairs = optimizer.get_updates(loss=_loss_with(gradients, params), params=params)
        kept = dict(zip(optimizer.weights, before)) if _same_types(before, optimizer.weights) else {}
        if kept:
            optimizer.weights = before
        new = graph.substitute([new for _, new in pairs], kept)
        found = {}
        for (variable, _), value in zip(pairs, new):
            found.setdefault(kept.get(variable, variable), value)
        return found
    return updates


def _loss_with(gradients, params):
    """A loss that has these gradients, so that the optimizer finds them by itself, and clips them as it does."""
    return sum(((param * gradient).sum() for param, gradient in zip(params, gradients)),
               T.zeros((), params[0].dtype) if params else T.zeros(()))


def _same_types(before, after):
    return len(before) == len(after) and all(
        old.type == new.type and old.get_value().shape == new.get_value().shape for old, new in zip(before, after))
