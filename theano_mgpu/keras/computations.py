"""What the functions of a Keras model compute, as graphs that can be compiled again elsewhere."""
import numpy as np
import theano
from keras import backend as K
from keras.backend.theano_backend import Function

from ..errors import MgpuError
from ..graphs.graph import shared_variables
from ..graphs.prints import without_prints
from ..graphs.rewrites import substitute
from ..graphs.updates import of_type
from ..parallel_function import ParallelFunction
from ..patches.theano_functions import plain_function
from .batch import batch_inputs, first_of_each, metric_values, test_updates, training_updates
from .functions import options_of
from .parallel_state import parallel_state_of
from .variants import Variants


class Computation:
    """Outputs and new values of a model for a batch, on one device or over contexts.

    Parameters
    ----------
    name : str
        Of the function that computes them.
    inputs : list of theano.Variable
    outputs : dict of (str, str) to theano.Variable
        By kind and name, as in a VerificationReport.
    updates : dict of SharedVariable to theano.Variable
        New values.
    states : dict of (str, str) to SharedVariable
        Variables whose values after the batch are compared, too, by kind and name.
    options : dict
        Keywords for `theano.function`.

    Attributes
    ----------
    learning_phase : int
        What Keras feeds for it.
    """

    def __init__(self, name, inputs, outputs, updates, states, options):
        self._name, self._inputs, self._outputs, self._states, self._options = name, inputs, outputs, states, options
        self._updated = list(updates)
        # What a script prints, it prints once.
        self._expressions = without_prints([*outputs.values(), *updates.values()])
        self.learning_phase = int(name == 'train_function')

    def changed(self):
        """List the variables that the computation changes over contexts: those that it updates, and random states."""
        drawn = [variable for variable in shared_variables(self._expressions)
                 if getattr(variable, 'default_update', None) is not None]
        return self._updated + [variable for variable in drawn if variable not in self._updated]

    def on_one_device(self, inputs):
        """Return outputs and states, by kind and name, as plain Theano computes them. No variable changes."""
        found = plain_function(self._inputs, self._expressions, no_default_updates=True, on_unused_input='ignore',
                               **self._options)(*inputs)
        new = dict(zip(self._updated, found[len(self._outputs):]))
        values = {key: np.array(value) for key, value in zip(self._outputs, found)}
        for key, variable in self._states.items():
            values[key] = np.array(new[variable]) if variable in new else K.get_value(variable)
        return values

    def over_contexts(self, state, inputs):
        """Return the same over the contexts of a ParallelState; variables have their new values afterwards."""
        def make(contexts, expressions):
            outputs, new = expressions[:len(self._outputs)], expressions[len(self._outputs):]
            return ParallelFunction(self._inputs, outputs, dict(zip(self._updated, new)), contexts=contexts,
                                    name=self._name, **self._options)
        found = Variants(self._expressions, make, self._inputs, state).of(inputs)(*inputs)
        values = {key: np.array(value) for key, value in zip(self._outputs, found)}
        values.update((key, K.get_value(variable)) for key, variable in self._states.items())
        return values


def prediction(model):
    """Return the Computation of a model's outputs, compiled or not."""
    outputs = {('output', name): output for name, output in zip(model.output_names, model.outputs)}
    return Computation('predict_function', batch_inputs(model, targets=False), outputs,
                       first_of_each(model.state_updates), {}, options_of(model))


def evaluation(model):
    """Return the Computation of a compiled model's loss and metrics for a batch that it does not train on."""
    updates = test_updates(model)
    return Computation('test_function', batch_inputs(model), _results(model, updates), updates, {}, options_of(model))


def training_step(model):
    """Return the Computation of a training step of a compiled model, by the updates of its own train function.

    Raises
    ------
    MgpuError
        If these are not known.
    """
    updates = _updates_of_train_function(model)
    trained, optimizer = model._collected_trainable_weights, model.optimizer
    gradients = theano.grad(model.total_loss, trained, disconnected_inputs='ignore') if trained else []
    outputs = _results(model, updates)
    outputs.update((('gradient', str(weight)), gradient) for weight, gradient in zip(trained, gradients))
    states = {('weight', str(weight)): weight for weight in trained}
    states.update((('running statistic', str(weight)), weight) for weight in model.non_trainable_weights)
    states.update((('optimizer', '%s %d: %s' % (type(optimizer).__name__, i, str(weight).split('/')[-1])), weight)
                  for i, weight in enumerate(optimizer.weights))
    return Computation('train_function', batch_inputs(model), outputs, updates, states, options_of(model))


def _results(model, updates):
    """Return the loss and the metrics, by kind and name, where metrics read the new values of their states."""
    names = [('loss', model.metrics_names[0])] + [('metric', name) for name in model.metrics_names[1:]]
    new = {variable: of_type(variable, value) for variable, value in updates.items()}
    return dict(zip(names, [model.total_loss] + substitute(metric_values(model), new)))


def _own_train_function(model):
    """Return the BatchFunction that trains a model, or None."""
    state = parallel_state_of(model)
    return state and state.functions.get('train')


def _updates_of_train_function(model):
    """Return the new values that the train function of a model gives, by variable."""
    function = _own_train_function(model)
    if function is None:
        model._make_train_function()
        function = _own_train_function(model)
    pairs = getattr(function, 'optimizer_updates', None)
    if pairs is not None:
        return training_updates(model, pairs)
    if not isinstance(model.train_function, Function):
        raise MgpuError('the train function of %s is %r, which neither Keras nor theano_mgpu has made: its updates are '
                        'not known. Verify before it is replaced' % (model.name, model.train_function))
    given = model.train_function.function.maker.inputs
    return {each.variable: each.update for each in given if each.update is not None}
