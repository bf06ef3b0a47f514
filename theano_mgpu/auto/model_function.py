"""A function that Keras makes for the batches of a model: over the contexts, in place of plain Theano's."""
from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Iterator, NamedTuple, Sequence

import numpy as np
import theano

from ..checks.ledger import Account, Ledger, ledger
from ..checks.ranks import BatchCheck, ComparedFunction
from ..comm.activities import INPUTS
from ..comm.alone import is_alone
from ..comm.mpi import choose_ranks
from ..devices.context_map import HOST
from ..devices.contexts import are_cores
from ..errors import BatchError, GraphError, MgpuError, in_one_line
from ..graph.theano_functions import builds_graphs
from ..graph.updates import first_of_each
from ..parallel_function import ParallelFunction
from ..runtime.batches.free_batch_size import written_lengths
from ..runtime.call_hooks import Computed
from ..training import TrainingFunction
from .choice import Chooser, Way
from .dispatched import BatchSource, Dispatched, LeaveToPlain
from .fallback import FAILED, is_for_plain

FIRST = 'first replica'  # the key of the program that divides no batch
ALONE = 'this process'   # of one that runs without the other ranks


class Hint(NamedTuple):
    """Facts about a model's function that its graph does not tell.

    Attributes
    ----------
    kind : {'train', 'test', 'predict'}
    samples : list of theano.Variable
        The inputs that have samples, along axis 0.
    length : int or None
        Samples of the batches that the model was built for; None for any number.
    params, weights : list of SharedVariable
        The trained weights, and all.
    metrics : collection of SharedVariable
        The states of metrics, which say nothing of the training.
    following : callable
        ``following(function, inputs)`` returns a callable that returns the inputs of the next batch, where the loop
        knows them; else None.
    """

    kind: str
    samples: Sequence[theano.Variable]
    length: int | None
    params: Sequence[Any]
    weights: Sequence[Any]
    metrics: Collection[Any]
    following: Callable[..., Any]


