"""What Keras calls for each batch, a callable ``f(list) -> list``, over several contexts."""
import functools

import numpy as np
import theano
from keras import backend as K
from keras.backend import theano_backend

from ..distributed.activities import AGREE
from ..distributed.failures import failing_together
from ..errors import BatchError, MgpuError, RankError, in_one_line, is_of_call, noting
from ..graphs import graph
from ..parallel_function import ParallelFunction
from ..patches import keras_loops, theano_functions
from ..training import TrainingFunction
from .batch import batch_inputs, first_of_each, metric_values, test_updates, training_updates
from .optimizer import optimizer_updates
from .parallel_state import parallel_state_of
from .variants import Variants, length_of

OPTIONS = ('mode', 'givens')  # those of theano.function that compile() takes


class ModelFunction:
    """What a model calls for each batch, which an observer and a checkpoint may take part in.

    Attributes
    ----------
    checkpoint : keras.Checkpoint or None
        That of a fit, while the fit lasts.
    observer : callable or None
        ``observer(function, inputs, compute)`` returns what ``compute(inputs)`` does.
    samples : int
        Size of the last batch, on all ranks.
    """

    checkpoint = observer = None
    samples = 0

    def __call__(self, inputs):
        if self.checkpoint:
            return self.checkpoint.replay_or_compute(self, inputs, self._compute)
        return self._compute(inputs)

    def _compute(self, inputs):
        return self._run(inputs) if self.observer is None else self.observer(self, inputs, self._run)


class WholeFunction(ModelFunction, theano_backend.Function):
    """The function that Keras itself has made for a model, none of whose batches is divided.

    Parameters
    ----------
    plain : keras.backend.Function
        Keras's. What it has is here, too, such as `function`, that of Theano.
    contexts : list of Context
        What it runs on.
    divided : BatchFunction
        What would run the batches over contexts.
    """

    def __init__(self, plain, contexts, divided):
        vars(self).update(vars(plain))
        self.contexts, self._divided = contexts, divided

    @property
    def step(self):
        """The TrainingFunction over the same variables, whose training state a checkpoint holds."""
        return self._divided.step

    def _run(self, inputs):
        self.samples = length_of(inputs)
        return theano_backend.Function.__call__(self, inputs)


class BatchFunction(ModelFunction):
    """Runs a function over a batch, then reads values that it has updated.

    Parameters
    ----------
    variants : Variants
        Of a ParallelFunction or TrainingFunction.
    values : list of theano.Variable
        Functions of shared variables that are read after the batch, as further outputs.
    mode : str or theano.Mode, optional
    prepares_next : bool
        Whether the next batch is sent while one is computed, within Keras's loops (see `prefetch`).
    optimizer_updates : list of (SharedVariable, theano.Variable), optional
        Of a train function: what all its variants train by, and plain Keras where it computes a batch.

    Attributes
    ----------
    plain : callable or None
        ``plain()`` returns the function of plain Keras, see `methods.plain_maker`.
    """

    def __init__(self, variants, values=(), mode=None, prepares_next=False, optimizer_updates=None):
        self._variants, self._values, self._mode = variants, list(values), mode
        self._prepares_next, self.optimizer_updates = prepares_next, optimizer_updates
        self.dispatch = None  # a Dispatch, where some batches are left to plain Keras
        self.compared = None  # a ComparedFunction, where each process may compute such batches
        self.plain = None
        self.begin()

    @property
    def function(self):
        """The ParallelFunction or TrainingFunction that runs batches over the contexts."""
        return self._variants.function

    step = function

    @property
    def contexts(self):
        """The list of Context that ran the last batch."""
        return self.dispatch and self.dispatch.ran_on or self.function.contexts

    def compile(self):
        """Compile what runs batches over the contexts."""
        self._variants.compile()

    @functools.cached_property
    def _read(self):
        """Reads the values, once per batch."""
        mode = theano.compile.get_mode(self._mode).excluding('gpuarray_opt')
        return theano_functions.plain_function([], graph.host_graph(self._values), mode=mode) if self._values else list

    def _run(self, inputs):
        if self.dispatch is None:
            return self.run_over_contexts(inputs)
        if self.checkpoint is not None:  # a restart must not depend on what was measured
            return self.dispatch.run_divided(inputs)
        self.samples = length_of(inputs)
        results = self.dispatch.run(inputs, self.samples)
        if self._prepares_next and self.dispatch.ran_on:
            self.forget_prepared()
        return results

    def run_over_contexts(self, inputs):
        """Run a batch over the contexts; returns the outputs and the values.

        Where that ends in an error of the graph or of the batch, plain Keras computes the batch: its own error, if it
        has one, is that of one device.
        """
        try:
            return self._run_divided(inputs)
        except Exception as error:
            nothing = self.optimizer_updates is not None and not length_of(inputs)  # a step on it makes all weights NaN
            if nothing or not self._may_be_of_plain_keras(error):
                raise
            failure = error
        try:
            return self._run_plain(inputs, failure)
        finally:
            del failure  # its traceback has this frame, which would keep it

    def _may_be_of_plain_keras(self, error):
        """Return whether plain Keras can say what an error is, as it is neither that of a device nor of the ranks."""
        ours = isinstance(error, MgpuError) and (isinstance(error, RankError) or not isinstance(error, BatchError))
        return self.plain is not None and is_of_call(error) and not (
            ours or self._variants.state.strict or self.function.sharded)

    def _run_plain(self, inputs, failure):
        """Compute a batch that has failed over the contexts, and changed nothing."""
        ranks = self.function.ranks
        with failing_together(ranks), noting(getattr(failure, '__notes__', ())):
            results = self.plain()(inputs)
            ranks.handshake((AGREE,))
        self.samples = length_of(inputs)
        self._variants.state.notify('has left a batch to plain Keras, on one device, since it failed when divided: %s'
                                    % in_one_line(failure))
        return results

    def _run_divided(self, inputs):
        function = self._variants.of(inputs)
        loop = keras_loops.keras_batches
        if self._prepares_next and function.executable.on_devices and loop is not None and loop.calls(self):
            function.look_ahead.next_batch = functools.partial(loop.after, inputs)
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
        """Drop a batch that was sent ahead and that does not come."""
        if self._variants.compiled:
            self.function.look_ahead.forget()

    def begin(self):
        """Begin an epoch."""
        self._loss, self._samples = 0.0, 0

    def join(self):
        """Come to the end of an epoch with the other processes, and compare what each has computed by itself.

        Where each process feeds its own data, wait until the others have come to the end of theirs.

        Returns
        -------
        list of float, or None
            The loss and metrics of all the data since `begin`. None with one process, or where each process gets
            whole batches: the caller knows them then.
        """
        if self.compared is not None:
            self.compared.compare()
        if not self._variants.compiled or not self.function.sharded:
            return None
        for outputs, samples in self.function.joined():
            self._reported(outputs, samples)
        return [self._loss / self._samples] + self._read() if self._samples else None


