"""The patches of this room: methods of Keras's models, which use one device, and reports of Keras's loops."""
from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Callable, Mapping

from ...compat.patch import AT_ENABLE, Patch, after
from ...compat.wrapping import wrap
from . import keras_loops


def switch_keras_methods(methods: Mapping[str, Callable[..., Any]], applies: Callable[[Any], Any],
                         cls: type | None = None) -> None:
    """Wrap methods of a class of Keras's models by `methods`, which are called where ``applies(model)``."""
    from keras.models import Model
    for name, method in methods.items():
        wrap(cls or Model, name)(functools.partial(_switched, method, applies))


def _switched(method, applies, original, self, *args, **kwargs):
    return method(original, self, *args, **kwargs) if applies(self) else original(self, *args, **kwargs)


def replace_multi_gpu_model(function: Callable[..., Any], applies: Callable[[], Any]) -> None:
    """Replace ``keras.utils.multi_gpu_model`` by another function while ``applies()`` is true.

    Keras's own, since 2.0.9, ends with "`multi_gpu_model` is only available with the TensorFlow backend".
    """
    utils: Any = importlib.import_module('keras.utils')
    original = getattr(utils, 'multi_gpu_model', None)
    if original is not None:
        for owner in utils, sys.modules[original.__module__]:
            @wrap(owner)
            def multi_gpu_model(original, *args, **kwargs):
                return (function if applies() else original)(*args, **kwargs)


PATCHES = [
    Patch('Keras', 'all', 'fit sends a batch to the devices only after the step before it',
          after('keras.engine.training_arrays', 'keras.engine.training'), keras_loops.report_slices,
          'test_the_same_with_and_without'),
    Patch('Keras', '2.2 and later', 'fit_generator sends a batch to the devices only after the step before it',
          after('keras.utils.data_utils'), keras_loops.report_queues,
          'test_batches_of_a_generator_are_sent_ahead_once_they_are_there'),
    Patch('Keras', 'all', 'models are trained on one device only',
          AT_ENABLE, switch_keras_methods, 'test_sequential_training'),
    Patch('Keras', '2.0.9 and later', 'multi_gpu_model is only available with the TensorFlow backend',
          AT_ENABLE, replace_multi_gpu_model, 'test_the_add_ons_own_models_and_keras_own_function'),
]
