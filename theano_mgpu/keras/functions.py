"""What Keras calls for each batch, a callable ``f(list) -> list``: here, over several contexts."""
import functools

import numpy as np
import theano

from ..graphs import graph
from ..parallel_function import ParallelFunction
from ..patches import compat
from ..training import TrainingFunction
from .batch import batch_inputs, batch_updates, first_of_each, metric_values
from .optimizer import updates_of
from .parallel_state import parallel_state_of
from .variants import Variants

OPTIONS = ('mode', 'givens')  # those of theano.function that compile() takes


class BatchFunction:
    """Runs a function over a batch, then reads values that it has updated.

    Parameters
    ----------
    variants : Variants
        Of a ParallelFunction or TrainingFunction.
    values : list of theano.Variable
        Functions of shared variables, read after the batch and added to the outputs.
    mode : str or theano.Mode, optional
    looks_ahead : bool
        Whether the next batch is sent while one is computed, where Keras's loop is known (see `prefetch`).

    Attributes
    ----------
    samples : int
        Of the last batch, on all ranks.
    """

    def __init__(self, variants, values=(), mode=None, looks_ahead=False):
        self._variants = variants
        mode = theano.compile.get_mode(mode).excluding('gpuarray_opt')
        self._read = compat.plain_function([], graph.host_graph(list(values)), mode=mode) if values else list
        self._looks_ahead = looks_ahead and self.function.on_devices
        self.checkpoint = None  # a keras.Checkpoint, during a fit
        self.observer = None  # a callable ``observer(function, inputs, compute)`` that returns what ``compute()`` does
        self.samples = 0
        self.begin()

    @property
    def function(self):
        """The ParallelFunction or TrainingFunction that runs the batches."""
        return self._variants.function

    def __call__(self, inputs):
        compute = functools.partial(self._run, inputs)
        if self.observer is not None:
            compute = functools.partial(self.observer, self, inputs, compute)
        return self.checkpoint.replay_or_compute(self, inputs, compute) if self.checkpoint else compute()

    def _run(self, inputs):
        function = self._variants.of(inputs)
        if self._looks_ahead and compat.keras_batches is not None:
            function.look_ahead.next_batch = functools.partial(compat.keras_batches.after, inputs)
        try:
            ran, outputs = self._variants.run(function, inputs)
        finally:
            function.look_ahead.next_batch = None  # it holds the data of the loop
        self.samples = ran.samples
        return self._reported(outputs if isinstance(outputs, list) else [outputs], self.samples)

    def _reported(self, outputs, samples):
        outputs = outputs + self._read()
        if outputs and np.ndim(outputs[0]) == 0:
            self._loss += float(outputs[0]) * samples
            self._samples += samples
        return outputs

    def forget_prepared(self):
        """Let go of a batch that was sent ahead and does not come."""
        self.function.look_ahead.forget()

    def begin(self):
        """Begin an epoch."""
        self._loss, self._samples = 0.0, 0

    def join(self):
        """Where each process feeds its own data, wait until the others' has ended, too.

        Returns
        -------
        list of float, or None
            The loss and metrics of all the data since `begin`. None where they are known already: without
            processes, or where each is given the whole batches.
        """
        if not self.function.sharded:
            return None
        for outputs, samples in self.function.joined():
            self._reported(outputs, samples)
        return [self._loss / self._samples] + self._read() if self._samples else None


def train_function(model):
    """The train function of a compiled model."""
    state, updates = parallel_state_of(model), batch_updates(model)
    made = []

    def make(contexts, free):
        loss, *new = free([model.total_loss] + list(updates.values()))
        # Another form of the step goes on with the optimizer's state of the first one.
        optimizer_updates = updates_of(model.optimizer, state.continued or bool(made))
        step = TrainingFunction(batch_inputs(model), loss, model._collected_trainable_weights, optimizer_updates,
                                batch_updates=dict(zip(updates, new)), contexts=contexts, name='train_function',
                                **_options(model))
        made.append(True)
        return step
    return BatchFunction(Variants(make, model, state), metric_values(model), _options(model).get('mode'),
                         looks_ahead=True)


def test_function(model):
    """The test function of a compiled model: loss and metrics."""
    updates = batch_updates(model, training=False)

    def make(contexts, free):
        loss, *new = free([model.total_loss] + list(updates.values()))
        return ParallelFunction(batch_inputs(model), [loss], dict(zip(updates, new)), contexts=contexts,
                                name='test_function', **_options(model))
    return BatchFunction(Variants(make, model, parallel_state_of(model)), metric_values(model),
                         _options(model).get('mode'))


def predict_function(model):
    """The predict function of a model: its outputs."""
    updates = first_of_each(model.state_updates)

    def make(contexts, free):
        new = free(model.outputs + list(updates.values()))
        outputs, new = new[:len(model.outputs)], new[len(model.outputs):]
        return ParallelFunction(batch_inputs(model, targets=False), outputs, updates=dict(zip(updates, new)),
                                contexts=contexts, name='predict_function', **_options(model))
    return BatchFunction(Variants(make, model, parallel_state_of(model)))


def _options(model):
    return dict(getattr(model, '_function_kwargs', {}), allow_input_downcast=True)


def check_options(options):
    """Raise a ValueError for a keyword of `compile` that is not for `theano.function`."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError('compile() of a parallel model does not take %s; it takes %s besides the arguments of '
                         'keras.Model.compile, which go to theano.function'
                         % (', '.join(unknown), ' and '.join(OPTIONS)))
