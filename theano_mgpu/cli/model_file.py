"""The loading of a Keras model from a file, and the refusal of a file that has code in it."""
from __future__ import annotations

import functools
import inspect
import pickle
import re
import traceback
from typing import Any

from ..compat import keras_versions
from ..errors import MgpuError
from .hdf5_check import check_hdf5

# Keys in the configuration of a layer that may have functions; Keras 1's Merge has 'raw' where it has none.
LAMBDA_KEYS = 'function_type', 'output_shape_type', 'output_mask_type', 'mode_type'

DAMAGED = 'The file is damaged, cut off, or no HDF5 file: copy it again, or write it again with model.save'
UNREADABLE = 'The system does not let this process read the file: look at its name and permissions'
TRUST = 'Without --safe, code in the file would be run: leave the option out only if you trust the file'
CUSTOM = 'If the model has custom layers, load it in a script and use theano_mgpu.keras.Predictor(model)'


def load_model(path: str, safe: bool) -> Any:
    """Load a model that `keras.Model.save` wrote, without its optimizer, or a pickled one; raise an MgpuError if Keras
    cannot.

    `safe` refuses a pickle, and a model with Lambda layers, whose functions are code within the file, or with classes
    that are not Keras's own: then nothing in it has been run.
    """
    import h5py
    advice, next_step = '', DAMAGED
    try:
        if _is_pickle(path):
            next_step = CUSTOM
            return _from_pickle(path, safe)
        check_hdf5(path)
        with h5py.File(path, 'r') as file:  # the file that is checked is the one that is loaded
            if 'model_config' not in file.attrs:
                raise MgpuError('%s has no model in it, perhaps weights alone: write it with model.save' % path)
            advice = advice_for(file)
            config, next_step = keras_versions.model_config(file), CUSTOM
            if safe:
                check_safe(path, config, advice)
            return keras_versions.load_model(file)
    except MgpuError:
        raise
    except Exception as error:  # h5py and layers raise many classes
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if getattr(error, 'errno', None):
            next_step = UNREADABLE
        elif frame.f_globals.get('__name__', '').startswith('h5py'):
            next_step = DAMAGED
        # Not the cause: the file is wrong, not the code.
        raise MgpuError('Keras cannot load the model %s: %s: %s. %s%s' % (
            path, type(error).__name__, ' '.join(str(error).split()), advice, next_step)) from None


def _is_pickle(path):
    with open(path, 'rb') as file:
        return file.read(1) == pickle.PROTO  # protocol 2 and later


def _from_pickle(path, safe):
    if safe:
        raise MgpuError('the model %s is refused by --safe: it is a pickle, which runs code when it is read. %s'
                        % (path, TRUST))
    from keras import models
    with open(path, 'rb') as file:
        model = pickle.load(file)
    if not isinstance(model, models.Model):
        raise MgpuError('%s is a pickle of the type %s, and not of a Keras model' % (path, type(model).__name__))
    return model


def advice_for(file: Any) -> str:
    """Return what helps if a file cannot be loaded; an empty text if the Keras that is installed wrote it."""
    written = file.attrs.get('keras_version', keras_versions.version())
    written = written.decode() if isinstance(written, bytes) else str(written)
    if written == keras_versions.version():
        return ''
    can_install = re.match(r'(1\.[0-2]|2\.[0-3])\.\d+$', written)  # others are not of Theano's time
    return 'Keras %s wrote the file, and Keras %s is installed: %s. ' \
        % (written, keras_versions.version(), 'pip install --no-deps Keras==' + written if can_install
           else 'build the model in a script, and load its weights')


def check_safe(path: str, config: Any, advice: str = '') -> None:
    """Raise a MgpuError with the advice if a model's configuration has Lambda layers, or classes not of Keras."""
    reasons = list(dict.fromkeys(_unsafe(config, 'the model')))
    if reasons:
        raise MgpuError('the model %s is refused by --safe: %s. %s%s'
                        % (path, ', '.join(reasons), advice, TRUST))


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
        elif any(config.get(key, 'raw') != 'raw' for key in LAMBDA_KEYS):
            yield 'the layer %s has code in the file' % name
    for each in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from _unsafe(each, name)


@functools.lru_cache(None)
def _own_classes():
    """Return the names of Keras's own classes for the parts of a model, but for Lambda."""
    import keras
    names = {}
    for module in ('models', 'layers', 'initializers', 'constraints', 'regularizers'):
        names.update(vars(getattr(keras, module, keras.layers)))  # Keras 1 has functions for initializers
    bases = tuple(names[base] for base in ('Layer', 'Initializer', 'Regularizer', 'Constraint') if base in names)
    return {name for name, each in names.items() if inspect.isclass(each) and issubclass(each, bases)
            and each.__module__.partition('.')[0] == 'keras' and not issubclass(each, keras.layers.Lambda)}
