"""The loading of a Keras model from a file, and the refusal of a file that has code in it."""
from __future__ import annotations

import functools
import inspect
import json
from typing import Any

from ..errors import MgpuError
from .hdf5_check import check_hdf5

LAMBDA_KEYS = {'function_type', 'output_shape_type', 'mode_type'}  # keys in the configuration of a layer with functions


def load_model(path: str, safe: bool) -> Any:
    """Load a model, without its optimizer.

    Parameters
    ----------
    path : str
        A file that `keras.Model.save` wrote.
    safe : bool
        Refuse a model with Lambda layers, whose functions are code within the file, or with classes that are not
        Keras's own.

    Returns
    -------
    keras.Model

    Raises
    ------
    MgpuError
        If Keras cannot load it, or it is refused: then nothing in it has been run.
    """
    import h5py
    import keras
    from keras.utils.io_utils import H5Dict
    try:
        check_hdf5(path)
        with h5py.File(path, 'r') as file:  # the file that is checked is the one that is loaded
            if 'model_config' not in file.attrs and 'model_config' not in file:
                raise MgpuError('%s has no model in it, perhaps weights alone: write it with model.save' % path)
            if safe:
                check_safe(path, json.loads(H5Dict(file, 'r')['model_config'].decode('utf-8')))
            return keras.models.load_model(file, compile=False)
    except MgpuError:
        raise
    except Exception as error:  # h5py and layers raise many classes
        # Not the cause: the file is wrong, not the code.
        raise MgpuError('Keras cannot load the model %s: %s: %s. If the model has custom layers, load it in a script '
                        'and use theano_mgpu.keras.Predictor(model)'
                        % (path, type(error).__name__, ' '.join(str(error).split()))) from None


def check_safe(path: str, config: Any) -> None:
    """Raise a MgpuError if a model's configuration, as JSON, has Lambda layers, or classes that are not Keras's own."""
    reasons = list(dict.fromkeys(_unsafe(config, 'the model')))
    if reasons:
        raise MgpuError('the model %s is refused by --safe: %s. Without --safe, code in the file would be run: leave '
                        'the option out only if you trust the file' % (path, ', '.join(reasons)))


def _unsafe(config, name):
    """Yield the parts of a configuration that may run code, as text; `name` is the name of its layer."""
    if isinstance(config, dict):
        kind, settings = config.get('class_name'), config.get('config')
        if isinstance(settings, dict) and 'name' in settings:
            name = settings['name']
        if kind == 'Lambda':
            yield 'the Lambda layer %s has code in the file' % name
            return  # its settings have the code
        elif 'class_name' in config and str(kind) not in _own_classes():
            yield '%s has the class %s, which is not of Keras' % (name, kind)
        elif LAMBDA_KEYS & config.keys():
            yield 'the layer %s has code in the file' % name
    for each in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from _unsafe(each, name)


@functools.lru_cache(None)
def _own_classes():
    """Return the names of Keras's own classes for the parts of a model, but for Lambda."""
    from keras import Model, Sequential, constraints, initializers, layers, regularizers
    bases = layers.Layer, initializers.Initializer, regularizers.Regularizer, constraints.Constraint
    names = {'Model': Model, 'Sequential': Sequential}
    for module in (layers, initializers, regularizers, constraints):
        names.update(vars(module))
    return {name for name, each in names.items() if inspect.isclass(each) and issubclass(each, bases)
            and each.__module__.partition('.')[0] == 'keras' and not issubclass(each, layers.Lambda)}
