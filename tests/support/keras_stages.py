"""The training step of a compiled Keras model, whole and in stages."""
import time

from theano_mgpu.graph.partition import partition

import numpy as np
import theano
from keras import backend as K
from theano.gof.graph import ancestors

from .stages import compiled, split


class TrainingStep:
    """The graph that plain Keras compiles for `train_on_batch`, recorded where it does so.

    Attributes
    ----------
    inputs : list of theano.Variable
        Inputs with samples along axis 0.
    outputs : list of theano.Variable
        The loss, metrics without a state, and the new values of `updated`.
    seconds : float
        Time that plain Keras takes to compile the step.
    """

    def __init__(self, model):
        self.model = model
        original, begun = K.function, time.time()
        try:
            K.function = self._recording(original)
            model._make_train_function()
        finally:
            K.function = original
        self.seconds = time.time() - begun
        self.function, model.train_function = model.train_function, self._called

    def _recording(self, original):
        def function(inputs, outputs, updates, **options):
            phase = [v for v in inputs if v.ndim == 0]
            self.inputs = [v for v in inputs if v.ndim > 0]
            self.own = [i for i, output in enumerate(outputs) if not hasattr(output, '_is_metric')]
            new = with_default_updates([outputs[i] for i in self.own], updates)
            self.updated = list(new)
            self.outputs = theano.clone([outputs[i] for i in self.own] + list(new.values()),
                                        replace={v: theano.tensor.constant(1, dtype=v.dtype) for v in phase})
            return original(inputs, outputs, updates=updates, **options)
        return function

    def _called(self, values):
        self.given = values[:len(self.inputs)]
        self.result = self.function(values)
        return self.result

    def state(self):
        return [variable.get_value() for variable in self.updated]

    def restore(self, state):
        for variable, value in zip(self.updated, state):
            variable.set_value(value)


def with_default_updates(outputs, updates):
    """Return the new values: the first one of each variable, and Theano's own for random streams."""
    new = {}
    for variable, value in updates:
        new.setdefault(variable, theano.tensor.as_tensor_variable(value))
    while True:
        found = {v: v.default_update for v in ancestors(outputs + list(new.values()))
                 if getattr(v, 'default_update', None) is not None and v not in new}
        if not found:
            return new
        new.update(found)


def compare(model, batches, sizes, mode, tolerance=1e-9, **options):
    """Train as plain Keras does, then in stages from the same weights, and compare after each step.

    Parameters
    ----------
    batches : list of (inputs, targets) or (inputs, targets, sample weights)
    sizes : list of int
        Samples of each shard.

    Returns
    -------
    TrainingStep, Program, float
        The float is the time of `partition` in seconds.
    """
    step = TrainingStep(model)
    first, expected = step.state(), []
    for x, y, *weights in batches:
        model.train_on_batch(x, y, sample_weight=weights[0] if weights else None, reset_metrics=False, **options)
        expected.append((step.given, [step.result[i] for i in step.own] + step.state()))
    step.restore(first)
    begun = time.time()
    program = partition(step.inputs, step.outputs)
    seconds = time.time() - begun
    run = compiled(program, mode)
    for given, whole in expected:
        found = run(split([np.asarray(a, v.dtype) for a, v in zip(given, step.inputs)], sizes))
        step.restore(found[len(step.own):])
        for name, one, ours in zip(['loss or metric'] * len(step.own) + [v.name for v in step.updated], whole, found):
            assert np.shape(ours) == np.shape(one), name
            scale = max(1e-6, np.abs(one).max()) if np.size(one) else 1
            np.testing.assert_allclose(ours / scale, one / scale, rtol=0, atol=tolerance, err_msg=name)
    return step, program, seconds
