"""The version of the Keras that is installed, 0.3 to 2.3.1, and the parts that depend on it."""
from __future__ import annotations

import importlib
import json
from typing import Any


def version() -> str:
    """Return the version of the imported Keras."""
    return importlib.import_module('keras').__version__


def number() -> tuple[int, int]:
    """Return the first two numbers of the version of the imported Keras, which can be compared."""
    major, minor = version().split('.')[:2]
    return int(major), int(minor)


def backend() -> str:
    """Return the name of Keras's backend."""
    module = getattr(importlib.import_module('keras'), 'backend', None)
    module = module or importlib.import_module('keras.backend')  # Keras 0.3 does not import it
    return module.backend() if hasattr(module, 'backend') else module._BACKEND


def is_hooked() -> bool:
    """Return whether all of `theano_mgpu.keras` knows this Keras; others have functions of Theano, and `Predictor`."""
    return number() == (2, 3)


def inner(model: Any) -> Any:
    """Return the model whose functions compute a model; before Keras 2.2, a Sequential has a Model that does so."""
    from keras.models import Sequential
    if number() >= (2, 2) or not isinstance(model, Sequential):
        return model
    if model.model is None or number() >= (2, 0) and not model.built:  # as in its `predict`
        model.build()
    return model.model


def feed_inputs(model: Any) -> list[Any]:
    """Return the inputs of a model that take arrays; before Keras 2, all do."""
    model = inner(model)
    return getattr(model, '_feed_inputs', model.inputs)


def standardize(model: Any, x: Any) -> list[Any]:
    """Return the arrays for a model's inputs, checked as in the `predict` of this Keras, which takes `x`."""
    from keras.engine import training
    model, x = inner(model), list(x) if isinstance(x, list) else x  # some Kerases change the list
    if number() >= (2, 2):
        return model._standardize_user_data(x)[0]
    if number() >= (2, 0):
        return training._standardize_input_data(x, model._feed_input_names, model._feed_input_shapes, False)
    return training.standardize_input_data(x, model.input_names, model.internal_input_shapes, False)


def is_sequence(x: Any) -> bool:
    """Return whether `x` is a `keras.utils.Sequence`, a class of Keras 2."""
    return isinstance(x, getattr(importlib.import_module('keras.utils'), 'Sequence', ()))


def load_model(file: Any) -> Any:
    """Load the model in an open HDF5 file, without its optimizer."""
    from keras import models
    if number() >= (2, 2):
        return models.load_model(file, compile=False)
    model = models.model_from_config(model_config(file))  # their load_model opens files by name alone, or compiles
    if number() >= (2, 0):
        from keras.engine import topology
        topology.load_weights_from_hdf5_group(file['model_weights'], model.layers)
    else:
        model.load_weights_from_hdf5_group(file['model_weights'])
    return model


def model_config(file: Any) -> Any:
    """Return the configuration of the model in an open HDF5 file."""
    return json.loads(file.attrs['model_config'])
