"""`theano_mgpu.keras.verify`: compares one step on one device with one on several contexts."""
from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import theano
from keras import backend as K
from keras.backend.theano_backend import Function
from keras.models import Model

from ...auto.parallel_state import ParallelState, parallel_state_of
from ...auto.steps import length_of
from ...compat import keras_versions
from ...compat.theano_functions import plain_function
from ...devices.context_map import Context
from ...errors import MgpuError
from ...graph.graph import shared_variables
from ...graph.prints import without_prints
from ...graph.rewrites import substitute
from ...graph.updates import of_type
from ...parallel_function import ParallelFunction
from ...runtime.state.random_states import random_states, set_random_states
from ...runtime.verification.comparison import on_both_sides, rows_of
from ...runtime.verification.report import TOLERANCE, VerificationReport, largest
from ...utils import mpi_environment
from ..models import batch_inputs, new_values, takes_phase
from .arguments import chosen_contexts


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
    state = parallel_state_of(model)
    contexts = state.contexts if gpus is None and state else chosen_contexts(gpus)
    inner = keras_versions.inner(model)
    data = inner._standardize_user_data(x, y, sample_weight=sample_weight)
    return verify_batch(inner, 'train', sum(map(list, data), []), contexts, tolerance)


def check_alone() -> None:
    """Raise an MgpuError if several processes train together."""
    if mpi_environment.trains_together():
        raise MgpuError('verify compares one device with the contexts of one process: run it without mpirun')


def verify_batch(model: Model, kind: str, arrays: list[Any], contexts: list[Context],
                 tolerance: float | None = None) -> VerificationReport:
    """Compare a batch, as Keras standardises it, on one device and on contexts; nothing is changed.

    Parameters
    ----------
    model : keras.Model
        Compiled, unless it predicts.
    kind : {'train', 'test', 'predict'}
        Compare a training step; the loss and metrics without training; or the outputs.
    arrays : list of ndarray
        Inputs, targets and sample weights, as Keras feeds them. A prediction takes only the inputs.
    contexts : list of Context
    tolerance : float, optional

    Returns
    -------
    VerificationReport
    """
    updates = _updates_of_train_function(model) if kind == 'train' else new_values(model, kind)
    batch, before = _Batch(model, kind, updates), parallel_state_of(model)
    state = before.over(contexts) if before else ParallelState(model.name, contexts)
    inputs = arrays[:len(batch.inputs)]
    if takes_phase(model):
        inputs[len(batch.inputs) - 1:] = [int(kind == 'train')]
    with _restored(model, batch):
        one, many = on_both_sides('verify %s' % model.name, functools.partial(batch.on_one_device, inputs),
                                  functools.partial(batch.over_contexts, state, inputs))
    tolerance = tolerance or TOLERANCE[K.floatx()]
    left_out = _without_gradient(one, tolerance)
    rows = rows_of(list(one), list(one.values()), [many[key] for key in one])
    rows = [row for row in rows if (row.kind, row.name) not in left_out]
    return VerificationReport(rows, state.contexts, tolerance, [name for kind, name in left_out if kind == 'weight'])


class _Batch:
    """The computation of a batch by a model, on one device or over contexts, with all values to compare.

    Parameters
    ----------
    model : keras.Model
    kind : {'train', 'test', 'predict'}
    updates : dict of SharedVariable to theano.Variable
        New values.
    """

    def __init__(self, model, kind, updates):
        self._name, self.updated = kind + '_function', list(updates)
        self._options = dict(getattr(model, '_function_kwargs', {}), allow_input_downcast=True)
        self.inputs = batch_inputs(model, targets=kind != 'predict')
        self._outputs = _outputs(model, kind, updates)  # by kind and name, as in a VerificationReport
        self._states = _states(model) if kind == 'train' else {}  # values after the batch, by kind and name
        # A script's prints appear once.
        self.expressions = without_prints([*self._outputs.values(), *updates.values()])

    def on_one_device(self, inputs: list[Any]) -> dict[tuple[str, str], np.ndarray]:
        """Return outputs and states, by kind and name, as plain Theano computes them. No variable changes."""
        results = plain_function(self.inputs, self.expressions, no_default_updates=True, on_unused_input='ignore',
                                 **self._options)(*inputs)
        new = dict(zip(self.updated, results[len(self._outputs):]))
        values = {key: np.array(value) for key, value in zip(self._outputs, results)}
        for key, variable in self._states.items():
            values[key] = np.array(new[variable]) if variable in new else K.get_value(variable)
        return values

    def over_contexts(self, state: ParallelState, inputs: list[Any]) -> dict[tuple[str, str], np.ndarray]:
        """Return the same over the contexts of a ParallelState; variables have their new values afterwards."""
        outputs, new = self.expressions[:len(self._outputs)], self.expressions[len(self._outputs):]
        function = ParallelFunction(self.inputs, outputs, dict(zip(self.updated, new)), contexts=state.contexts,
                                    name=self._name, length=length_of(inputs), **self._options)
        if function.refused:
            state.cannot_divide(function)
        results = function(*inputs)
        values = {key: np.array(value) for key, value in zip(self._outputs, results)}
        values.update((key, K.get_value(variable)) for key, variable in self._states.items())
        return values


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


def _updates_of_train_function(model):
    """Return the new values that the train function of a model gives, by variable; an MgpuError if they are not known.
    """
    state = parallel_state_of(model)
    functions = state.functions if state else {}
    if 'train' not in functions:
        model._make_train_function()
    if 'train' in functions:
        return functions['train'].updates
    if not isinstance(model.train_function, Function):
        raise MgpuError('the train function of %s is %r, which neither Keras nor theano_mgpu has made: its updates are '
                        'not known. Verify before it is replaced' % (model.name, model.train_function))
    inputs = model.train_function.function.maker.inputs
    return {each.variable: each.update for each in inputs if each.update is not None}


@contextlib.contextmanager
def _restored(model, batch):
    """Set the metrics of a model to 0; restore them afterwards, and the variables that the batch changes."""
    changed = batch.updated + keras_versions.metric_weights(model)
    changed += [variable for variable in shared_variables(batch.expressions)
                if getattr(variable, 'default_update', None) is not None]  # random states
    before = [(variable, variable.get_value()) for variable in dict.fromkeys(changed)]
    states = random_states()
    try:
        if keras_versions.is_compiled(model):
            keras_versions.reset_metrics(model)
        yield
    finally:
        for variable, value in before:
            variable.set_value(value)
        set_random_states(states)


def _without_gradient(one, tolerance):
    """Return kinds and names of weights, and of their optimizer's states, whose gradient is zero except for rounding.

    Optimizers such as Adam make full steps from it, in any direction.
    """
    gradients = [(name, largest(value)) for (kind, name), value in one.items() if kind == 'gradient']
    most = max([size for _, size in gradients], default=0)
    states = [key for key in one if key[0] == 'optimizer']
    left_out = []
    for i, (name, size) in enumerate(gradients):
        if size <= tolerance * most:
            # First come single states, such as the number of steps; then groups with one state for each weight.
            left_out += [('weight', name)] + states[len(states) % len(gradients) + i::len(gradients)]
    return left_out
