"""The functions that Keras calls for each batch, callables ``f(list) -> list``, over several contexts."""
from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Callable, Iterable

import keras
import numpy as np
import theano
from keras import backend as K
from keras.backend import theano_backend

from ...auto.fallback import by_plain, is_for_plain
from ...auto.rank_0_function import draw_on_rank_0
from ...comm.choice import choose_ranks
from ...compat import keras_loops, theano_functions
from ...devices.context_map import Context
from ...errors import BatchError, MgpuError
from ...graph import graph
from ...graph.traces import name_layer
from ...parallel_function import ParallelFunction
from ...runtime.consistency import ComparedFunction, LeadingInputs
from ...runtime.state.ledger import Account, Ledger, ledger
from ...training import TrainingFunction
from .batch import batch_inputs, length_of, metric_values, new_values
from .optimizer import Given, optimizer_updates
from .parallel_state import parallel_state_of
from .steps import Choice, Computed, chained, record
from .variants import Variants

OPTIONS = ('mode', 'givens')  # keywords of theano.function that compile() takes
KINDS = ('train', 'test', 'predict')
_PLAIN = {kind: getattr(keras.Model, '_make_%s_function' % kind) for kind in KINDS}
_READ = ('optimizer', 'total_loss', 'outputs', 'updates', 'state_updates', '_collected_trainable_weights',
         '_function_kwargs')  # attributes of a model that these methods read, besides its inputs and metrics


class ModelFunction:
    """A function that a model calls for each batch, as a list of steps of which the last one computes the batch.

    Parameters
    ----------
    steps : list of callable
        See `steps`.
    account : Account, optional
        The steps are written to the ledger.
    """

    def __init__(self, steps: list[Callable[..., Computed]], account: Account | None = None) -> None:
        self._steps, self._account = steps, account
        self._chain(steps, account)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self._run(inputs).outputs

    def _chain(self, steps, account, first=()):
        self.account = account  # the one that counts at present
        recording = [] if account is None else [functools.partial(record, account)]
        self._run = chained([*first, *recording, *steps])

    def begin_fit(self, replay: Callable[..., Computed], account: Account | None = None) -> None:
        """Put the step of a checkpoint before the others, and divide each batch: a restart must not depend on timings.

        An `account` takes the place of the function's own.
        """
        self._chain([step for step in self._steps if not isinstance(step, Choice)], account or self._account, [replay])

    def end_fit(self) -> None:
        """Take the step of a checkpoint out again."""
        self._chain(self._steps, self._account)

    def note_replayed(self) -> None:
        """Count a step that a checkpoint has replayed."""
        if self.account is not None:
            self.account.steps += 1

    def compare(self) -> None:
        """Compare the results that each process has computed by itself: all go on from rank 0's."""


class WholeFunction(ModelFunction, theano_backend.Function):
    """The function that Keras itself has made for a model, none of whose batches is divided.

    Parameters
    ----------
    divided : BatchFunction
        It would compute the batches over contexts. The attributes of its function of plain Keras are here, too, such as
        `function`, Theano's.
    contexts : list of Context
        Where the function runs.
    steps : list of callable
        The steps before the last one.
    """

    def __init__(self, divided: BatchFunction, contexts: list[Context], steps: list[Callable[..., Computed]]) -> None:
        self.__dict__.update(vars(divided.make_plain()))
        self.contexts, self._divided = contexts, divided
        self.open_account = divided.open_account
        ModelFunction.__init__(self, steps + [self._compute], divided.account)

    @property
    def step(self) -> Any:
        """The TrainingFunction over the same variables, whose training state a checkpoint holds."""
        return self._divided.function

    def _compute(self, inputs):
        return Computed(theano_backend.Function.__call__(self, inputs), length_of(inputs), self.contexts)


