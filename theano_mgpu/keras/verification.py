"""`theano_mgpu.keras.verify`: compares one step on one device with one on several contexts."""
import contextlib
import functools

import keras
import numpy as np
from keras import backend as K

from ..errors import MgpuError
from ..graphs import graph
from ..jobs import mpi_environment
from ..utils.progress import passing_bar
from ..verification.certificate import TOLERANCE, Certificate, Row, largest, relative_difference
from .batch import batch_updates, first_of_each
from .functions import MAKERS
from .methods import plain_maker
from .multi_gpu import chosen_contexts
from .parallel_state import ParallelState, parallel_state_of, set_parallel_state


class _Recording(keras.optimizers.Optimizer):
    """Wraps an optimizer, and records the gradients."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def get_updates(self, loss, params):
        self.gradients = [K.zeros(K.int_shape(param)) for param in params]
        updates = self.optimizer.get_updates(loss=loss, params=params)
        self.weights = self.optimizer.weights
        return updates + list(zip(self.gradients, K.gradients(loss, params)))


def verify(model, x, y, gpus=None, sample_weight=None, tolerance=None):
    """Train one step on one device with plain Keras and on several contexts, from the same state, and compare.

    Parameters
    ----------
    model : keras.Model
        A compiled model, or what `multi_gpu_model` returned. Its state is restored.
    x, y, sample_weight : ndarray, or list or dict of ndarray
        One batch, as for ``model.train_on_batch``.
    gpus : int, list of int or str, or None
        As for `multi_gpu_model`; by default the contexts that the model runs over, or all.
    tolerance : float, optional
        The largest relative difference that counts as rounding: 1e-5 for float32, 1e-10 for float64.

    Returns
    -------
    Certificate
        Print it.

    Raises
    ------
    ValueError
        If the model is not compiled, or `gpus` asks for contexts that do not exist.
    """
    if not model._is_compiled:
        raise ValueError('the model %s is not compiled, so there is no step to compare: call its compile(optimizer, '
                         'loss)' % model.name)
    check_alone()
    contexts = parallel_state_of(model).contexts if gpus is None and parallel_state_of(model) else chosen_contexts(gpus)
    data = model._standardize_user_data(x, y, sample_weight=sample_weight)
    return verify_batch(model, sum(map(list, data), []), contexts, tolerance)


def check_alone():
    """Raise an MgpuError if several processes train together."""
    if mpi_environment.trains_together():
        raise MgpuError('verify compares one device with the contexts of one process: run it without mpirun')


def verify_batch(model, arrays, contexts, tolerance=None):
    """As `verify`, for a batch as Keras standardises it.

    Parameters
    ----------
    model : keras.Model
        Compiled.
    arrays : list of ndarray
        Inputs, targets and sample weights, as Keras feeds them.
    contexts : list of Context
    tolerance : float, optional

    Returns
    -------
    Certificate
    """
    arrays = arrays[:len(model._feed_inputs + model._feed_targets + model._feed_sample_weights)]
    return _compared(model, contexts, tolerance, 'train', lambda make: _after_a_step(model, make, arrays))


def verify_prediction(model, arrays, contexts, tolerance=None):
    """As `verify_batch`, for the outputs of a model, compiled or not, for the inputs in `arrays`."""
    arrays = arrays[:len(model._feed_inputs)]
    return _compared(model, contexts, tolerance, 'predict', lambda make: _predicted(model, make, arrays))


def _compared(model, contexts, tolerance, kind, measure):
    """The Certificate of the values, by kind and name, that ``measure(make)`` returns for plain Keras and for contexts.

    ``make(model)`` returns a function of a `kind`: 'train' or 'predict'.
    """
    before = parallel_state_of(model)
    state = ParallelState(model.name, contexts)
    if before is not None:
        state.notify, state.strict = before.notify, before.strict
    set_parallel_state(model, state)
    try:
        with passing_bar(2, 'sides', 'verify %s' % model.name) as bar:
            one = measure(lambda model: plain_maker(kind, model)())
            bar.update(1)
            many = measure(functools.partial(_parallel_function, kind))
    finally:
        set_parallel_state(model, before)
    tolerance = tolerance or TOLERANCE[K.floatx()]
    left_out = _without_gradient(one, tolerance)
    rows = [row for row in _rows(one, many) if (row.kind, row.name) not in left_out]
    arbitrary = [name for kind, name in left_out if kind == 'weight']
    return Certificate(rows, state.contexts, tolerance, arbitrary)


def _parallel_function(kind, model):
    function = MAKERS[kind](model)
    function.compile()  # which makes the state of the optimizer
    return function


@contextlib.contextmanager
def _restored(model):
    """Restore a model afterwards: weights, metrics, recurrent states, random streams, its optimizer."""
    updates = batch_updates(model) if model._is_compiled else first_of_each(model.state_updates)
    outputs = ([model.total_loss] if model._is_compiled else []) + model.outputs
    variables = graph.shared_variables(outputs + list(updates) + list(updates.values()))
    before = [(variable, variable.get_value()) for variable in variables]
    optimizer = getattr(model, 'optimizer', None)
    try:
        yield
    finally:
        if optimizer is not None:
            model.optimizer = optimizer
        for variable, value in before:
            variable.set_value(value)


def _predicted(model, make_function, arrays):
    """Predict with a new function; returns outputs by kind and name."""
    with _restored(model):
        outputs = make_function(model)(arrays + [0] * model._uses_dynamic_learning_phase())
        return {('output', name): np.array(value) for name, value in zip(model.output_names, outputs)}


def _after_a_step(model, make_function, arrays):
    """Train a step with a new train function; returns values by kind and name."""
    with _restored(model):
        original = model.optimizer
        optimizer = type(original).from_config(original.get_config())
        model.optimizer = _Recording(optimizer)
        function = make_function(model)
        if len(original.weights) == len(optimizer.weights):
            optimizer.set_weights(original.get_weights())
        model.reset_metrics()
        results = np.ravel(function(arrays + [1] * model._uses_dynamic_learning_phase()))
        found = {('loss' if i == 0 else 'metric', name): value
                 for i, (name, value) in enumerate(zip(model.metrics_names, results))}
        trained = model._collected_trainable_weights
        gradients = model.optimizer.gradients
        found.update((('gradient', str(w)), K.get_value(g)) for w, g in zip(trained, gradients))
        found.update((('weight', str(w)), K.get_value(w)) for w in trained)
        found.update((('running statistic', str(w)), K.get_value(w)) for w in model.non_trainable_weights)
        found.update((('optimizer', '%s %d: %s' % (type(optimizer).__name__, i, str(w).split('/')[-1])),
                      K.get_value(w)) for i, w in enumerate(optimizer.weights))
        return found


def _rows(one, many):
    """The Rows that compare the values of one device and of many contexts, two dicts by kind and name.

    A gradient that is zero in theory, such as that of a bias before a batch normalisation, is pure rounding. So
    differences of gradients are relative to the largest gradient of the model.
    """
    gradient = max([largest(value) for (kind, _), value in one.items() if kind == 'gradient'], default=0)
    return [Row(kind, name, np.size(value),
                relative_difference(many[kind, name], value, gradient if kind == 'gradient' else 0))
            for (kind, name), value in one.items()]


def _without_gradient(one, tolerance):
    """Kinds and names of the weights, and of the optimizer's states, whose gradient is zero except for rounding.

    Optimizers such as Adam make full steps from it, in any direction.
    """
    gradients = [(name, largest(value)) for (kind, name), value in one.items() if kind == 'gradient']
    most = max([size for _, size in gradients], default=0)
    states = [key for key in one if key[0] == 'optimizer']
    found = []
    for i, (name, size) in enumerate(gradients):
        if size <= tolerance * most:
            # First come single states, such as the number of steps; then groups with one state for each weight.
            found += [('weight', name)] + states[len(states) % len(gradients) + i::len(gradients)]
    return found
