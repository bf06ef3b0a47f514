"""`mgpu.function`: a `theano.function` that runs over sub-batches on several contexts."""
from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np
import theano
from theano.compile.function_module import UnusedInputError
from theano.gof.graph import ancestors

from .checks.ledger import account_of
from .errors import named, warn
from .graph.updates import as_dict, pairs
from .options import Options
from .runtime.building import warn_of_refusals
from .runtime.divided_function import DividedFunction


def function(inputs: Sequence[Any], outputs: Any = None, updates: Any = None,
             samples: dict[theano.Variable, int] | None = None, broadcast: Sequence[theano.Variable] = (),
             givens: Any = None, no_default_updates: bool = False, contexts: Any = None, executor: str | None = None,
             mode: Any = None, name: str | None = None, allow_input_downcast: bool | None = None,
             on_unused_input: str = 'ignore', profile: bool | None = None, sharded: bool | None = None,
             micro_batches: int | None = None, update_on: str | None = None,
             recompute: bool | None = None) -> ParallelFunction:
    """Compile a Theano graph into a callable that runs it over sub-batches on every context.

    A call splits its arguments into sub-batches whose sizes differ by at most one, runs each context's own compiled
    function on one of them, and puts the outputs together. New values are made of sums over the whole batch.

    Parameters
    ----------
    inputs : list of theano.Variable or theano.In
        Each has samples along axis 0, but for scalars, unless `samples` and `broadcast` say otherwise. Where none has,
        the batch is a slice of shared data sets by an input, such as ``X[index * 20:(index + 1) * 20]``; each context
        has a copy of the data set, and slices its own part. If a device has too little memory for a copy, slices are
        taken on the host.
    outputs : theano.Variable or theano.Out, list of these, dict of str to these, or None
        Each is computed of the whole batch.
    updates : dict of SharedVariable to theano.Variable, or list of pairs
        New values of shared variables, of any dependence on the batch: as for `theano.function`.
    samples : dict of theano.Variable to int, optional
        The inputs that have samples, and along which axis: ``{x: 1, mask: 1, labels: 0}`` for time-major sequences.
        Every replica gets the others whole. Shared variables with samples along axis 0, too: each context keeps its
        rows, or is sent them in each call if the function updates them, as the chains of a sampler.
    broadcast : list of theano.Variable
        Inputs that every replica gets whole.
    givens, no_default_updates
        As for `theano.function`, e.g. ``givens={x: data[indices]}`` with shared data and the input `indices`.
    contexts : list of str, or list of lists of str, optional
        Names of the contexts to run on; all by default. For a graph that is placed on several contexts by `device`,
        a list for each replica of it, such as ``[['dev0', 'dev1'], ['dev2', 'dev3']]``.
    executor : {'auto', 'serial', 'threads', 'mpi'}, optional
        The flag ``mgpu.executor`` by default. With several processes, 'serial' and 'threads' run the function in
        this process alone.
    mode, name, allow_input_downcast, on_unused_input
        As for `theano.function`; inputs that are not used are ignored unless 'warn' or 'raise' is given.
    micro_batches, recompute, update_on
        As for `mgpu.training_function`.
    profile : bool, optional
        Whether to profile the functions of each context: ``f.profiles`` has a `theano.compile.ProfileStats` for each.
    sharded : bool, optional
        With several processes: whether each gets its own part of the batch instead of the whole batch. Outputs
        with one row per sample are then of this part alone. A data set that batches are sliced from then holds the
        part of the process, of any length. The flag ``mgpu.data`` by default.

    Returns
    -------
    ParallelFunction
        Called with arrays, it returns an array, or a list or dict of arrays if `outputs` is one.

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

    A step of plain gradient descent over a shared data set:

    >>> data, w, index = theano.shared(np.ones((30, 2))), theano.shared(np.zeros(2)), T.lscalar('index')
    >>> rows = data[index * 20:(index + 1) * 20]
    >>> loss = ((T.dot(rows, w) - 1) ** 2).mean()
    >>> step = function([index], loss, updates=[(w, w - 0.1 * T.grad(loss, w))], mode='FAST_COMPILE')
    >>> print("%.2f %.2f" % (step(0), step(1)), step.samples)
    1.00 0.36 10
    """
    packing = Packing(outputs)
    check_used(inputs, packing.variables, updates, givens, on_unused_input)
    step = ParallelFunction(inputs, packing.variables, updates, packing, samples=samples, broadcast=broadcast,
                            givens=givens, no_default_updates=no_default_updates, contexts=contexts, executor=executor,
                            mode=mode, name=name, allow_input_downcast=allow_input_downcast, profile=profile,
                            sharded=sharded, micro_batches=micro_batches, update_on=update_on, recompute=recompute)
    if step.updated:
        step.hooks.record(account_of(step, step.updated))
    warn_of_refusals(step.built, step.options)
    return step


