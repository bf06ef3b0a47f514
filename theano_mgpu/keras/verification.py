"""`theano_mgpu.keras.verify`: compares one step on one device with one on several contexts."""
import contextlib
import functools

from keras import backend as K

from ..errors import MgpuError
from ..jobs import mpi_environment
from ..verification.comparison import on_both_sides, rows_of
from ..verification.report import TOLERANCE, VerificationReport, largest
from .computations import evaluation, prediction, training_step
from .fit_record import random_states, set_random_states
from .multi_gpu import chosen_contexts
from .parallel_state import ParallelState, parallel_state_of


def verify(model, x, y, gpus=None, sample_weight=None, tolerance=None):
    """Train one step on one device and on several contexts, from the same state, and compare.

    Both sides compute the updates of the model's own train function, which is made if there is none yet: whatever the
    model's optimizer does, it is asked once. The state of the model stays as it is.

    Parameters
    ----------
    model : keras.Model
        A compiled model, or what `multi_gpu_model` returned.
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
    VerificationReport
    """
    return _compared(model, training_step(model), _fed(model, arrays), contexts, tolerance)


def verify_evaluation(model, arrays, contexts, tolerance=None):
    """As `verify_batch`, for a batch that the model does not train on: its loss and metrics."""
    return _compared(model, evaluation(model), _fed(model, arrays), contexts, tolerance)


def _fed(model, arrays):
    return arrays[:len(model._feed_inputs + model._feed_targets + model._feed_sample_weights)]


def verify_prediction(model, arrays, contexts, tolerance=None):
    """As `verify_batch`, for the outputs of a model, compiled or not, for the inputs in `arrays`."""
    return _compared(model, prediction(model), arrays[:len(model._feed_inputs)], contexts, tolerance)


def _compared(model, computation, arrays, contexts, tolerance):
    """Return the VerificationReport of a computation on one device and on contexts; it changes nothing.

    Parameters
    ----------
    model : keras.Model
    computation : Computation
    arrays : list of ndarray
    contexts : list of Context
    tolerance : float or None
    """
    before, state = parallel_state_of(model), ParallelState(model.name, contexts)
    if before is not None:
        state.notify, state.strict = before.notify, before.strict
    inputs = arrays + [computation.learning_phase] * model._uses_dynamic_learning_phase()
    with _restored(model, computation):
        one, many = on_both_sides('verify %s' % model.name, functools.partial(computation.on_one_device, inputs),
                                  functools.partial(computation.over_contexts, state, inputs))
    tolerance = tolerance or TOLERANCE[K.floatx()]
    left_out = _without_gradient(one, tolerance)
    rows = rows_of(list(one), list(one.values()), [many[key] for key in one])
    rows = [row for row in rows if (row.kind, row.name) not in left_out]
    arbitrary = [name for kind, name in left_out if kind == 'weight']
    return VerificationReport(rows, state.contexts, tolerance, arbitrary)


@contextlib.contextmanager
def _restored(model, computation):
    """Set the metrics of a model to 0; restore them afterwards, and what the computation changes."""
    metrics = [weight for metric in getattr(model, 'metrics', ()) for weight in metric.weights]
    before = [(variable, variable.get_value()) for variable in dict.fromkeys(computation.changed() + metrics)]
    states = random_states()
    try:
        if model._is_compiled:
            model.reset_metrics()
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
    found = []
    for i, (name, size) in enumerate(gradients):
        if size <= tolerance * most:
            # First come single states, such as the number of steps; then groups with one state for each weight.
            found += [('weight', name)] + states[len(states) % len(gradients) + i::len(gradients)]
    return found