class ModelFunction(BatchSource):
    """The function of a model, as Keras calls it; the hint tells which of its inputs have samples.

    It keeps the graph as it is now, as in Keras: a program may be made after the model has changed. ``compile()``
    returns the function of plain Theano, the same one each time.

    Attributes
    ----------
    arguments : dict
        Of the `theano.function` that Keras asks for.
    is_whole : bool
        Whether plain Theano computes all batches.
    leading : BatchCheck
        It has the inputs for plain Theano alike on every rank, where ranks have to choose alike.
    compared : ComparedFunction or None
        Plain Theano in several processes, which compare its results; None for predictions, as these change no variable.
    updates : dict of SharedVariable to theano.Variable
        The new values that a batch gives.
    dispatched : Dispatched
        Chooses the way of each batch.
    """

    def __init__(self, model: Any, hint: Hint, arguments: dict[str, Any], compile: Callable[[], Any]) -> None:
        self.kind, self.make_plain = hint.kind, compile
        self._model, self._hint, self.arguments = model, hint, arguments
        self._usage = model.usage(hint.kind)
        self.name, self.updates = '%s_function' % hint.kind, first_of_each(arguments['updates'])
        outputs = list(arguments['outputs'])
        self._is_value = [hasattr(output, '_is_metric') for output in outputs]  # read after the batch, see `values`
        self._outputs = [output for output, is_value in zip(outputs, self._is_value) if not is_value]
        self._values: list[Any] = []
        self.read: Callable[[], list[Any]] = list
        self._programs: dict[Any, Any] = {}  # by the length that the graph may have as a number; see also `FIRST`
        self._lengths: set[int] | None = None  # such numbers
        self._usual: int | str | None = hint.length  # the key of the program of the usual batch
        self._is_new, self._has_divided = True, False
        self.compared: ComparedFunction | None = None
        book = ledger(choose_ranks(None)) if self.kind == 'train' else None
        self.ranks, self.is_whole, self._may_leave = choose_ranks(None), model.leaves_all(self), model.may_leave(self)
        # On the CPU, plain Keras's function is the one to beat. On devices, it is compiled only where calls are short.
        self._begins_on_host = self.is_whole or self._may_leave and self.ranks.size == 1 and not model.on_devices
        self.dispatched = Dispatched(self, self.is_whole or not self._may_leave, model.hooks(self),
                                     self.open_account(book) if book else None)
        self.begin()

    # --- the place in Keras's function

    def __call__(self, *inputs: Any) -> list[Any]:
        run = functools.partial(self._usage.count, proceed=self.alone) if is_alone() else self.dispatched.hooks.run
        outputs = run(list(inputs)).outputs
        if any(self._is_value):
            self._values = [each for each, is_value in zip(outputs, self._is_value) if is_value]
        return list(outputs)

    def values(self) -> list[Any]:
        """Return the values that Keras reads after each batch: its metrics, as they were after the last one."""
        return self._values

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the function over contexts or, if it has none, of plain Theano's."""
        if name.startswith('_'):
            raise AttributeError(name)
        return getattr(self.make_plain() if self.is_whole or not hasattr(self.step, name) else self.step, name)

    def open_account(self, book: Ledger) -> Account:
        """Return a new account in a ledger: of the weights, and of the state of the optimizer."""
        return book.account('%s of %s' % (self.name, self._model.name),
                            [*self._hint.weights, *(v for v in self.updates if v not in self._hint.metrics)],
                            choose_ranks(None))

    @property
    def graph(self) -> list[theano.Variable]:
        """The outputs, and the new values."""
        return [*self._outputs, *self.updates.values()]

    # --- the ways of a batch

    def ways(self) -> Iterator[Way]:
        if self._begins_on_host:
            yield Way.HOST
        if not self.is_whole:
            yield Way.SEVERAL
            if self.ranks.size == 1 and len(self._model.contexts) > 1 and self._model.on_devices:
                yield Way.DEVICE
        if self._may_leave and not self._begins_on_host:
            yield Way.HOST

    def length(self, call: Any) -> int:
        return length_of(call)

    def alike(self, call: Any, is_open: bool) -> Any:
        return self.leading(length_of(call), call)[1] if is_open or self.leading.differ else call

    def patience(self) -> float:
        is_made = self._usual in self._programs or self.ranks.size > 1
        return 0 if is_made or not are_cores(self._model.contexts) else self.make_plain().mgpu_seconds

    def chosen(self, chooser: Chooser) -> None:
        contexts = {Way.HOST: lambda: self._of_plain, Way.DEVICE: self._first, Way.SEVERAL: lambda: self.step.contexts}
        self._usage.run_on(contexts[chooser.way](), self.dispatched.reason(chooser, self._model.why))

    def plain(self, call: Any) -> Computed:
        """Compute a batch by plain Theano in each process, and compare the results now and then.

        A batch that was sent ahead is dropped.
        """
        self.forget_prepared()
        self._usage.explain(self.dispatched.so_far(Way.HOST.value))
        return Computed((self._by_theano if self.is_whole else self._plain)(call), length_of(call), self._of_plain)

    @functools.cached_property
    def _of_plain(self):
        """The contexts on which plain Keras computes: one on the CPU."""
        return [] if self._model.on_devices else self._model.contexts[:1]

    def alone(self, call: Any) -> Computed:
        if self._model.on_devices:
            return self._by(self._program(ALONE), call)
        return Computed(self._by_theano(call), length_of(call), self._model.contexts[:1])

    def over_contexts(self, call: Any, way: Way) -> Computed | LeaveToPlain:
        try:
            if way is Way.DEVICE:
                self.forget_prepared()
                return self._by(self._program(FIRST), call)
            self._model.compare()
            return self._over_contexts(call)
        except Exception as error:
            if way is Way.DEVICE and getattr(error, 'out_of_memory', False):
                return LeaveToPlain(lambda: None, error)
            if not self._is_for_plain(error, call):
                raise
            return LeaveToPlain(functools.partial(self._note_failure, call, error), error)

    def _by_theano(self, inputs):
        outputs = self.make_plain().plain_call(*inputs)
        return self._with_values([output for output, is_value in zip(outputs, self._is_value) if not is_value])

    def _with_values(self, outputs):
        """Return outputs with the values that are read after a batch."""
        if not any(self._is_value):
            return outputs
        others, values = iter(outputs), iter(self.read())
        return [next(values if is_value else others) for is_value in self._is_value]

    @functools.cached_property
    def _plain(self):
        if self.kind == 'predict' or self.ranks.size == 1:
            return self._by_theano
        step = self.step
        self.compared = ComparedFunction(self._by_theano, step.ranks, step.built.number, lambda: step.built.alike,
                                         self.leading)
        return self.compared

    def compare(self) -> None:
        """Compare the results that each process has computed by itself: all go on from rank 0's."""
        if self.compared is not None:
            self.compared.compare()

    @functools.cached_property
    def leading(self) -> BatchCheck:
        """See above. Made when all ranks are here: one may have made the function before the others."""
        ranks = choose_ranks(None)
        return BatchCheck(ranks, ranks.add_function(self.name), self.name, self.kind == 'predict', activity=INPUTS)

    # --- the programs over the contexts

    @property
    def step(self) -> Any:
        """The ParallelFunction or TrainingFunction that runs the usual batch over the contexts."""
        return self._program(self._usual)

    def compile(self) -> None:
        """Compile the program of the usual batch, unless plain Theano has the first ones, or a rank is here alone."""
        if not (self._begins_on_host or is_alone()):
            self._program(self._usual)

    def _program(self, key):
        """Return the program of a key; None where the graph cannot be divided without the number that the key is."""
        if key not in self._programs:
            try:
                self._programs[key] = self._make(key)
            except GraphError:
                if key == self._usual:
                    raise
                self._programs[key] = None
        return self._programs[key]

    @builds_graphs
    def _make(self, key):
        arguments, hint, is_first = self.arguments, self._hint, key == FIRST
        options = dict(contexts=self._first() if is_first else self._model.contexts, mode=arguments['mode'],
                       givens=arguments['givens'], name=self.name, allow_input_downcast=True,
                       executor='serial' if key == ALONE else None, batch_of_rank_0=True,
                       samples=dict.fromkeys(hint.samples, 0), length=None if key in (FIRST, ALONE) else key,
                       must_divide=key not in (FIRST, ALONE, self._usual), micro_batches=1 if is_first else None)
        inputs, outputs, updates = arguments['params'], self._outputs, self.updates
        if hint.kind == 'train':
            return TrainingFunction(inputs, outputs[0], hint.params, updates, outputs[1:], **options)
        return ParallelFunction(inputs, outputs, updates, **options)

    def _program_for(self, length):
        step = self.step
        if self._is_new:
            self._is_new = False
            if step.refused:
                step = self._of_first_batch(length)
        only = step.inputs.only_length
        if step.ranks.size > 1 or step.refused or self._usual == FIRST or only == length:
            return step
        if only is not None:  # the graph has another length: it computes, or fails, as plain Keras does
            return self._program(FIRST)
        if self._lengths is None:
            self._lengths = written_lengths(self.graph)
        return length in self._lengths and self._program(length) or step

    def _of_first_batch(self, length):
        """Take a program of the length of the first batch if the usual one is not divided, or else tell the user."""
        if self._usual is None and self._program(length) is not None:
            self._usual = length
        else:
            self._model.cannot_divide(self.step)
        return self.step

    def _first(self):
        """Return the contexts of the first replica: several, if the model is placed."""
        return [context for context in self.step.mesh.replicas[0] if context != HOST] or self._model.contexts[:1]

    # --- a batch over the contexts

    def _is_for_plain(self, error, inputs):
        """Return whether plain Theano can say what an error is, since it is neither one of a device nor of the ranks.
        """
        is_ours = isinstance(error, MgpuError) and not isinstance(error, BatchError)
        is_empty = self.kind == 'train' and not length_of(inputs)  # a step on it makes all weights NaN
        return is_for_plain(error) and not (is_ours or is_empty or self._model.strict or self.step.sharded)

    def _over_contexts(self, inputs):
        step = self._program_for(length_of(inputs))
        computed = self._by(step, inputs)
        self._has_divided = self._has_divided or self._divides(step, length_of(inputs))
        self._usage.explain(self.dispatched.so_far(Way.SEVERAL.value))
        return computed

    def _by(self, step, inputs):
        ahead = self.kind == 'train' and step.executable.on_devices and self._hint.following(self, inputs)
        with step.look_ahead.asking(ahead or None):
            outputs = step(*inputs)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        if step.sharded:
            self._add(outputs, step.samples)
        return Computed(self._with_values(outputs), step.samples, step.contexts, step)

    def _add(self, outputs, samples):
        """Add the loss of a batch, and metrics that are outputs, to the sums of the epoch."""
        if self.kind != 'predict':
            self._sums = self._sums + np.array([np.mean(each) for each in outputs], 'float64') * samples
            self._samples += samples

    def _divides(self, step, samples):
        """Return whether a batch is divided among the contexts of this process alone."""
        return bool(samples) and step.ranks.size == 1 and len(step.built.splitter.shares.rounds(samples)[0]) > 1

    def _note_failure(self, inputs, error):
        """Note that a batch has failed over the contexts, and that plain Theano has computed it.

        If no batch was divided so far, go on with one replica.
        """
        if self._has_divided or not self._divides(self.step, length_of(inputs)):
            self._model.notify('has left a batch to plain Keras, on one device: %s' % FAILED % in_one_line(error))
            return
        contexts = self._first()
        self._program(FIRST)
        self._usual = FIRST
        self._model.use_one_replica(contexts, error)

    def forget_prepared(self) -> None:
        """Drop a batch that was sent ahead and that does not come."""
        if self._usual in self._programs:
            self.step.look_ahead.forget()

    # --- an epoch of several processes

    def begin(self) -> None:
        """Begin an epoch."""
        self._sums, self._samples = np.zeros(()), 0

    def join(self) -> list[float] | None:
        """Wait at the end of an epoch for the other processes.

        Compare the results that each has computed by itself. Where each feeds its own data, wait for the others, and
        return the loss and metrics of all the data since `begin`; else None.
        """
        self.compare()
        if self._usual not in self._programs or not self.step.sharded:
            return None
        for outputs, samples in self.step.joined():
            self._add(outputs, samples)
            if self.dispatched.hooks.account is not None:
                self.dispatched.hooks.account.note()
        return self._with_values((self._sums / self._samples).tolist()) if self._samples else None


def length_of(inputs: list[Any]) -> int:
    """Return the number of samples of a batch; 0 if it has none."""
    shape = getattr(inputs[0], 'shape', None) or np.shape(inputs[0]) if inputs else ()  # np.shape takes long
    return shape[0] if shape else 0
