"""`mgpu.training_function`: one training step over several contexts."""
import functools
import inspect
import warnings

import numpy as np
import theano

from . import graph, state
from .dependence import COUNT, MIXED, ROWS, SUM
from .errors import GraphError, MgpuWarning, NonFiniteError
from .forward import Forward, check_input, split_inputs
from .parallel_graph import ParallelGraph, resolve_contexts, run_replicas
from .samples import analyse
from .statistics import mean_exact


def training_function(inputs, loss, params, updates, outputs=(), micro_batches=1, batch_updates=None, broadcast=(),
                      givens=None, check_finite=False, contexts=None, executor=None, mode=None, name=None,
                      allow_input_downcast=None, least_samples=1, sharded=None):
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
    step = TrainingFunction(inputs, loss, params, updates, outputs, micro_batches, batch_updates, broadcast, givens,
                            check_finite, contexts, executor, mode, name, allow_input_downcast, least_samples,
                            sharded=sharded)
    if step.couplings and step.n_replicas > 1:
        warnings.warn('the loss cannot be computed exactly from sub-batches, since parts of it depend on several '
                      'samples at once: %s. Each replica computes them of its own sub-batch'
                      % '; '.join('%s (%s)' % (c.node, c.reason) for c in step.couplings), MgpuWarning, stacklevel=2)
    return step


class TrainingFunction:
    """What `training_function` returns.

    Attributes
    ----------
    contexts : list of Context
    params : list of SharedVariable
    timings : Timings
        Seconds that the steps spent in each phase: scatter, run, fetch, all_reduce, update.
    couplings : list of Coupling
        Where the loss mixes samples, so that replicas compute something else than one device.
    """

    def __init__(self, inputs, loss, params, updates, outputs=(), micro_batches=1, batch_updates=None, broadcast=(),
                 givens=None, check_finite=False, contexts=None, executor=None, mode=None, name=None,
                 allow_input_downcast=None, least_samples=1, uniform=(), sharded=None):
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
        self.update = ParallelGraph(averaged, [], new_values(updates, averaged, self.params), self.contexts,
                                    self.forward.ranks, same_on_all=True, mode=mode, name=name)
        self.forward.graphs.append(self.update)

    @property
    def compiled(self):
        return self.forward.graph.compiled + self.update.compiled

    @property
    def n_replicas(self):
        """Replicas on all ranks."""
        return sum(self.update.replicas)

    def __call__(self, *args, **kwargs):
        """Train on one batch; returns the loss, or a list of loss and outputs."""
        with self.forward.step(args, kwargs) as step:
            loss, outputs = self._run(step)
        return [loss] + outputs if outputs else loss

    def join(self):
        """Call it where each process of a job feeds its own data, once that has ended: it returns when all have.

        Until then the process takes part in the others' steps, without samples.
        """
        self.forward.join(self._run)

    def _run(self, step):
        step.run_all()
        loss, gradients = step.averages[0], step.averages[1:]
        if self.check_finite:
            self._check_finite(loss, gradients)
        with self.forward.timings.span('update'):
            self._apply(gradients, step.transaction)
        return np.array(loss), step.commit()

    def _apply(self, gradients, transaction):
        """Compute the new values on each context, then store them all."""
        tasks = [functools.partial(self.update.run, replica, gradients) for replica in range(len(self.contexts))]
        results = run_replicas(self.forward.executor, tasks, self.contexts)
        for context, (_, new) in zip(self.contexts, results):
            for variable, value in zip(self.update.updated, new):
                transaction.replace(variable.copies[context], value)
        for variable in self.update.updated:
            variable.commit(self.contexts)

    def _check_finite(self, loss, gradients):
        names = ['the loss'] + ['the gradient of %s' % param for param in self.params]
        for name, value in zip(names, [loss] + gradients):
            if not np.isfinite(value).all():
                raise NonFiniteError('%s is not finite (loss %s): no parameter was changed. Lower the learning rate, '
                                     'clip the gradients, or look for a division by zero or a log of zero in the '
                                     'model' % (name, loss))

    def variables(self):
        """The Replicated variables that make up the training state, each once, in a fixed order."""
        trained = [r for r in self.forward.graph.variables if r.variable in self.params]
        return list(dict.fromkeys(trained + self.update.variables + self.forward.graph.updated + self.forward.of_batch))

    def save(self, path):
        """Save the training state (parameters, update state, random streams) to an .npz file.

        Parameters
        ----------
        path : str
            Written whole or not at all.
        """
        state.save(path, self.variables(), self.contexts)

    def load(self, path):
        """Load what `save` wrote, into a function of the same model; nothing is changed on an error.

        Raises
        ------
        ValueError
            If the file is not of this model.
        """
        state.load(path, self.variables(), self.contexts)


