"""Methods of Keras's models, which use one device in Keras 2.3.1: theano_mgpu's own take their place."""
from __future__ import annotations

import functools
from typing import Any, Callable, Mapping


def switch_keras_methods(methods: Mapping[str, Callable[..., Any]], applies: Callable[[Any], Any]) -> None:
    """Replace methods of Keras's models.

    Parameters
    ----------
    methods : dict of str to callable
        For each name, a function that takes Keras's own method and returns the one to use instead.
    applies : callable
        ``applies(model)``: whether a call on this model uses the other method.
    """
    import keras
    for name, make in methods.items():
        original = getattr(keras.Model, name)
        setattr(keras.Model, name, _switched(original, make(original), lambda model, *args: applies(model)))


def replace_multi_gpu_model(function: Callable[..., Any], applies: Callable[[], Any]) -> None:
    """Replace ``keras.utils.multi_gpu_model`` by another function while ``applies()`` is true.

    Keras 2.3.1's own ends with "`multi_gpu_model` is only available with the TensorFlow backend".
    """
    import keras.utils.multi_gpu_utils
    module = keras.utils.multi_gpu_utils
    keras.utils.multi_gpu_model = module.multi_gpu_model = _switched(
        module.multi_gpu_model, function, lambda *args: applies())


def _switched(original, other, applies):
    @functools.wraps(original)
    def function(*args, **kwargs):
        return (other if applies(*args) else original)(*args, **kwargs)
    return function