def train_function(model):
    """The train function of a compiled model."""
    state = parallel_state_of(model)
    pairs = optimizer_updates(model, state)
    updates = training_updates(model, pairs)

    # What the model is now, as in Keras: a variant may be made after the model has changed.
    inputs, total, options = batch_inputs(model), model.total_loss, _over_contexts(model)
    params = model._collected_trainable_weights

    def make(contexts, free):
        loss, *new = free([total] + list(updates.values()))
        return TrainingFunction(inputs, loss, params, dict(zip(updates, new)), contexts=contexts, name='train_function',
                                **options)
    return BatchFunction(Variants(make, inputs, state), metric_values(model), options.get('mode'), True, pairs)


def test_function(model):
    """The test function of a compiled model: its loss and metrics."""
    updates, inputs = test_updates(model), batch_inputs(model)
    total, options = model.total_loss, _over_contexts(model)

    def make(contexts, free):
        loss, *new = free([total] + list(updates.values()))
        return ParallelFunction(inputs, [loss], dict(zip(updates, new)), contexts=contexts, name='test_function',
                                **options)
    return BatchFunction(Variants(make, inputs, parallel_state_of(model)), metric_values(model), options.get('mode'))


def predict_function(model):
    """The predict function of a model: its outputs."""
    updates, inputs = first_of_each(model.state_updates), batch_inputs(model, targets=False)
    outputs, options = list(model.outputs), _over_contexts(model)

    def make(contexts, free):
        new = free(outputs + list(updates.values()))
        return ParallelFunction(inputs, new[:len(outputs)], updates=dict(zip(updates, new[len(outputs):])),
                                contexts=contexts, name='predict_function', **options)
    return BatchFunction(Variants(make, inputs, parallel_state_of(model)))


MAKERS = {'train': train_function, 'test': test_function, 'predict': predict_function}


def options_of(model):
    """Return the keywords for `theano.function` that a model is compiled with."""
    return dict(getattr(model, '_function_kwargs', {}), allow_input_downcast=True)


def _over_contexts(model):
    return dict(options_of(model), led_by_first=True)


def check_compile(options, targets=()):
    """Raise a ValueError for arguments of `compile` that a model over contexts cannot take.

    Parameters
    ----------
    options : dict
        Keywords for `theano.function`.
    targets : list of theano.Variable or None
        Target tensors.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError('compile() of a parallel model does not take %s; besides the arguments of '
                         'keras.Model.compile it takes %s for theano.function'
                         % (', '.join(unknown), ' and '.join(OPTIONS)))
    tensors = [target for target in targets if target is not None and not K.is_placeholder(target)]
    if tensors:
        raise ValueError('the targets are tensors, and target_tensors=[%s] cannot be split into sub-batches: pass the '
                         'targets to fit, as arrays' % ', '.join(map(str, tensors)))
