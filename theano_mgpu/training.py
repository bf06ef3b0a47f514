"""`mgpu.training_function`: one training step over several contexts."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Sequence, Sized

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable

from .checks import settings
from .checks.ledger import account_of, ledger_at
from .devices.shared_variables import watcher_of
from .errors import GraphError, NonFiniteError
from .graph import graph, training_graph
from .graph.theano_functions import builds_graphs
from .graph.updates import as_dict
from .options import Options
from .runtime.batches.prefetch import PeekableBatches
from .runtime.building import warn_of_refusals
from .runtime.call_hooks import Computed
from .runtime.divided_function import DividedFunction
from .runtime.replicas.replicated import Replicated, replicated
from .runtime.state import training_state
from .runtime.state.replay import Record, Replay, check_every
from .utils.progress import bar


def training_function(inputs: Sequence[Any], loss: theano.Variable, params: Iterable[SharedVariable],
                      updates: Callable[..., Any], outputs: Sequence[Any] = (),
                      micro_batches: int | None = None, batch_updates: Any = None,
                      broadcast: Sequence[theano.Variable] = (), givens: Any = None, check_finite: bool = False,
                      contexts: Any = None, executor: str | None = None, mode: Any = None, name: str | None = None,
                      allow_input_downcast: bool | None = None, least_samples: int = 1, sharded: bool | None = None,
                      update_on: str | None = None, recompute: bool | None = None) -> TrainingFunction:
    """Compile one training step of a model over every context.

    A call splits the batch into sub-batches, computes loss and gradients of each on its context, adds the gradients,
    and applies one update on every context. The result equals the one of one device, to rounding.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, but for scalars and those named in `broadcast`.
    loss : scalar theano.Variable
        Any function of the batch. Where it needs batch-wide statistics, as batch normalisation does, replicas exchange
        them within the step. A loss that cannot be computed in parts is computed whole on the first context, and a
        warning says why.
    params : list of theano.compile.SharedVariable
        The trained variables. They stay the truth: `get_value` gives the trained value, `set_value` reaches every
        replica before the next step, and other Theano functions over them see current values.
    updates : callable
        ``updates(gradients)`` or ``updates(gradients, params)``, given the gradients over the whole batch as Theano
        variables; returns the updates as for `theano.function`, a dict or list of pairs. Lasagne's fit:
        ``lasagne.updates.adam``, or ``functools.partial(lasagne.updates.sgd, learning_rate=0.1)``. They may depend on
        the loss, on other expressions of the batch, and on derivatives of all these, as in plain Theano.
    outputs : list of theano.Variable or pairs
        Further outputs, of the whole batch. ``(output, 'mean')`` and ``(output, 'sum')`` are the same, and an error
        if the output has rows of single samples; so is ``(output, 'gather')`` if the output has no such rows.
    micro_batches : int or 'auto', optional
        Slices that each sub-batch is computed in, one after the other, so that a batch that does not fit on a device
        trains. Gradients are accumulated exactly. On a model that `device` places on several contexts they are a
        pipeline: while one context computes a slice, the others compute other slices. 'auto' begins with one slice. If
        a device has too little memory for a step, no value changes, and all ranks compute the step again in twice as
        many slices; batches of this length are computed in as many from then on. Where slices do not help, 'auto'
        changes `update_on` and `recompute`, takes slices of data sets on the host, and at last places the parameters
        over the contexts. By default the flag ``mgpu.micro_batches``, 'auto'.
    recompute : bool, optional
        Of such a model: whether the backward pass of each context computes its forward pass again, instead of keeping
        its results. Saves memory, takes time. By default the flag ``mgpu.recompute``, False.
    batch_updates : dict of SharedVariable to theano.Variable, optional
        Further new values, which may depend on the batch: counts, running averages.
    check_finite : bool
        Raise a NonFiniteError, and change nothing, when the loss or a gradient is not finite.
    least_samples : int
        Samples that a sub-batch has at least, but for a batch that has fewer.
    update_on : {'auto', 'device', 'sharded', 'host'}, optional
        Where the new values are computed. 'device': on each context. 'sharded': of each parameter on one context of all
        processes, which alone has the state of its updates (moments) and sends the parameter to the others; the values
        are the same as with 'device'. See `planner.update_shares`. With several processes, all have to read such a
        state at the same place. 'host': once on the host, from which each context gets the parameters. Both are for
        devices that are short of memory. 'auto' is 'host' where all contexts are of kind ``cpu``, which share arrays
        without a copy, else 'device', as long as the devices have enough memory. The flag ``mgpu.update_on`` by
        default.
    broadcast, givens, contexts, executor, mode, name, allow_input_downcast, sharded
        As for `mgpu.function`.

    Returns
    -------
    TrainingFunction
        Called with arrays, it returns the loss, an array of shape (), or a list of loss and outputs.

    Raises
    ------
    GraphError, ContextError
        If the step cannot be run over these contexts.

    Examples
    --------
    >>> import theano_mgpu, theano, theano.tensor as T
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> x, w = T.dmatrix('x'), theano.shared(np.zeros(2), name='w')
    >>> step = training_function([x], ((T.dot(x, w) - 1) ** 2).mean(), [w],
    ...                          lambda gradients: {w: w - 0.1 * gradients[0]}, mode='FAST_COMPILE')
    >>> step(np.eye(2)), w.get_value()
    (array(1.), array([0.1, 0.1]))
    """
    params = list(params)
    if not params:
        raise GraphError('params is empty: name the shared variables to train')
    variables, reductions = training_graph.output_reductions(outputs)
    gradients = training_graph.loss_gradients(loss, params)
    new, of_batch = training_graph.new_values(updates, gradients, params), as_dict(batch_updates)
    twice = [variable for variable in of_batch if variable in new]
    if twice:
        raise GraphError('%s gets a new value by updates, and another one by batch_updates' % twice[0])
    step = TrainingFunction(inputs, loss, params, {**new, **of_batch}, variables, gradients if check_finite else (),
                            micro_batches=micro_batches, broadcast=broadcast, givens=givens, contexts=contexts,
                            executor=executor, mode=mode, name=name, allow_input_downcast=allow_input_downcast,
                            least_samples=least_samples, sharded=sharded, update_on=update_on, recompute=recompute)
    step.hooks.record(account_of(step, step.variables()))
    training_graph.check_reductions(step.plan.results[1:], reductions, variables)
    warn_of_refusals(step.built, step.options)
    return step


class TrainingFunction(DividedFunction):
    """The result of `training_function`; it has the attributes of a `DividedFunction`, and `params`.

    Parameters
    ----------
    inputs, loss, params
        As for `training_function`.
    updates : dict of SharedVariable to theano.Variable
        New values.
    outputs : list of theano.Variable
    gradients : list of theano.Variable
        The gradients of the parameters, if they have to be finite.
    **options
        The other keywords of `training_function`.
    """

    @builds_graphs
    def __init__(self, inputs: Sequence[Any], loss: theano.Variable, params: Iterable[SharedVariable], updates: Any,
                 outputs: Sequence[theano.Variable] = (), gradients: Sequence[theano.Variable] = (), **options: Any):
        self.params = list(params)
        self._n_outputs = 1 + len(outputs)
        updates = training_graph.on_host(as_dict(updates))
        super().__init__(inputs, [loss, *outputs, *gradients], updates,
                         Options(params=[graph.host_view(param) for param in self.params], **options))
        state_variables = [watcher_of(variable) or replicated(variable)
                           for variable in self.params + training_graph.read_by_updates(updates, loss)]
        self._state = list(dict.fromkeys(state_variables + self.updated))
        self._replay: Replay | None = None  # of a checkpoint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch.

        Parameters
        ----------
        *args, **kwargs : array_like
            The inputs, in their order or by name, as for a `theano.function`.

        Returns
        -------
        ndarray, or list of ndarray
            The loss of the whole batch, an array of shape (); or a list of it and the outputs.

        Raises
        ------
        BatchError, NonFiniteError, ReplicaError, RankError
            Nothing is changed then, as after any other error.
        """
        return self._counted((args, kwargs), self.hooks.run)

    def over(self, batches: Iterable[Any], ahead: bool | None = None, progress: bool | str = False) -> Iterator[Any]:
        """Train on one batch after the other, as ``for batch in batches: step(*batch)`` does.

        Parameters
        ----------
        batches : iterable of tuple of ndarray, or iterable of ndarray
            The arguments of each call; an array where there is one input.
        ahead : bool, optional
            Whether to take, split and send the next batch while the devices compute: the default for a list or tuple,
            on other devices than the CPU. A checksum tells whether its arrays were edited afterwards: they are sent
            again then. An iterator is asked in its turn, since it may read weights. With ``ahead=True`` it is asked one
            step earlier, and reading weights then raises an MgpuError.
        progress : bool or str
            Show a bar with the loss, under a title if one is given, in a terminal or a notebook. It needs tqdm.

        Yields
        ------
        ndarray or list
            The result of the call.
        """
        ahead = isinstance(batches, (list, tuple)) and self.executable.on_devices if ahead is None else ahead
        total, source = len(batches) if isinstance(batches, Sized) else None, PeekableBatches(batches)
        asking = self.look_ahead.asking(source.peek if ahead else None, may_change=True)
        with asking, bar(total, progress, unit='batches') as shown:
            for batch in source:
                outputs = self(*batch)
                shown.set_postfix_str('loss %.4g' % (outputs[0] if isinstance(outputs, list) else outputs))
                shown.update(1)
                yield outputs

    def joined(self) -> Iterator[tuple[list[np.ndarray], int]]:
        for outputs, length in super().joined():
            self._counted(outputs, Computed)
            yield outputs[:self._n_outputs], length

    def _check(self, outputs: list[np.ndarray]) -> None:
        if len(outputs) == self._n_outputs:
            return
        for param, value in zip([None] + self.params, outputs[:1] + outputs[self._n_outputs:]):
            if not np.isfinite(value).all():
                name = 'the loss' if param is None else 'the gradient of %s' % param
                raise NonFiniteError('%s is not finite (loss %s): no parameter was changed. Lower the learning rate, '
                                     'clip the gradients, or look for a division by zero, or a log of zero or of a '
                                     'negative number, in the model; mgpu.check=1 names the op and the samples' % (
                                         name, outputs[0]))

    def variables(self) -> list[Replicated]:
        """Return the variables that make up the training state, each once, in an order that the graph gives."""
        return self._state

    def save(self, path: str, allow_nan: bool = False) -> None:
        """Save the training state (parameters, update state, random streams) to an .npz file.

        Parameters
        ----------
        path : str
            The file is written whole or not at all; its former content stays as ``path + '.previous'``. With several
            processes, all have to make the call: the first one writes, and the others wait until it has.
        allow_nan : bool
            Whether to write a state that is not finite, too. Otherwise a warning names the variables that are not, and
            the file stays as it is.

        Raises
        ------
        OSError
            If the file cannot be written; it is then as it was before.
        """
        training_state.save(path, self.variables(), self.ranks, allow_nan=allow_nan,
                            settings=settings.of_function(self.options))

    def load(self, path: str) -> None:
        """Load a file that `save` wrote, into a function of the same model; nothing is changed on an error.

        Parameters
        ----------
        path : str
            An .npz file. If it is damaged, the state before it is loaded from ``path + '.previous'``, with a warning.

        Raises
        ------
        ValueError
            If the file is not of this model, or damaged, and so is the one before it.

        Warns
        -----
        MgpuWarning
            If the file was written with other settings that results depend on, such as ``mgpu.logical_shards``.
        """
        def check(saved):
            saved.check(self.variables())
            settings.check_same(saved.path, saved.settings, settings.of_function(self.options), strict=False)
        training_state.read(path, self.ranks, check).give(self.variables())

    def replay(self, path: str, record: Record, every: int, allow_nan: bool) -> Replay:
        """Return the Replay of a run of this function, by a file that it locks."""
        facts = {**settings.of_function(self.options), **settings.of_graphs([self.built.source])}
        return Replay(path, record, self._state, self.ranks, facts, every, allow_nan)

    def checkpoint(self, path: str, every: int, allow_nan: bool = False, ledger: str | None = None) -> int:
        """Save the training state every `every` steps; if the file exists, resume from it first.

        Parameters
        ----------
        path : str
            An .npz file, always whole. The checkpoint before stays as ``path + '.previous'``, for a damaged file.
        every : int
            Completed steps between checkpoints, at least 1: a crash loses no more. An error completes no step.
        allow_nan : bool
            As for `save`.
        ledger : str, optional
            A file for a ledger, with a line for each checkpoint, and for the values before the first step; see
            ``theano-mgpu compare``. By default, the flag ``mgpu.ledger`` alone counts.

        Returns
        -------
        int
            Steps that are completed already: the loop goes on there, as in
            ``for i in range(step.checkpoint('run.npz', every=100), n_batches): step(*batch(i))``.

        Raises
        ------
        ValueError
            If the file is of another model, or was written with another number of logical shards; or if it is damaged,
            and so is the one before it.
        MgpuError
            If another job writes its checkpoints there, or this process is a fork of the one that does.

        Warns
        -----
        MgpuWarning
            If the file was written with other settings that results depend on, or if the loss, an update, the shape of
            a data set or a rate has changed since. In a step of a fork of this process, which does not write the file.
        """
        check_every(every, 'steps')
        record = Record()
        self._replay = self.replay(path, record, every, allow_nan)
        if ledger is not None:
            self.hooks.record(ledger_at(ledger, every, self.ranks).account(
                self.options.name, [each.variable for each in self._state], self.ranks))
        if self.hooks.account and record.completed:
            self.hooks.account.steps = record.completed
        return record.completed

    def _counted(self, call, proceed):
        """Return the outputs of a step that is completed by the call; write a checkpoint if one is due."""
        outputs = (self._replay.call(0, call, proceed) if self._replay else proceed(call)).outputs
        return outputs if len(outputs) > 1 else outputs[0]