def scalar_loss(loss):
    """The loss as a graph of host variables; a GraphError if it is no scalar."""
    if getattr(loss, 'ndim', None) != 0:
        raise GraphError('the loss must be a scalar, not %s of type %s: take its mean over the samples, '
                         'loss.mean()' % (loss, getattr(loss, 'type', type(loss).__name__)))
    return graph.host_graph([loss])[0]


def splittable(loss, inputs, broadcast, givens, uniform=()):
    """A loss whose mean over the replicas is that of the whole batch.

    Returns
    -------
    loss : theano.Variable
    scale : scalar theano.Variable or None
        An input that it then has: samples of the batch / samples of the sub-batch.
    couplings : list of Coupling
        Why it is not exact.
    """
    inputs = [check_input(variable) for variable in inputs]
    carriers = [variable for variable, split in zip(inputs, split_inputs(inputs, broadcast)) if split]
    given = analyse(list((givens or {}).values()), carriers)
    carriers += [old for old, new in (givens or {}).items() if given.of(new).kind == ROWS]
    samples = analyse([loss], carriers, uniform)
    if samples.of(loss).kind not in (SUM, COUNT, MIXED):
        return loss, None, samples.couplings
    scale = theano.tensor.scalar('scale of sums', dtype=loss.dtype)
    return mean_exact(loss, samples, scale), scale, samples.couplings


def loss_gradients(loss, params):
    """Gradients of a scalar loss, with errors that name the remedy."""
    if not params:
        raise GraphError('params is empty: name the shared variables to train')
    views = [graph.host_view(param) for param in params]
    known = graph.shared_variables([loss])
    for param, view in zip(params, views):
        if view not in known:
            raise GraphError('the loss does not depend on the parameter %s; its shared variables are: %s'
                             % (param, ', '.join(map(str, known)) or 'none'))
    return theano.grad(loss, views)


def output_reductions(outputs):
    """Split ``outputs`` into variables and what becomes of each."""
    pairs = [output if isinstance(output, tuple) else (output, None) for output in outputs]
    return [variable for variable, _ in pairs], [how for _, how in pairs]


def new_values(updates, gradients, params):
    """Call the user's `updates`; returns a dict of shared variables to new values of their types.

    Raises
    ------
    GraphError
        If what it returns are no updates of shared variables.
    """
    returned = updates(*[gradients, params][:_takes(updates)])
    pairs = list(returned.items() if hasattr(returned, 'items') else returned)
    for variable, _ in pairs:
        if not isinstance(variable, theano.compile.SharedVariable):
            raise GraphError('updates returned a new value for %r, which is no shared variable' % (variable,))
    found = {graph.host_view(variable): _cast(variable, value) for variable, value in pairs}
    if len(found) < len(pairs):
        raise GraphError('updates returned two new values for one shared variable')
    values = graph.host_graph(list(found.values()))
    found = dict(zip(found, values))
    for variable in graph.shared_variables(values):
        if getattr(variable, 'default_update', None) is not None and variable not in found:
            found[variable], = graph.host_graph([variable.default_update])
    foreign = [v for v in graph.free_inputs(list(found.values())) if v not in gradients]
    if foreign:
        raise GraphError('the updates depend on %s: they are computed once the gradients of all replicas are '
                         'averaged, from gradients, parameters and other shared variables only' % foreign)
    return found


def _takes(updates):
    """How many of (gradients, params) an updates callable wants: 1 or 2."""
    parameters = inspect.signature(updates).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    required += [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or not positional:
        raise GraphError('updates must be callable with (gradients) or (gradients, params), but %s needs %s: bind '
                         'the others, e.g. functools.partial(%s, %s=...)'
                         % (updates, required, getattr(updates, '__name__', 'updates'), (required or ['x'])[-1]))
    return max(1, len(required))


def _cast(variable, value):
    """A new value as a variable of the shared variable's type, as `theano.function` would have it."""
    if not hasattr(variable.type, 'broadcastable'):
        return value
    try:
        return graph.host_type(variable).filter_variable(graph.on_host(theano.tensor.as_tensor_variable(value)))
    except TypeError as error:
        raise GraphError('the new value of %s has type %s, not %s: cast it, or write its constants as numpy.%s'
                         % (variable, theano.tensor.as_tensor_variable(value).type, variable.type,
                            variable.type.dtype)) from error
