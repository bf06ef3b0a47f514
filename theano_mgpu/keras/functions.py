"""What Keras calls for each batch, a callable ``f(list) -> list``: here, over several contexts."""
import functools

import numpy as np
import theano

from .. import compat, graph
from ..function import ParallelFunction
from ..training import TrainingFunction
from .batch import batch_inputs, batch_updates, first_of_each, metric_values
from .exactness import has_batch_normalization
from .optimizer import updates_of
from .spread import spread_of

OPTIONS = ('mode', 'givens')  # those of theano.function that compile() takes


class BatchFunction:
    """Runs a function over a batch, then reads values that it has updated.

    Parameters
    ----------
    function : ParallelFunction or TrainingFunction
    values : list of theano.Variable
        Functions of shared variables, read after the batch and added to the outputs.
    mode : str or theano.Mode, optional
    n_losses : int
        How many of the values are losses: 1 where the loss is the first of them, not an output.
    looks_ahead : bool
        Whether the next batch is sent while one is computed, where Keras's loop is known (see `look_ahead`).
    """

    def __init__(self, function, values=(), mode=None, n_losses=0, looks_ahead=False):
        self.function = function
        mode = theano.compile.get_mode(mode).excluding('gpuarray_opt')
        self._read = theano.function([], graph.host_graph(list(values)), mode=mode) if values else list
        self._n_own = n_losses
        self._looks_ahead = looks_ahead and function.forward.on_devices
        self.memory = None    # a Checkpoint
        self.observer = None  # a callable ``observer(function, inputs, compute)`` that returns what ``compute()`` does
        self.begin()

    def __call__(self, inputs):
        compute = functools.partial(self._run, inputs)
        if self.observer is not None:
            compute = functools.partial(self.observer, self, inputs, compute)
        return self.memory.recall(self, inputs, compute) if self.memory else compute()

    def _run(self, inputs):
        if self._looks_ahead:
            batches = compat.keras_batches
            self.function.forward.next_batch = batches and functools.partial(batches.after, inputs)
        outputs = self.function(*inputs)
        return self._reported(outputs if isinstance(outputs, list) else [outputs], self.function.forward.samples)

    def _reported(self, outputs, samples):
        outputs = outputs + self._read()
        if outputs and np.ndim(outputs[0]) == 0:
            self._loss += float(outputs[0]) * samples
            self._samples += samples
        return outputs

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
        if not self.function.forward.sharded:
            return None
        for outputs, samples in self.function.joined():
            self._reported(outputs, samples)
        return [self._loss / self._samples] + self._read()[self._n_own:] if self._samples else None


def train_function(model):
    """The train function of a compiled model."""
    step = TrainingFunction(batch_inputs(model), model.total_loss, model._collected_trainable_weights,
                            updates_of(model.optimizer, spread_of(model).continued), batch_updates=batch_updates(model),
                            least_samples=2 if has_batch_normalization(model.total_loss) else 1,
                            name='train_function', **_options(model))
    return BatchFunction(step, metric_values(model), _options(model).get('mode'), looks_ahead=True)


def test_function(model):
    """The test function of a compiled model: loss and metrics."""
    loss = theano.shared(np.zeros((), model.total_loss.dtype), name='loss')
    updates = batch_updates(model, training=False)
    updates[loss] = model.total_loss
    function = ParallelFunction(batch_inputs(model), [], updates=updates, name='test_function', **_options(model))
    return BatchFunction(function, [loss] + metric_values(model), _options(model).get('mode'), n_losses=1)


def predict_function(model):
    """The predict function of a model: its outputs."""
    function = ParallelFunction(batch_inputs(model, targets=False), model.outputs,
                                updates=first_of_each(model.state_updates), name='predict_function',
                                **_options(model))
    return BatchFunction(function)


def _options(model):
    # Without sample weights, Keras gives each sample a 1.
    return dict(getattr(model, '_function_kwargs', {}), contexts=spread_of(model).contexts, allow_input_downcast=True,
                uniform=getattr(model, '_feed_sample_weights', ()))


def check_options(options):
    """Raise a ValueError for a keyword of `compile` that is not for `theano.function`."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError('compile() of a parallel model does not take %s; it takes %s besides the arguments of '
                         'keras.Model.compile, which go to theano.function'
                         % (', '.join(unknown), ' and '.join(OPTIONS)))
