"""`place`: put the layers of a Keras model that exists on devices."""
from fnmatch import fnmatchcase

import keras
import theano
from theano.gof.graph import io_toposort

from ..patches.placement_tags import place_of
from ..placement.blocks import place as place_variable
from ..placement.blocks import place_name
from .batch import first_of_each
from .multi_gpu import check_built
from .parallel_state import models_over_contexts, parallel_state_of

FUNCTIONS = ('train_function', 'test_function', 'predict_function')


def place(model, devices):
    """Place layers of a model that exists on devices.

    It is for models that are not built within ``with mgpu.device(name):`` blocks: those of `keras.applications`, or
    those that were loaded from a file. The weights, the ops and the regularisers of each named layer are placed. Layers
    without a name here run where their neighbours do, as `device` says. Results do not change, and what `save` writes
    does not say where layers are placed.

    Parameters
    ----------
    model : keras.Model
        Built. Functions over contexts that it has, or that another model with its layers has, such as that of
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
    >>> import keras, numpy as np, theano_mgpu
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,), name='first'),
    ...                           keras.layers.Dense(2, name='second')])
    >>> model = place(model, {'f*': 'dev0', 'second': 'dev1'})
    >>> layer_places(model)
    {'first': 'dev0', 'second': 'dev1'}
    """
    if not isinstance(devices, dict) or not all(isinstance(name, str) for name in devices):
        raise ValueError("place takes a dict of the names of layers, or patterns, to devices, such as {'dense_*': "
                         "'dev0'}, not %r" % (devices,))
    layers = named_layers(model)
    devices = {name: place_name(device) for name, device in devices.items()}
    for pattern in devices:
        if not any(_matches(pattern, path) for path in layers):
            raise ValueError('no layer of %s matches %r; its layers are: %s' % (model.name, pattern, ', '.join(layers)))
    chosen = {path: device for pattern, device in devices.items() for path in layers if _matches(pattern, path)}
    for path in sorted(layers, key=lambda path: path.count('/')):  # nested models before their layers
        inner = [other for other in layers if other.startswith(path + '/')]
        if not chosen.keys().isdisjoint(inner):
            # It is not known which ops of a call of this model are those of a layer: they run beside the weights.
            _forget_ops(layers[path])
        elif path in chosen:
            _place_layer(layers[path], chosen[path])
        if path in chosen:
            for other in set(inner).difference(chosen):
                _place_layer(layers[other], chosen[path])
    _make_functions_again(layers.values())
    return model


def named_layers(model):
    """The layers of a model.

    Parameters
    ----------
    model : keras.Model

    Returns
    -------
    dict of str to keras.layers.Layer
        By name, in their order. A nested model is among them; its layers follow, such as ``'model_1/dense_2'``.

    Raises
    ------
    ValueError
        If the model is not built.
    """
    check_built(model, 'place')
    return dict(_with_inner(model, ''))


def _with_inner(model, prefix):
    for layer in model.layers:
        yield prefix + layer.name, layer
        if isinstance(layer, keras.Model):
            yield from _with_inner(layer, prefix + layer.name + '/')


def layer_places(model):
    """Where the layers of a model are.

    Parameters
    ----------
    model : keras.Model
        Built, placed or not.

    Returns
    -------
    dict of str to (str or None)
        The place of each layer, by its name as in `named_layers`: that of its weights, else of its ops; None for one
        that runs where its neighbours do.
    """
    return {path: _place_of_layer(layer) for path, layer in named_layers(model).items()}


def _matches(pattern, path):
    return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition('/')[2], pattern)


def _place_layer(layer, device):
    for variable in layer.weights + _ops_of(layer):
        place_variable(variable, device)


def _forget_ops(layer):
    for variable in _ops_of(layer):
        for output in variable.owner.outputs if variable.owner else [variable]:
            output.tag.mgpu_place = None


def _place_of_layer(layer):
    inner = {layer_place for each in getattr(layer, 'layers', ()) for layer_place in [_place_of_layer(each)]}
    if inner:  # a nested model
        return inner.pop() if len(inner) == 1 else None
    places = [place_of(variable) for variable in layer.weights + _ops_of(layer)]
    return next((place for place in places if isinstance(place, str)), None)


def _ops_of(layer):
    """The inputs that a layer stands for, and an output of each op that it has made: between its tensors, of its
    regularisers, and of its updates.
    """
    calls = layer._inbound_nodes
    given = [tensor for call in calls for tensor in call.input_tensors + call.input_masks if tensor is not None]
    made = [tensor for call in calls for tensor in call.output_tensors + call.output_masks if tensor is not None]
    made += list(layer.losses) + list(first_of_each(layer.updates).values())
    inputs = [tensor for tensor in made if tensor in given and tensor.owner is None]
    return inputs + [node.outputs[0] for node in io_toposort(list(given), [v for v in made if _is_symbolic(v)])]


def _is_symbolic(value):
    return isinstance(value, theano.Variable)  # a regulariser of a weight of no size is a number


def _make_functions_again(layers):
    """Have the functions over contexts of all models with some of these layers made again; optimizers keep their state.
    """
    for model in models_over_contexts():  # plain Keras runs on one device, wherever layers are placed
        if not set(layers).isdisjoint(layer for _, layer in _with_inner(model, '')):
            for name in FUNCTIONS:
                if getattr(model, name, None) is not None:
                    setattr(model, name, None)
            state = parallel_state_of(model)
            state.functions.clear()
            state.continued = state.continued or bool(model._is_compiled and model.optimizer.weights)
