"""What Keras calls for each batch, a callable ``f(list) -> list``, over several contexts."""
import functools

import numpy as np
import theano
from keras import backend as K
from keras.backend import theano_backend

from ..distributed.choice import choose_ranks
from ..distributed.consistency import ComparedFunction, LeadingInputs
from ..enabling.fallback import by_plain, is_for_plain
from ..errors import BatchError, MgpuError
from ..graphs import graph
from ..parallel_function import ParallelFunction
from ..patches import keras_loops, theano_functions
from ..training import TrainingFunction
from .batch import batch_inputs, first_of_each, metric_values, test_updates, training_updates
from .optimizer import optimizer_updates
from .parallel_state import parallel_state_of
from .steps import Choice, Computed, chained
from .variants import Variants, length_of

OPTIONS = ('mode', 'givens')  # those of theano.function that compile() takes


class ModelFunction:
    """What a model calls for each batch: steps that each batch goes through, of which the last one computes it.

    Parameters
    ----------
    steps : list of callable
        See `steps`.
    """

    def __init__(self, steps):
        self._steps, self._run = steps, chained(steps)

    def __call__(self, inputs):
        return self._run(inputs).outputs

    def begin_fit(self, step):
        """Put the step of a checkpoint before the others, and divide each batch: a restart must not depend on what was
        measured.
        """
        self._run = chained([step] + [each for each in self._steps if not isinstance(each, Choice)])

    def end_fit(self):
        """Take the step of a checkpoint out again."""
        self._run = chained(self._steps)

    def compare(self):
        """Compare what each process has computed by itself: all go on from what rank 0 has computed."""


class WholeFunction(ModelFunction, theano_backend.Function):
    """The function that Keras itself has made for a model, none of whose batches is divided.

    Parameters
    ----------
    plain : keras.backend.Function
        Keras's. What it has is here, too, such as `function`, that of Theano.
    divided : DividedBatches
        What would compute the batches over contexts.
    contexts : list of Context
        What it runs on.
    steps : list of callable
        Those before the last one.
    """

    def __init__(self, plain, divided, contexts, steps):
        vars(self).update(vars(plain))
        self.contexts, self._divided = contexts, divided
        ModelFunction.__init__(self, steps + [self._compute])

    @property
    def step(self):
        """The TrainingFunction over the same variables, whose training state a checkpoint holds."""
        return self._divided.function

    def _compute(self, inputs):
        return Computed(theano_backend.Function.__call__(self, inputs), length_of(inputs), self.contexts)


class BatchFunction(ModelFunction):
    """The function of a model whose batches are divided, but for those that are left to plain Keras.

    Parameters
    ----------
    divided : DividedBatches
    plain : PlainKeras
    steps : list of callable
        Those before the last one.

    Attributes
    ----------
    divided : DividedBatches
    plain : PlainKeras
    """

    def __init__(self, divided, plain, steps):
        super().__init__(steps + [divided])
        self.divided, self.plain = divided, plain

    @property
    def function(self):
        """The ParallelFunction or TrainingFunction that runs batches over the contexts."""
        return self.divided.function

    step = function

    @property
    def contexts(self):
        """The list of Context that divided batches run over."""
        return self.function.contexts

    @property
    def optimizer_updates(self):
        """The updates that a train function asked the optimizer for; None for other functions."""
        return self.divided.optimizer_updates

    def forget_prepared(self):
        """Drop a batch that was sent ahead and that does not come."""
        self.divided.forget_prepared()

    def compare(self):
        self.plain.compare()

    def begin(self):
        """Begin an epoch."""
        self.divided.begin()

    def join(self):
        """Come to the end of an epoch with the other processes, and compare what each has computed by itself.

        Returns
        -------
        list of float, or None
            See `DividedBatches.join`.
        """
        self.compare()
        return self.divided.join()


class PlainKeras:
    """The function of plain Keras for a model, which is made when it is first needed.

    Parameters
    ----------
    divided : DividedBatches
        What trains the same variables.
    kind : {'train', 'test', 'predict'}
        Processes that compute the same batches compare the results, but for predictions: these change no variable.

    Attributes
    ----------
    leading : LeadingInputs
        The inputs of the function, the same on every rank where ranks have to choose alike.
    compared : ComparedFunction or None
    """

    def __init__(self, divided, kind):
        self._divided, self._is_compared = divided, kind != 'predict'
        self.leading = LeadingInputs(choose_ranks(None), '%s_function' % kind)
        self._function = self.compared = None

    def __call__(self, inputs):
        """Compute a batch in each process, and compare the results now and then; one that was sent ahead is dropped."""
        if self._function is None:
            self._function, step = self._divided.make_plain(), self._divided.function
            if self._is_compared and step.ranks.size > 1:
                self._function = self.compared = ComparedFunction(self._function, step.ranks, step.built.number,
                                                                  lambda: step.built.alike, self.leading)
        results = self._function(inputs)
        self._divided.forget_prepared()
        return results

    def compare(self):
        """Compare the results that have not been compared yet."""
        if self.compared is not None:
            self.compared.compare()


