"""The programs of a `theano.function` for the ways in which its calls bring a batch."""
from ..batches.arguments import Arguments
from ..errors import GraphError, MgpuError
from ..graphs.updates import as_dict, with_givens
from ..parallel_function import Packing, ParallelFunction
from ..program import CannotCut
from .batch_finder import BatchFinder

REFUSALS = 6  # ways to take the batch that are analysed, and refused


def definition(given):
    """The graph of a `theano.function`.

    Parameters
    ----------
    given : dict
        The arguments of `theano.function`.

    Returns
    -------
    Packing, list of theano.Variable, dict of SharedVariable to theano.Variable
        What a call returns, the outputs, and the updates, default updates included.
    """
    outputs, keys = given['outputs'], given['output_keys']
    pack = Packing(dict(zip(keys, outputs)) if keys is not None else outputs)
    return (pack,) + with_givens(pack.variables, as_dict(given['updates']), given['givens'],
                                 given['no_default_updates'])


class Programs:
    """The ParallelFunctions for the ways to take arguments as a batch, each made when a call shows the way.

    Parameters
    ----------
    given : dict
        The arguments of `theano.function`.
    contexts : callable
        Returns the contexts.

    Attributes
    ----------
    pack : Packing
    graph : list of theano.Variable
        The outputs, new values, and the variables that get them.
    finder : BatchFinder
    refused : set
        The keys of ways that cannot be divided.

    Raises
    ------
    GraphError
        If the arguments exclude several contexts.
    """

    def __init__(self, given, contexts):
        self._given, self._contexts = given, contexts
        self.pack, self._variables, self._updates = definition(given)
        self.graph = self._variables + list(self._updates.values()) + list(self._updates)
        self._arguments = Arguments(given['params'], {}, given['allow_input_downcast'])
        self.finder = BatchFinder(self._arguments.inputs, self._variables + list(self._updates.values()),
                                  self._updates)
        self._steps, self.refused = {}, set()  # by the key of a Way; and, of steps, the one length that they take

    def forget(self):
        """Free the ParallelFunctions."""
        self._steps = {}

    def made_before(self, args, kwargs):
        """Return the ParallelFunction that there is for a batch such as this one, or None."""
        return next(filter(None, map(self._made, self._ways(args, kwargs))), None)

    def _made(self, way):
        return self._steps.get((way.key, way.length)) or self._steps.get((way.key, None))

    def likelier_than(self, step, args, kwargs):
        """Return whether a call has a likelier batch than the one that a ParallelFunction would take."""
        ways = list(self._ways(args, kwargs))
        own = [way.length for way in ways if self._made(way) is step]
        return bool(own) and own[0] != ways[0].length

    def step_for(self, args, kwargs):
        """Return the ParallelFunction for a batch such as this one; None if there is no batch, or a known refusal.

        Raises
        ------
        BatchError
            If the arguments are wrong.
        GraphError
            If there is a batch that cannot be divided, and this was not known.
        """
        values = self._arguments.bind(args, kwargs)
        refusal = None
        for way in self.finder.ways(values) if self.finder else ():
            if way.key in self.refused or len(self.refused) >= REFUSALS:
                continue
            if self._made(way):
                return self._made(way)
            try:
                step = self.compiled(samples=way.axes, length=way.length, example=values, must_divide=True)
                self._steps[way.key, step.inputs.only_length] = step
                return step
            except MgpuError as error:
                refusal = refusal or error
                self.refused.add(way.key)
        if refusal is None:
            return None
        cut = isinstance(refusal.__cause__, CannotCut)
        # The text says all that the errors before this one do.
        raise GraphError('it cannot be computed in parts: %s' % refusal.__cause__ if cut else str(refusal)) from None

    def compiled(self, **options):
        """Return the ParallelFunction of the definition with these options."""
        given = self._given
        return ParallelFunction(given['params'], self._variables, self._updates, no_default_updates=True,
                                contexts=self._contexts(), mode=given['mode'], name=given['name'],
                                allow_input_downcast=given['allow_input_downcast'], **options)

    def _ways(self, args, kwargs):
        return self.finder.ways(self._arguments.bind(args, kwargs))