class Packing:
    """The outputs of a function, as they are given and returned: one, a list, a dict with these keys, or none."""

    def __init__(self, outputs: Any):
        self.keys = sorted(outputs) if isinstance(outputs, dict) else None
        self._single = outputs is not None and not isinstance(outputs, (list, tuple, dict))
        listed = [] if outputs is None else [outputs] if self._single else \
            [outputs[key] for key in self.keys] if self.keys is not None else outputs
        variables = [each.variable if isinstance(each, theano.Out) else each for each in listed]
        self.variables = [each if isinstance(each, theano.Variable) else theano.tensor.as_tensor_variable(each)
                          for each in variables]  # numbers and arrays are constants

    def numbers(self, subset: list[Any]) -> list[int]:
        """Return the numbers of the outputs in a list of numbers, or of the keys of a dict; an error for others."""
        if self.keys is not None:
            return [self.keys.index(key) for key in subset]
        check_subset(subset, len(self.variables))
        return subset

    def __call__(self, results: list[np.ndarray], numbers: list[int] | None = None) -> Any:
        """Return the results as a call does: all of them, or those with certain numbers."""
        if numbers is None:
            return dict(zip(self.keys, results)) if self.keys is not None else results[0] if self._single else results
        some = [results[number] for number in numbers]
        return some if self.keys is None else dict(zip([self.keys[number] for number in numbers], some))


def check_subset(subset: Any, n_outputs: int) -> None:
    """Raise an error unless a list has the numbers of outputs; Theano's own code writes to foreign memory then."""
    if type(subset) is not list:
        raise RuntimeError('Output_subset is not a list')
    if not all(isinstance(i, int) for i in subset):
        raise RuntimeError('Some elements of output_subset list are not int')
    if not all(0 <= i < n_outputs for i in subset):
        raise IndexError('output_subset=%r, but the function has %d outputs, which are numbered from 0'
                         % (subset, n_outputs))


def check_used(inputs: Sequence[Any], outputs: list[theano.Variable], updates: Any, givens: Any,
               on_unused_input: str) -> None:
    """Raise theano's UnusedInputError, or warn, where an input is not used."""
    if on_unused_input == 'ignore':
        return
    used = set(ancestors(outputs + [new for _, new in pairs(updates)] + [new for _, new in pairs(givens)]))
    variables = [each.variable if isinstance(each, theano.In) else each for each in inputs]
    unused = [variable for variable in variables if variable not in used]
    text = 'the inputs %s are not used. Leave them out, or pass on_unused_input="ignore"' % named(unused)
    if unused and on_unused_input != 'warn':
        raise UnusedInputError(text)
    if unused:
        warn(text)


class ParallelFunction(DividedFunction):
    """The result of `function`; it has the attributes of a `DividedFunction`.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable, or list of pairs
        New values, besides the default updates of the graph.
    pack : callable, optional
        ``pack(results, numbers=None)`` makes the result of a call; by default a list.
    **options
        The other keywords of `mgpu.function`.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Any = None,
                 pack: Callable[..., Any] | None = None, **options: Any):
        super().__init__(inputs, outputs, as_dict(updates), Options(**options))
        self._pack: Any = pack or Packing(outputs)

    def __call__(self, *args: Any, output_subset: list[Any] | None = None, **kwargs: Any) -> Any:
        """Run the function on a batch.

        Parameters
        ----------
        *args, **kwargs : array_like
            The inputs, in their order or by name, as for a `theano.function`.
        output_subset : list of int, or list of str, optional
            The outputs to return, by their numbers or keys. All of them are computed, and all updates made.

        Returns
        -------
        ndarray, list of ndarray, or dict of str to ndarray
            As `outputs` was given. Samples are in the order of the batch.

        Raises
        ------
        BatchError
            If the arguments cannot be split into sub-batches.
        ReplicaError, RankError
            If a context, or another process, fails. Nothing is changed then, as after any other error.
        """
        numbers = None if output_subset is None else self._pack.numbers(output_subset)
        return self._pack(self.hooks.run((args, kwargs)).outputs, numbers)