class DividedBatches:
    """The last step: a function over a batch, then values that it has updated.

    Parameters
    ----------
    variants : Variants
        Those of a ParallelFunction or TrainingFunction.
    values : list of theano.Variable
        Functions of shared variables that are read after the batch, as further outputs.
    mode : str or theano.Mode, optional
    make_plain : callable, optional
        Returns the function of plain Keras, which computes a batch that has failed over the contexts.
    optimizer_updates : list of (SharedVariable, theano.Variable), optional
        Updates of a train function: all its variants train by them, and plain Keras where it computes a batch. The next
        batch of a train function is sent while one is computed, within Keras's loops (see `prefetch`).
    """

    def __init__(self, variants, values=(), mode=None, make_plain=None, optimizer_updates=None):
        self._variants, self._values, self._mode, self.make_plain = variants, list(values), mode, make_plain
        self._trains, self.optimizer_updates = optimizer_updates is not None, optimizer_updates
        self.begin()

    @property
    def function(self):
        """The ParallelFunction or TrainingFunction that runs batches over the contexts."""
        return self._variants.function

    def compile(self):
        """Compile what runs batches over the contexts."""
        self._variants.compile()

    @functools.cached_property
    def _read(self):
        """The function that reads the values, once per batch."""
        mode = theano.compile.get_mode(self._mode).excluding('gpuarray_opt')
        return theano_functions.plain_function([], graph.host_graph(self._values), mode=mode) if self._values else list

    def __call__(self, inputs):
        """Compute a batch over the contexts, or by plain Keras if that ends in an error of the graph or of the batch.

        Returns
        -------
        Computed
        """
        self._variants.state.compare()
        try:
            return self._over_contexts(inputs)
        except Exception as error:
            if not self._is_for_plain(error, inputs):
                raise
            failure = error
        try:
            outputs = by_plain(lambda: self.make_plain()(inputs), failure, self.function.ranks)
            self._variants.note_failure(inputs, failure)
        finally:
            del failure  # its traceback has this frame, which would keep it
        return Computed(outputs, length_of(inputs))

    def _is_for_plain(self, error, inputs):
        """Return whether plain Keras can say what an error is, since it is neither one of a device nor of the ranks."""
        is_ours = isinstance(error, MgpuError) and not isinstance(error, BatchError)
        is_empty = self._trains and not length_of(inputs)  # a step on it makes all weights NaN
        return self.make_plain is not None and is_for_plain(error) and not (
            is_ours or is_empty or self._variants.state.strict or self.function.sharded)

    def _over_contexts(self, inputs):
        function = self._variants.of(inputs)
        loop = keras_loops.keras_batches
        if self._trains and function.executable.on_devices and loop is not None and loop.calls(self):
            function.look_ahead.next_batch = functools.partial(loop.after, inputs)
        try:
            outputs = function(*inputs)
        finally:
            function.look_ahead.next_batch = None  # it holds the data of the loop
        self._variants.note_success(function, inputs)
        outputs = self._reported(outputs if isinstance(outputs, list) else [outputs], function.samples)
        return Computed(outputs, function.samples, function.contexts, function)

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
        """Where each process feeds its own data, wait until the others have come to the end of theirs.

        Returns
        -------
        list of float, or None
            The loss and metrics of all the data since `begin`. None with one process, or where each process gets
            whole batches: the caller knows them then.
        """
        if not self._variants.compiled or not self.function.sharded:
            return None
        for outputs, samples in self.function.joined():
            self._reported(outputs, samples)
        return [self._loss / self._samples] + self._read() if self._samples else None


def train_function(model, plain_of=None):
    """Return the last step of the train function of a compiled model.

    Parameters
    ----------
    model : keras.Model
    plain_of : callable, optional
        ``plain_of(optimizer_updates)`` returns what makes the function of plain Keras, see `methods.plain_maker`.
    """
    state = parallel_state_of(model)
    pairs = optimizer_updates(model, state)
    updates = training_updates(model, pairs)

    # What the model is now, as in Keras: a variant may be made after the model has changed.
    inputs, options, params = batch_inputs(model), _over_contexts(model), model._collected_trainable_weights

    def make(contexts, outputs):
        loss, *new = outputs
        return TrainingFunction(inputs, loss, params, dict(zip(updates, new)), contexts=contexts, name='train_function',
                                **options)
    variants = Variants([model.total_loss] + list(updates.values()), make, inputs, state)
    return DividedBatches(variants, metric_values(model), options.get('mode'), plain_of and plain_of(pairs), pairs)


def test_function(model, plain_of=None):
    """Return the last step of the test function of a compiled model: its loss and metrics; see `train_function`."""
    updates, inputs, options = test_updates(model), batch_inputs(model), _over_contexts(model)

    def make(contexts, outputs):
        loss, *new = outputs
        return ParallelFunction(inputs, [loss], dict(zip(updates, new)), contexts=contexts, name='test_function',
                                **options)
    variants = Variants([model.total_loss] + list(updates.values()), make, inputs, parallel_state_of(model))
    return DividedBatches(variants, metric_values(model), options.get('mode'), plain_of and plain_of(None))


def predict_function(model, plain_of=None):
    """Return the last step of the predict function of a model: its outputs; see `train_function`."""
    updates, inputs = first_of_each(model.state_updates), batch_inputs(model, targets=False)
    n, options = len(model.outputs), _over_contexts(model)

    def make(contexts, outputs):
        return ParallelFunction(inputs, outputs[:n], updates=dict(zip(updates, outputs[n:])), contexts=contexts,
                                name='predict_function', **options)
    variants = Variants(model.outputs + list(updates.values()), make, inputs, parallel_state_of(model))
    return DividedBatches(variants, make_plain=plain_of and plain_of(None))


MAKERS = {'train': train_function, 'test': test_function, 'predict': predict_function}


def options_of(model):
    """Return the keywords for `theano.function` that a model is compiled with."""
    return dict(getattr(model, '_function_kwargs', {}), allow_input_downcast=True)


def _over_contexts(model):
    return dict(options_of(model), batch_of_rank_0=True)


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
