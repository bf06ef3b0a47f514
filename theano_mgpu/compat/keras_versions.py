"""The version of the Keras that is installed, 0.3 to 2.3.1, and the parts that depend on it.

A version without a part loses an extra, never the answer: `docs/guide/keras_versions.md` has the table.
"""
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
    """Return whether `theano_mgpu.keras` knows this Keras; the models of others are functions of Theano alone."""
    return number() >= (1, 0)


def is_compiled(model: Any) -> bool:
    """Return whether `compile` of a model was called."""
    return getattr(inner(model), '_is_compiled', hasattr(inner(model), 'optimizer'))  # the former since Keras 2.2


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
    inputs = getattr(model, '_feed_inputs', None)  # a class of the user's may have None for each unknown name
    return model.inputs if inputs is None else inputs


def trained_weights(model: Any) -> list[Any]:
    """Return the weights that a compiled model trains; none if it is not compiled."""
    if number() == (1, 0):  # it does not keep them
        return importlib.import_module('keras.engine.training').collect_trainable_weights(model)
    return getattr(model, '_collected_trainable_weights', None) or []


def metric_values(model: Any) -> list[Any]:
    """Return the metrics of a compiled model; since Keras 2.3, as functions of their states."""
    if number() < (2, 3):
        return model.metrics_tensors
    return [metric._call_result for metric in model._get_training_eval_metrics() if hasattr(metric, '_call_result')]


def metric_weights(model: Any) -> list[Any]:
    """Return the states of all metrics of a model, compiled or not; before Keras 2.1.4, they have none."""
    if number() < (2, 3):
        return [variable for variable, _ in getattr(model, 'metrics_updates', None) or []]
    return [weight for metric in model.metrics for weight in metric.weights]


def reset_metrics(model: Any) -> None:
    """Set the states of the metrics of a compiled model to 0."""
    for metric in getattr(model, 'stateful_metric_functions', None) or ():  # Keras 2.1.4 to 2.2
        metric.reset_states()
    if number() >= (2, 3):
        model.reset_metrics()


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments with which a model was compiled."""
    model = inner(model)
    names = ['optimizer', 'loss', 'metrics', 'loss_weights', 'sample_weight_mode']
    names += ['weighted_metrics'] * (number() >= (2, 0))
    prefix = '_compile_' if number() >= (2, 3) else ''
    return dict({name: getattr(model, prefix + name if 'metrics' in name else name) for name in names},
                **model._function_kwargs)


def calls_of(layer: Any) -> list[Any]:
    """Return the calls of a layer, as Keras's nodes."""
    return layer._inbound_nodes if hasattr(layer, '_inbound_nodes') else layer.inbound_nodes  # before Keras 2.1.3


def calls_by_depth(model: Any) -> dict[int, list[Any]]:
    """Return the calls of the layers of a model by their distance from the outputs."""
    model = inner(model)
    return model._nodes_by_depth if hasattr(model, '_nodes_by_depth') else model.nodes_by_depth


def loop_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return the `params` that a loop gives its callbacks under the names of Keras 2."""
    names = {'nb_epoch': 'epochs', 'nb_sample': 'samples'}
    return {names.get(name, name): value for name, value in params.items()}


def tells_of_tests() -> bool:
    """Return whether evaluation and prediction have callbacks, as since Keras 2.3."""
    return number() >= (2, 3)


def has_open_queues() -> bool:
    """Return whether loops over generators and Sequences take batches from queues of futures, or from no queue with
    ``workers=0``, as since Keras 2.2.
    """
    return number() >= (2, 2)


def standardize(model: Any, x: Any) -> list[Any]:
    """Return the arrays for a model's inputs, checked as in the `predict` of this Keras, which takes `x`."""
    from keras.engine import training
    model, x = inner(model), list(x) if isinstance(x, list) else x  # some Kerases change the list
    if number() >= (2, 2):
        return model._standardize_user_data(x)[0]
    if number() >= (2, 0):
        return training._standardize_input_data(x, model._feed_input_names, model._feed_input_shapes, False)
    return training.standardize_input_data(x, model.input_names, model.internal_input_shapes, False)


def sequence_class() -> Any:
    """Return `keras.utils.Sequence`, a class of Keras 2; `object` before."""
    return getattr(importlib.import_module('keras.utils'), 'Sequence', object)


def is_sequence(x: Any) -> bool:
    """Return whether `x` is a `keras.utils.Sequence`, or looks like one to this Keras."""
    if number() >= (2, 3):
        return importlib.import_module('keras.engine.training_utils').is_sequence(x)
    return number() >= (2, 0) and isinstance(x, sequence_class())


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
