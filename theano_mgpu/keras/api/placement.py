"""`place`: put the layers of a Keras model that exists on devices."""
from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Iterator

import theano
from keras.layers import Layer
from keras.models import Model
from theano.gof.graph import io_toposort

from ...auto.divided_model import divided_model_of, models_over_contexts
from ...compat import keras_versions
from ...graph.updates import first_of_each
from ...placement import place as place_variable
from ...placement import place_name
from ..models import KINDS, states_of
from .given_model import check_built


def place(model: Model, devices: dict[str, Any]) -> Model:
    """Put layers of a model that exists on devices.

    It is for models that are not built within ``with mgpu.device(name):`` blocks: models of `keras.applications`, or
    models from a file. The weights, the ops and the regularisers of each named layer are placed. Layers
    without a name here run where their neighbours do, as `device` says. Results do not change, and a file of `save`
    does not say where layers are placed.

    Parameters
    ----------
    model : keras.Model
        Built. Its functions over contexts, and the functions of other models with its layers, such as one of
        `multi_gpu_model`, are made again for the next batch; the state of the optimizer stays.
    devices : dict of str to str or Context
        Names of layers, or patterns as in `fnmatch`, and where they go, as for `device`: ``{'block1_*': 'dev0',
        'fc*': 'dev1'}``. If several match a layer, the last one counts. A nested model stands for all of its layers,
        but those that are named, too; one of its layers has the name ``'model_1/dense_2'``, or ``'dense_2'``.

    Returns
    -------
    keras.Model
        `model` itself.

    Raises
    ------
    ValueError
        If a name matches no layer, or the model is not built.
    ContextError
        If there is no such context.

    Examples
    --------
    >>> import theano_mgpu, keras, numpy as np
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,), name='first'),
    ...                           keras.layers.Dense(2, name='second')])
    >>> model = place(model, {'f*': 'dev0', 'second': 'dev1'})
    >>> [variable.tag.mgpu_place for layer in model.layers for variable in layer.weights]
    ['dev0', 'dev0', 'dev1', 'dev1']
    """
    if not isinstance(devices, dict) or not all(isinstance(name, str) for name in devices):
        raise ValueError("place takes a dict of the names of layers, or patterns, to devices, such as {'dense_*': "
                         "'dev0'}, not %r" % (devices,))
    check_built(model, 'place')
    layers = dict(with_inner(model, ''))
    devices = {name: place_name(device) for name, device in devices.items()}
    for pattern in devices:
        if not any(_matches(pattern, path) for path in layers):
            raise ValueError('no layer of %s matches %r; its layers are: %s' % (model.name, pattern, ', '.join(layers)))
    chosen = {path: device for pattern, device in devices.items() for path in layers if _matches(pattern, path)}
    for path in sorted(layers, key=lambda path: path.count('/')):  # nested models before their layers
        inner = [other for other in layers if other.startswith(path + '/')]
        if not chosen.keys().isdisjoint(inner):
            # It is not known which layer an op of a call of this model belongs to: they run beside the weights.
            for variable in ops_of(layers[path]):
                for output in variable.owner.outputs if variable.owner else [variable]:
                    output.tag.mgpu_place = None
        elif path in chosen:
            _place_layer(layers[path], chosen[path])
        if path in chosen:
            for other in set(inner).difference(chosen):
                _place_layer(layers[other], chosen[path])
    _make_functions_again(layers.values())
    return model


def with_inner(model: Any, prefix: str) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of a model by name, in their order, with the layers of nested models: ``'model_1/dense_2'``."""
    for layer in model.layers:
        yield prefix + layer.name, layer
        if isinstance(layer, Model):
            yield from with_inner(layer, prefix + layer.name + '/')


def _matches(pattern, path):
    return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition('/')[2], pattern)


def _place_layer(layer, device):
    for variable in layer.weights + ops_of(layer):
        place_variable(variable, device)


def ops_of(layer: Layer) -> list[Any]:
    """Return the inputs that a layer stands for, and an output of each op that it has made: between its tensors, of its
    regularisers, and of its updates.
    """
    calls = keras_versions.calls_of(layer)
    inputs = [tensor for call in calls for tensor in call.input_tensors + call.input_masks if tensor is not None]
    outputs = [tensor for call in calls for tensor in call.output_tensors + call.output_masks if tensor is not None]
    outputs += list(getattr(layer, 'losses', ())) + list(first_of_each(getattr(layer, 'updates', ())).values())
    outputs = [v for v in outputs if isinstance(v, theano.Variable)]  # a regulariser of an empty weight is a number
    passed_on = [tensor for tensor in outputs if tensor in inputs and tensor.owner is None]
    return passed_on + [node.outputs[0] for node in io_toposort(inputs, outputs)]


def _make_functions_again(layers):
    """Let all models with some of these layers make their functions over contexts again; optimizers keep their state.
    """
    for model in models_over_contexts():  # plain Keras runs on one device, wherever layers are placed
        if not set(layers).isdisjoint(layer for _, layer in with_inner(model, '')):
            inner, states = keras_versions.inner(model), states_of(model)
            for name in ('%s_function' % kind for kind in KINDS):
                if getattr(inner, name, None) is not None:
                    setattr(inner, name, None)
            divided_model_of(model).make_functions_again(states)
