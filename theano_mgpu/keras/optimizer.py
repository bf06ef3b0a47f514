"""A Keras optimizer as the `updates` of `mgpu.training_function`."""
import contextlib

import keras
import numpy as np
import theano.tensor as T
from keras import backend as K

from ..errors import GraphError
from ..graphs import graph
from .batch import first_of_each


def updates_of(optimizer, state):
    """The updates of a Keras optimizer.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
    state : OptimizerState
        That of the function to which the updates belong.

    Returns
    -------
    callable
        ``updates(gradients, params)``, as `mgpu.training_function` takes it. The optimizer gets the averaged gradients,
        so that it clips by the norm of the whole batch.
    """
    def updates(gradients, params):
        with K.name_scope('training'), K.name_scope(type(optimizer).__name__):  # Keras's names, also in files
            return state.updates(optimizer, _loss_with(gradients, params), params)
    return updates


class OptimizerState:
    """The variables that an optimizer updates in a train function of a model.

    Keras's optimizers make new moments each time that they are asked for updates. A train function asks once in plain
    Keras, but once for each of its variants over contexts: all of these continue with the variables of the first.

    Parameters
    ----------
    weights : list of theano.compile.SharedVariable
        The `weights` of the optimizer that the first variant continues with; none for a new state.
    """

    def __init__(self, weights=()):
        self._weights, self._updated = list(weights), None

    def updates(self, optimizer, loss, params):
        """Return the new values, a dict, of the variables that the optimizer updates."""
        before = dict(vars(optimizer))
        pairs = optimizer.get_updates(loss=loss, params=params)
        updated = [variable for variable, _ in pairs]
        if self._updated is None:
            kept = dict(zip(optimizer.weights, self._weights)) if _same_types(optimizer.weights, self._weights) else {}
            self._updated = [kept.get(variable, variable) for variable in updated]
            if kept:
                optimizer.weights = self._weights
        elif _same_types(updated, self._updated):
            kept = dict(zip(updated, self._updated))
            vars(optimizer).update(before)  # it may belong to a further model, whose moments it shows
        else:
            raise GraphError('%s makes other updates each time that it is asked for them, so that its state cannot be '
                             'continued. Divide each batch: always=True (theano-mgpu run --always)'
                             % type(optimizer).__name__)
        return first_of_each(zip(self._updated, graph.substitute([new for _, new in pairs], kept)))

    @contextlib.contextmanager
    def noted(self, optimizer):
        """Return a block in which plain Keras asks the optimizer for updates: others continue with their variables."""
        original, own = optimizer.get_updates, vars(optimizer).get('get_updates')

        def get_updates(*args, **kwargs):
            pairs = original(*args, **kwargs)
            self._updated = [variable for variable, _ in pairs]
            return pairs
        optimizer.get_updates = get_updates
        try:
            yield
        finally:
            if own is None:
                del optimizer.get_updates
            else:
                optimizer.get_updates = own


class Continued(keras.optimizers.Optimizer):
    """An optimizer whose updates continue with an OptimizerState of another one."""

    def __init__(self, optimizer, state):
        super().__init__()
        self._optimizer, self._state = optimizer, state

    def get_updates(self, loss, params):
        return list(self._state.updates(self._optimizer, loss, params).items())


def _loss_with(gradients, params):
    """A loss with these gradients: the optimizer derives them from it, and clips them as usual."""
    return sum(((param * gradient).sum() for param, gradient in zip(params, gradients)),
               T.zeros((), params[0].dtype) if params else T.zeros(()))


def _same_types(before, after):
    return len(before) == len(after) and all(
        old is new or old.type == new.type and np.shape(old.get_value()) == np.shape(new.get_value())
        for old, new in zip(before, after))
