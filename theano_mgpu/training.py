"""`mgpu.training_function`: one training step over several contexts."""
import functools
import os
import time

import numpy as np
import theano

from . import graph, state
from .checkpoint_lock import lock_checkpoint
from .errors import GraphError, NonFiniteError
from .forward import Forward
from .parallel_graph import HOST, ParallelGraph, resolve_contexts
from .samples import warn_of_couplings
from .training_graph import loss_gradients, new_values, output_reductions, scalar_loss, splittable
from .transfers import fetch, wait


def training_function(inputs, loss, params, updates, outputs=(), micro_batches=1, batch_updates=None, broadcast=(),
                      givens=None, check_finite=False, contexts=None, executor=None, mode=None, name=None,
                      allow_input_downcast=None, least_samples=1, sharded=None, update_on=None):
    """Compile one training step of a model over every context.

    A call splits the batch into sub-batches, computes loss and gradients of each on its context,
    averages the gradients on the host, weighted by sub-batch size, and applies the same update on
    every context. The result is that of one device on the whole batch, to rounding.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, but for scalars and those named in `broadcast`.
    loss : scalar theano.Variable
        Means and sums over the samples, and terms that do not depend on them (regularisers). A loss
        that is anything else gets the mean over the sub-batches, and a warning that says so.
    params : list of theano.compile.SharedVariable
        What is trained. They stay the truth: `get_value` gives the trained value, `set_value` reaches
        every replica before the next step, and other Theano functions over them see current values.
    updates : callable
        ``updates(gradients)`` or ``updates(gradients, params)``, given the averaged gradients as
        Theano variables; returns the updates as for `theano.function`, a dict or list of pairs.
        Those of Lasagne fit: ``lasagne.updates.adam``, or ``functools.partial(lasagne.updates.sgd,
        learning_rate=0.1)``.
    outputs : list of theano.Variable or (theano.Variable, str)
        Further outputs; with ``'mean'`` or ``'sum'`` reduced over the replicas, else gathered.
    micro_batches : int
        Slices that each sub-batch is computed in, one after the other, so that a batch that does
        not fit on a device trains. Gradients are accumulated exactly.
    batch_updates : dict of SharedVariable to theano.Variable, optional
        Further new values, which may depend on the batch: counts, running averages.
    check_finite : bool
        Raise a NonFiniteError, and change nothing, when the loss or a gradient is not finite.
    least_samples : int
        Samples that a sub-batch has at least, but for a batch that has fewer: 2 for a model whose
        batch normalisation would divide by zero on one.
    update_on : {'auto', 'device', 'host'}, optional
        Where the new values are computed: on each context, or once on the host, from which each context then gets
        the parameters. Then the state of the updates (moments) is on the host alone: for devices that are short of
        memory. 'auto' is 'host' where all contexts are of kind ``cpu``, which share arrays without a copy, else
        'device'. The flag ``mgpu.update_on`` by default.
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

    Notes
    -----
    The scheme is synchronous data parallelism. Ops that couple the samples of a batch, such as batch
    normalisation, see one sub-batch at a time.

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
    step = TrainingFunction(inputs, loss, params, updates, outputs, micro_batches, batch_updates, broadcast, givens,
                            check_finite, contexts, executor, mode, name, allow_input_downcast, least_samples,
                            sharded=sharded, update_on=update_on)
    if step.n_replicas > 1:
        warn_of_couplings('the loss', step.couplings)
        warn_of_couplings('an output', step.forward.couplings)
        for variable, couplings in step.forward.updates.approximate.items():
            warn_of_couplings('the new value of %s' % variable, couplings)
    return step


class Ahead:
    """Batches, each as a tuple, of which the next one can be had early; an error of its source comes with its turn."""

    def __init__(self, batches):
        self._source = (batch if isinstance(batch, (tuple, list)) else (batch,) for batch in batches)
        self._taken = []    # (item, error)

    def peek(self):
        """The next batch; None if there is none."""
        if not self._taken:
            try:
                self._taken.append((next(self._source), None))
            except Exception as error:  # raised by __next__
                self._taken.append((None, error))
        return self._taken[0][0]

    def __iter__(self):
        return self

    def __next__(self):
        self.peek()
        item, error = self._taken.pop()
        if error is not None:
            raise error
        return item


class TrainingFunction:
    """What `training_function` returns.

    Attributes
    ----------
    contexts : list of Context
    params : list of SharedVariable
    timings : Timings
        Seconds that the steps spent in each phase, see `timeline.PHASES`.
    couplings : list of Coupling
        Where the loss mixes samples, so that replicas compute something else than one device.
    seconds : float
        What the last step took until the new parameters were there, without what comes after that: outputs, states.
    """

    def __init__(self, inputs, loss, params, updates, outputs=(), micro_batches=1, batch_updates=None, broadcast=(),
                 givens=None, check_finite=False, contexts=None, executor=None, mode=None, name=None,
                 allow_input_downcast=None, least_samples=1, uniform=(), sharded=None, update_on=None):
        self.params = list(params)
        self.contexts = resolve_contexts(contexts)
        loss, scale, self.couplings = splittable(scalar_loss(loss), inputs, broadcast, givens, uniform)
        gradients = loss_gradients(loss, self.params)
        outputs, reductions = output_reductions(outputs)
        self.forward = Forward(inputs, [loss] + gradients + outputs, ['mean'] * (1 + len(gradients)) + reductions,
                               self.contexts, broadcast, givens, executor, mode, name, allow_input_downcast,
                               batch_updates, micro_batches, least_samples, 1 + len(gradients), scale, uniform,
                               sharded)
        self.timings = self.forward.timings
        self.check_finite = check_finite
        averaged = [graph.host_type(param)('gradient of %s' % param) for param in self.params]
        update_on = update_on or theano.config.mgpu.update_on
        if update_on not in ('auto', 'device', 'host'):
            raise GraphError("update_on is 'auto', 'device' or 'host', not %r" % (update_on,))
        if update_on == 'auto':
            update_on = 'device' if self.forward.on_devices else 'host'
        self.update = ParallelGraph(averaged, [], new_values(updates, averaged, self.params),
                                    [HOST] if update_on == 'host' else self.contexts, self.forward.ranks,
                                    same_on_all=True, mode=mode, name=name)
        self.forward.add_graph(self.update)
        self._completed = 0  # steps
        self._checkpoint = self._checkpoint_lock = None

    @property
    def compiled(self):
        return self.forward.graph.compiled + self.update.compiled

    @property
    def n_replicas(self):
        """Replicas on all ranks."""
        return sum(self.forward.graph.replicas)

    def __call__(self, *args, **kwargs):
        """Train on one batch; returns the loss, or a list of loss and outputs."""
        loss, outputs = self.forward.step(args, kwargs).run(self._run)
        self._note_completed()
        return [loss] + outputs if outputs else loss

    def over(self, batches, ahead=None):
        """Train on one batch after the other, as ``for batch in batches: step(*batch)`` does.

        Parameters
        ----------
        batches : iterable of (tuple of ndarray, or ndarray)
            The arguments of each call; an array where there is one input.
        ahead : bool, optional
            Take, split and send the next batch while the devices compute. By default that is done for a list or tuple
            of batches. An iterator is asked for each batch in its turn, since its code may read the weights, or set
            a learning rate; with ``ahead=True`` it is asked a step earlier, and such code is an MgpuError.

        Yields
        ------
        ndarray or list
            What the call returned.

        Examples
        --------
        ``for loss in step.over(batches(epoch)): ...``
        """
        if ahead is None:
            ahead = isinstance(batches, (list, tuple))
        batches = Ahead(batches)
        self.forward.next_batch = batches.peek if ahead else None
        try:
            for batch in batches:
                yield self(*batch)
        finally:
            self.forward.next_batch = None

    def join(self):
        """Call it where each process of a job feeds its own data, once that has ended: it returns when all have.

        Until then the process takes part in the others' steps, without samples.
        """
        for _ in self.joined():
            pass

    def joined(self):
        """As `join`, but yields of each step the loss and outputs, and its samples."""
        for (loss, outputs), length in self.forward.join(self._run):
            self._note_completed()
            yield [loss] + outputs, length

    def _run(self, step):
        step.run_all()
        loss, gradients = step.averages[0], step.averages[1:]
        if self.check_finite:
            self._check_finite(fetch(loss), gradients)
        given = self._broadcast(gradients)
        self._apply(given, step.transaction)
        with self.forward.timings.span('run'):  # where gradients stayed on the device, nobody has waited for it yet
            loss = np.array(fetch(loss))
        self.seconds = time.perf_counter() - step.began
        return loss, step.commit()

    def _broadcast(self, gradients):
        """The averaged gradients on each context that updates."""
        if not any(sender.sends for sender in self.update.senders):
            return [[fetch(gradient) for gradient in gradients]] * len(self.update.contexts)
        sums = self.forward.sums
        sent_at_once = sums is not None and gradients and gradients[0] is sums.views[1]
        with self.forward.timings.span('broadcast'):
            tasks = [functools.partial(sender.send_flat, sums, 1) if sent_at_once else
                     functools.partial(sender.send, gradients) for sender in self.update.senders]
            return self.forward.each('broadcast', tasks, self.update.contexts)

    def _apply(self, given, transaction):
        """Compute the new values on each context, then store them all."""
        tasks = [functools.partial(self.update.run, replica, gradients) for replica, gradients in enumerate(given)]
        with self.forward.timings.span('update'):
            results = [new for _, new in self.forward.each('update', tasks, self.update.contexts)]
            if self.forward.timings.waits():
                wait(value for new in results for value in new)
        for context, new in zip(self.update.contexts, results):
            for variable, value in zip(self.update.updated, new):
                transaction.replace(variable.copies[context], value)
        holders = self.update.contexts
        if holders == [HOST]:
            holders = holders + self.contexts
            with self.forward.timings.span('broadcast'):
                self._send_params(results[0], transaction)
        for variable in self.update.updated:
            transaction.then(variable.commit, holders)

    def _send_params(self, new, transaction):
        """Give each context what the host has computed; the state of the updates is on the host alone."""
        for context in self.contexts:
            for variable, value in zip(self.update.updated, new):
                if context in variable.copies:
                    transaction.convert(variable.copies[context], value)

    def _check_finite(self, loss, gradients):
        names = ['the loss'] + ['the gradient of %s' % param for param in self.params]
        for name, value in zip(names, [loss] + [fetch(gradient) for gradient in gradients]):
            if not np.isfinite(value).all():
                raise NonFiniteError('%s is not finite (loss %s): no parameter was changed. Lower the learning rate, '
                                     'clip the gradients, or look for a division by zero or a log of zero in the '
                                     'model' % (name, loss))

    def variables(self):
        """The Replicated variables that make up the training state, each once, in a fixed order."""
        trained = [r for r in self.forward.graph.variables if r.variable in self.params]
        return list(dict.fromkeys(trained + self.update.variables + self.forward.graph.updated + self.forward.of_batch))

    def save(self, path, allow_nan=False):
        """Save the training state (parameters, update state, random streams) to an .npz file.

        Parameters
        ----------
        path : str
            Written whole or not at all; what it held before stays as ``path + '.previous'``. With several processes,
            all of them have to call it: the first one writes, and the others wait until it has.
        allow_nan : bool
            Write a state that is not finite, too. Otherwise a warning names the variables that are infinite or not a
            number, and the file stays as it is.

        Raises
        ------
        OSError
            If the file cannot be written; it is then as it was before.
        """
        self.save_with(path, allow_nan=allow_nan)

    def save_with(self, path, extra=None, allow_nan=False):
        """As `save`, with further arrays, a dict of str to ndarray."""
        state.save(path, self.variables(), self.contexts, self.forward.ranks, extra, allow_nan)

    def load(self, path):
        """Load what `save` wrote, into a function of the same model; nothing is changed on an error.

        Where the file is damaged, the state before it is loaded from ``path + '.previous'``, with a warning.

        Raises
        ------
        ValueError
            If the file is not of this model, or damaged, and so is the one before it.
        """
        state.load(path, self.variables(), self.contexts, self.forward.ranks)

    def checkpoint(self, path, every, allow_nan=False):
        """Save the training state every `every` steps; if the file exists, resume from it first.

        Parameters
        ----------
        path : str
            An .npz file, always a whole one. Each checkpoint replaces the one before, which stays as
            ``path + '.previous'`` and is taken where the file turns out to be damaged.
        every : int
            Completed steps between checkpoints, at least 1: what a crash can lose. A call that raises an error
            completes no step.
        allow_nan : bool
            As for `save`.

        Returns
        -------
        int
            Steps that are completed already: 0, or where the loop goes on, as in
            ``for i in range(step.checkpoint('run.npz', every=100), n_batches): step(*batch(i))``.

        Raises
        ------
        ValueError
            If the file is of another model, or damaged, and so is the one before it.
        MgpuError
            If another job writes its checkpoints there.
        """
        if every < 1:
            raise ValueError('every=%r: give the number of steps between checkpoints, 1 or more' % (every,))
        before = 0
        if self.forward.ranks.by_first(functools.partial(self._begin_checkpoints, path)):
            extra = state.load(path, self.variables(), self.contexts, self.forward.ranks)
            if 'calls' not in extra:
                raise ValueError('%s does not say how many steps it comes after; give a file that step.checkpoint '
                                 'wrote, or load this one with step.load' % path)
            before = int(extra['calls'])
        self._checkpoint = (path, every, before - self._completed, allow_nan)
        return before

    def _begin_checkpoints(self, path):
        """Keep a file to this process; whether it exists."""
        self._checkpoint_lock = lock_checkpoint(path)
        return os.path.exists(path)

    def _note_completed(self):
        """Called after each completed step, which a checkpoint counts."""
        self._completed += 1
        if not self._checkpoint:
            return
        path, every, before, allow_nan = self._checkpoint
        done = before + self._completed
        if done % every == 0:
            self.save_with(path, {'calls': np.array(done)}, allow_nan)
