"""`mgpu.function`: a `theano.function` that runs over sub-batches on several contexts."""
from .data_parallel import DataParallel, check_reductions
from .errors import GraphError
from .options import Options


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
        Not needed: each output is that of the whole batch, by what the graph says. 'gather' is an error for an output
        without rows of single samples; 'mean' and 'sum' for one that has them. A list has one entry an output.
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
    Shared variables with a default update (random streams, running averages, counts) get the new value that the whole
    batch gives them. A graph that cannot be computed in parts is computed whole on the first context, and a warning
    says why.

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
    reductions = reduce if isinstance(reduce, (list, tuple)) else [reduce] * len(output_list)
    if len(reductions) != len(output_list):
        raise GraphError('reduce=%r has %d entries for %d outputs' % (reduce, len(reductions), len(output_list)))
    made = ParallelFunction(inputs, output_list, single=single, broadcast=broadcast, givens=givens, contexts=contexts,
                            executor=executor, mode=mode, name=name, allow_input_downcast=allow_input_downcast,
                            sharded=sharded)
    check_reductions(made.results, reductions, output_list)
    made.warn_if_refused()
    return made


class ParallelFunction(DataParallel):
    """What `function` returns; its attributes are those of a `DataParallel`.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values, besides the default updates of the graph.
    single : bool
        Whether to return the one output, not a list.
    options
        Those of `Options`.
    """

    def __init__(self, inputs, outputs, updates=None, single=False, **options):
        super().__init__(inputs, outputs, {}, updates or {}, Options(**options))
        self._single = single

    def __call__(self, *args, **kwargs):
        """Run the function on a batch; arguments as for a compiled `theano.function`."""
        results = self.step(args, kwargs)
        return results[0] if self._single else results
