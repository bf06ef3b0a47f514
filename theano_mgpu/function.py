"""`mgpu.function`: a `theano.function` that runs over sub-batches on several contexts."""
from .errors import GraphError
from .forward import Forward
from .parallel_graph import resolve_contexts
from .samples import warn_of_couplings


def function(inputs, outputs, reduce=None, broadcast=(), givens=None, contexts=None, executor=None,
             mode=None, name=None, allow_input_downcast=None, sharded=None):
    """Compile a Theano graph into a callable that runs it over sub-batches on every context.

    A call splits its arguments along axis 0 into sub-batches whose sizes differ by at most one, runs
    each context's own compiled function on one of them, and puts the outputs together.

    Parameters
    ----------
    inputs : list of theano.Variable
        Each has samples along axis 0, but for scalars and those named in `broadcast`.
    outputs : theano.Variable or list of theano.Variable
    reduce : {None, 'gather', 'mean', 'sum'} or list of these
        What becomes of the replicas' outputs: concatenated along axis 0 (None, 'gather'); averaged,
        weighted by sub-batch size ('mean'); added ('sum'). A list has one entry an output.
    broadcast : list of theano.Variable
        Inputs that every replica gets whole.
    givens : dict of theano.Variable to theano.Variable, optional
        As for `theano.function`, e.g. ``{x: data[indices]}`` with shared data and the input `indices`.
    contexts : list of str, optional
        Names of the contexts to run on; all by default.
    executor : {'auto', 'serial', 'threads', 'mpi'}, optional
        The flag ``mgpu.executor`` by default. Of several processes that mpirun started, 'serial' and 'threads'
        keep this one to itself.
    mode, name, allow_input_downcast
        As for `theano.function`.
    sharded : bool, optional
        Of several processes, whether each is given its own part of the batch, instead of the whole batch on
        each; outputs with a row a sample are then those of the own part. The flag ``mgpu.data`` by default.

    Returns
    -------
    ParallelFunction
        Called with arrays, it returns an array, or a list of arrays if `outputs` is a list.

    Raises
    ------
    GraphError, ContextError
        If the graph cannot be run over these contexts.

    Notes
    -----
    Random streams in the graph go on independently on each replica. Other shared variables with a
    default update (running averages, counts) get the new value that the whole batch gives them.

    Examples
    --------
    >>> import numpy as np
    >>> import theano_mgpu, theano.tensor as T
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> x = T.dmatrix('x')
    >>> f = function([x], x.sum(axis=1), mode='FAST_COMPILE')
    >>> f(np.ones((3, 2)))
    array([2., 2., 2.])
    """
    single = not isinstance(outputs, (list, tuple))
    output_list = [outputs] if single else list(outputs)
    made = ParallelFunction(inputs, output_list, reduce, broadcast, givens, contexts, executor, mode, name,
                            allow_input_downcast, single=single, sharded=sharded)
    if sum(made.forward.graph.replicas) > 1:
        warn_of_couplings('an output', made.forward.couplings)
    return made


class ParallelFunction:
    """What `function` returns.

    Attributes
    ----------
    contexts : list of Context
    compiled : list of theano.compile.function_module.Function
        One a context.
    timings : Timings
        Seconds that its calls spent in each phase.
    """

    def __init__(self, inputs, outputs, reduce=None, broadcast=(), givens=None, contexts=None, executor=None,
                 mode=None, name=None, allow_input_downcast=None, updates=None, single=False, uniform=(),
                 sharded=None):
        reductions = reduce if isinstance(reduce, (list, tuple)) else [reduce] * len(outputs)
        if len(reductions) != len(outputs):
            raise GraphError('reduce=%r has %d entries for %d outputs' % (reduce, len(reductions), len(outputs)))
        self.contexts = resolve_contexts(contexts)
        self.forward = Forward(inputs, outputs, reductions, self.contexts, broadcast, givens, executor, mode, name,
                               allow_input_downcast, updates, uniform=uniform, sharded=sharded)
        self.timings = self.forward.timings
        self._single = single

    @property
    def compiled(self):
        return self.forward.graph.compiled

    def __call__(self, *args, **kwargs):
        """Run the function on a batch; arguments as for a compiled `theano.function`."""
        results = self.forward.step(args, kwargs).run(self._run)
        return results[0] if self._single else results

    def join(self):
        """As for a training function: take part in the other processes' calls until the data of each has ended."""
        for _ in self.joined():
            pass

    def joined(self):
        """As `join`, but yields of each call the outputs, and its samples."""
        return self.forward.join(self._run)

    def _run(self, step):
        step.run_all()
        return step.commit()