class BatchFunction(ModelFunction):
    """The function of a model whose batches are divided, unless a step leaves them to plain Keras.

    It keeps the model as it is now, as in Keras: a variant may be made after the model has changed.

    Parameters
    ----------
    kind : {'train', 'test', 'predict'}
    model : keras.Model
        Compiled, unless it predicts.

    Attributes
    ----------
    leading : LeadingInputs
        The inputs for plain Keras, the same on every rank where ranks have to choose alike.
    compared : ComparedFunction or None
        Plain Keras in several processes, which compare its results; None for predictions, as these change no variable.
    make_plain : callable
        Returns the function of plain Keras, the same one each time.
    optimizer_updates : list of (SharedVariable, theano.Variable)
        The updates that a train function has asked the optimizer for: all its variants train by them, and so does plain
        Keras.
    """

    def __init__(self, kind: str, model: keras.Model) -> None:
        self._state = parallel_state_of(model)
        for layer in model.layers:  # those nearer to the inputs first
            for node in layer._inbound_nodes:
                name_layer(node.output_tensors, node.input_tensors, layer.name)
        self.optimizer_updates = optimizer_updates(model, self._state) if kind == 'train' else []
        self._variants = _variants_of(model, kind, new_values(model, kind, self.optimizer_updates))
        self._values = [] if kind == 'predict' else metric_values(model)  # read after the batch, as further outputs
        self._kind, self._mode = kind, options_of(model).get('mode')
        self.make_plain = _plain_maker(model, kind, self.optimizer_updates)
        self.leading = LeadingInputs(choose_ranks(None), '%s_function' % kind, kind == 'predict')
        self.compared: ComparedFunction | None = None
        self._weights, book = model.weights, ledger(choose_ranks(None)) if kind == 'train' else None
        super().__init__(self._state.steps(kind, self) + [self._compute], self.open_account(book) if book else None)
        self.begin()

    def open_account(self, book: Ledger) -> Account:
        """Return a new account in a ledger: of the weights, and of the state of the optimizer."""
        return book.account('%s_function of %s' % (self._kind, self._state.name),
                            [*self._weights, *(variable for variable, _ in self.optimizer_updates)], choose_ranks(None))

    @property
    def function(self) -> Any:
        """The ParallelFunction or TrainingFunction that runs batches over the contexts."""
        return self._variants.function

    step = function

    def compile(self) -> None:
        """Compile the function over the contexts."""
        self._variants.compile()

    def plain(self, inputs: list[Any]) -> list[Any]:
        """Compute a batch by plain Keras in each process, and compare the results now and then.

        A batch that was sent ahead is dropped.
        """
        results = self._plain(inputs)
        self.forget_prepared()
        return results

    @functools.cached_property
    def _plain(self):
        """The function of plain Keras, which is made when it is first needed."""
        plain, step = self.make_plain(), self.function
        if self._kind == 'predict' or step.ranks.size == 1:
            return plain
        self.compared = ComparedFunction(plain, step.ranks, step.built.number, lambda: step.built.alike, self.leading)
        return self.compared

    @functools.cached_property
    def _read(self):
        """The function that reads the values, once per batch."""
        mode = theano.compile.get_mode(self._mode).excluding('gpuarray_opt')
        return theano_functions.plain_function([], graph.host_graph(self._values), mode=mode) if self._values else list

    def _compute(self, inputs):
        """Compute a batch over the contexts, or by plain Keras after an error of the graph or of the batch."""
        self._state.compare()
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
        is_empty = self._kind == 'train' and not length_of(inputs)  # a step on it makes all weights NaN
        return is_for_plain(error) and not (is_ours or is_empty or self._state.strict or self.function.sharded)

    def _over_contexts(self, inputs):
        function = self._variants.of(inputs)
        loop = keras_loops.keras_batches
        is_ahead = self._kind == 'train' and function.executable.on_devices and loop is not None and loop.calls(self)
        with function.look_ahead.asking(functools.partial(loop.after, inputs) if is_ahead else None):
            outputs = function(*inputs)
        self._variants.note_success(function, inputs)
        return Computed(self._reported(outputs, function.samples), function.samples, function.contexts, function)

    def _reported(self, outputs, samples):
        """Return outputs with the values of a batch, and add its loss to the epoch's."""
        outputs = (outputs if isinstance(outputs, list) else [outputs]) + self._read()
        if outputs and np.ndim(outputs[0]) == 0:
            self._loss += float(outputs[0]) * samples
            self._samples += samples
        return outputs

    def forget_prepared(self) -> None:
        """Drop a batch that was sent ahead and that does not come."""
        if self._variants.compiled:
            self.function.look_ahead.forget()

    def compare(self) -> None:
        if self.compared is not None:
            self.compared.compare()

    def begin(self) -> None:
        """Begin an epoch."""
        self._loss, self._samples = 0.0, 0

    def join(self) -> list[float] | None:
        """Wait at the end of an epoch for the other processes.

        Compare the results that each has computed by itself; where each feeds its own data, wait for the others.

        Returns
        -------
        list of float, or None
            The loss and metrics of all the data since `begin`. None with one process, or where each process gets
            whole batches: the caller knows them then.
        """
        self.compare()
        if not self._variants.compiled or not self.function.sharded:
            return None
        for outputs, samples in self.function.joined():
            self._reported(outputs, samples)
            if self.account is not None:
                self.account.note()
        return [self._loss / self._samples] + self._read() if self._samples else None


def _variants_of(model, kind, updates):
    """Return the Variants of a model's function, which report the loss or outputs and make the new values."""
    results = list(model.outputs) if kind == 'predict' else [model.total_loss]
    inputs, name, n = batch_inputs(model, targets=kind != 'predict'), kind + '_function', len(results)
    params = getattr(model, '_collected_trainable_weights', None)
    options = dict(options_of(model), batch_of_rank_0=True)

    def make(contexts, outputs):
        new = dict(zip(updates, outputs[n:]))
        if kind == 'train':
            return TrainingFunction(inputs, outputs[0], params, new, contexts=contexts, name=name, **options)
        return ParallelFunction(inputs, outputs[:n], new, contexts=contexts, name=name, **options)
    return Variants(results + list(updates.values()), make, inputs, parallel_state_of(model))


def _plain_maker(model, kind, optimizer_updates):
    """Return a callable without arguments that makes, once, the function of plain Keras for a model as it is now."""
    name, metrics = kind + '_function', model._get_training_eval_metrics() if model._is_compiled else []
    now = SimpleNamespace(**{read: getattr(model, read) for read in _READ if hasattr(model, read)})
    now._feed_inputs, now._feed_targets = batch_inputs(model, targets=kind != 'predict'), []
    now._feed_sample_weights, now._uses_dynamic_learning_phase = [], lambda: False  # they are among the inputs
    now._get_training_eval_metrics, now._check_trainable_weights_consistency = lambda: metrics, lambda: None
    if kind == 'train':
        now.optimizer = Given(optimizer_updates)

    @functools.lru_cache(None)
    def make():
        setattr(now, name, None)
        with theano_functions.plain_functions():
            _PLAIN[kind](now)
        draw_on_rank_0(getattr(now, name).function, name)
        return getattr(now, name)
    return make


def options_of(model: keras.Model) -> dict[str, Any]:
    """Return the keywords for `theano.function` that a model is compiled with."""
    return dict(getattr(model, '_function_kwargs', {}), allow_input_downcast=True)


def check_compile(options: dict[str, Any], targets: Iterable[Any] = ()) -> None:
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
