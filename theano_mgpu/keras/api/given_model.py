"""The model that several functions of the Keras add-on take as an argument."""
from __future__ import annotations

from typing import Any

from ...compat import keras_versions


def check_built(model: Any, user: str) -> None:
    """Raise a ValueError unless a model has inputs that can be fed; `user` is the function or class that needs it."""
    if not hasattr(model, 'layers') or not hasattr(model, 'fit'):
        raise ValueError('%s takes a keras.Model or keras.Sequential, not %r' % (user, model))
    if not getattr(model, 'inputs', None) or not getattr(model, 'outputs', None):
        raise ValueError('the model %s is not built yet, so its inputs are unknown: give its first layer an '
                         'input_shape, or call model.build(input_shape), before %s' % (name_of(model), user))
    if len(keras_versions.feed_inputs(model)) < len(model.inputs):
        raise ValueError('the model %s reads its data from a tensor (Input(tensor=...)), which cannot be split into '
                         'sub-batches: use Input(shape=...), and pass arrays to fit' % name_of(model))


def name_of(model: Any) -> str:
    """Return the name of a model, or of its class: a class of the user's need not call the `__init__` of Keras's."""
    return getattr(model, 'name', None) or type(model).__name__
