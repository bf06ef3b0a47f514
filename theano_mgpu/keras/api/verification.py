"""`theano_mgpu.keras.verify`: compares one step on one device with one on several contexts."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import theano
from keras.backend.theano_backend import Function
from keras.models import Model

from ...auto.definition import Definition
from ...auto.divided_model import DividedModel, divided_model_of
from ...auto.model_function import length_of
from ...checks.verification import VerificationReport, check_alone, unchanged, verified
from ...compat import keras_versions
from ...devices.asked_contexts import chosen_contexts
from ...devices.context_map import Context
from ...errors import MgpuError, named
from ...graph.rewrites import substitute, take_prints
from ...graph.updates import of_type
from ...parallel_function import ParallelFunction
from ...runtime.state.random_states import random_states, set_random_states


def verify(model: Model, x: Any, y: Any, gpus: Any = None, sample_weight: Any = None,
           tolerance: float | None = None) -> VerificationReport:
    """Train one step on one device and on several contexts, from the same state, and compare.

    Both sides compute the updates of the model's own train function, which is made if there is none yet: whatever the
    model's optimizer does, it is asked once. The state of the model stays as it is.

    Parameters
    ----------
    model : keras.Model
        A compiled model, or one from `multi_gpu_model`.
    x, y, sample_weight : ndarray, or list or dict of ndarray
        One batch, as for ``model.train_on_batch``.
    gpus : int, list of int or str, or None
        As for `multi_gpu_model`; by default the contexts that the model runs over, or all.
    tolerance : float, optional
        The largest relative difference that counts as rounding: 1e-5 for float32, 1e-10 for float64.

    Returns
    -------
    VerificationReport
        Print it.

    Raises
    ------
    ValueError
        If the model is not compiled, or `gpus` asks for contexts that do not exist.
    MgpuError
        If the model's train function is neither Keras's nor one over contexts, so that its updates are not known.
    """
    if not keras_versions.is_compiled(model):
        raise ValueError('the model %s is not compiled, so there is no step to compare: call its compile(optimizer, '
                         'loss)' % model.name)
    check_alone()
    divided = divided_model_of(model)
    contexts = divided.contexts if gpus is None and divided else chosen_contexts(gpus)
    inner = keras_versions.inner(model)
    data = inner._standardize_user_data(x, y, sample_weight=sample_weight)
    inputs, updates = _train_function(inner)
    return verify_batch(inner, 'train', inputs, updates, sum(map(list, data), []), contexts, tolerance)


def verify_batch(model: Model, kind: str, inputs: Sequence[Any], updates: Mapping[Any, Any], arrays: list[Any],
                 contexts: list[Context], tolerance: float | None = None) -> VerificationReport:
    """Compare a batch, as Keras standardises it, on one device and on contexts; nothing is changed.

    Parameters
    ----------
    model : keras.Model
        Compiled, unless it predicts.
    kind : {'train', 'test', 'predict'}
        Compare a training step; the loss and metrics without training; or the outputs.
    inputs, updates
        Of the model's function of this kind.
    arrays : list of ndarray
        The arguments of the function. The learning phase may be left out.
    """
    outputs, states = _outputs(model, kind, updates), _states(model) if kind == 'train' else {}
    arrays = arrays + [int(kind == 'train')] * (len(inputs) - len(arrays))
    _, silent, new = take_prints(list(outputs.values()), updates)  # a script's prints appear once
    random = random_states()
    try:
        with unchanged(keras_versions.metric_weights(model)):
            if keras_versions.is_compiled(model):
                keras_versions.reset_metrics(model)
            function = ParallelFunction(inputs, silent[:len(outputs)], new, contexts=contexts,
                                        name=kind + '_function', length=length_of(arrays),
                                        allow_input_downcast=True, **getattr(model, '_function_kwargs', {}))
            if function.refused:
                (divided_model_of(model) or DividedModel(model.name, contexts)).cannot_divide(function)
            return verified(function, arrays, {}, tolerance, [*outputs, *states], list(states.values()))
    finally:
        set_random_states(random)


def _outputs(model, kind, updates):
    """Return the outputs of a model, or its loss, metrics and gradients, by kind and name."""
    if kind == 'predict':
        return {('output', name): output for name, output in zip(model.output_names, model.outputs)}
    names = [('loss', model.metrics_names[0])] + [('metric', name) for name in model.metrics_names[1:]]
    new = {variable: of_type(variable, value) for variable, value in updates.items()}  # metrics read these
    outputs = dict(zip(names, [model.total_loss] + substitute(keras_versions.metric_values(model), new)))
    trained = keras_versions.trained_weights(model) if kind == 'train' else []
    gradients = theano.grad(model.total_loss, trained, disconnected_inputs='ignore') if trained else []
    outputs.update((('gradient', str(weight)), gradient) for weight, gradient in zip(trained, gradients))
    return outputs


def _states(model):
    """Return the weights of a model and the states of its optimizer, by kind and name."""
    optimizer = model.optimizer
    states = {('weight', str(weight)): weight for weight in keras_versions.trained_weights(model)}
    states.update((('running statistic', str(weight)), weight) for weight in model.non_trainable_weights)
    states.update((('optimizer', '%s %d: %s' % (type(optimizer).__name__, i, str(weight).split('/')[-1])), weight)
                  for i, weight in enumerate(optimizer.weights))
    return states


def _train_function(model):
    """Return the inputs of the train function of a model, and its updates; an MgpuError if they are not known."""
    divided = divided_model_of(model)
    functions = divided.functions if divided else {}
    if 'train' not in functions:
        model._make_train_function()
    if 'train' in functions:
        return functions['train'].arguments['params'], functions['train'].updates
    if not isinstance(model.train_function, Function):
        raise MgpuError('the train function of %s is %s, which neither Keras nor theano_mgpu has made: its updates are '
                        'not known. Verify before it is replaced' % (model.name, named(model.train_function)))
    definition = Definition(model.train_function.function)
    return [each.variable for each in definition.inputs], definition.updates
