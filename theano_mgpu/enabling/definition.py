"""The graph of a `theano.function` that `enable` has found."""
import theano
from theano.compile.sharedvalue import SharedVariable

from ..errors import GraphError
from ..graphs.graph import substitute
from ..graphs.own_flags import builds_graphs
from ..graphs.updates import with_givens
from .function_call import explicit_inputs


class Refusal(GraphError):
    """The reason why a function, or a batch of it, is not divided."""


class Definition:
    """The graph of a `theano.function`, with givens and default updates, before Theano's optimiser.

    Parameters
    ----------
    function : theano.compile.function_module.Function

    Attributes
    ----------
    inputs : list of theano.In
        Those that a call may be given.
    outputs : list of theano.Variable
    states : list of theano.Variable
        New values of the inputs that have an update, see `theano.In`.
    updates : dict of SharedVariable to theano.Variable
    """

    def __init__(self, function):
        maker = function.maker
        self.inputs = [given for given, _ in explicit_inputs(function)]
        self.outputs = [output.variable for output in maker.outputs]
        self.states = [given.update for given in self.inputs if given.update is not None]
        self.updates = {given.variable: given.update for given in maker.inputs
                        if given.shared and given.update is not None}
        self._held = [given.variable for given in maker.expanded_inputs if
                      isinstance(given.value, theano.gof.Container) != isinstance(given.variable, SharedVariable)]

    @builds_graphs
    def copied(self, swap, delete_updates):
        """Return the Definition of a copy, see `Function.copy`."""
        new, swap = object.__new__(Definition), swap or {}
        updates = {} if delete_updates else self.updates
        graph = substitute(self.outputs + self.states + list(updates.values()), swap)
        n = len(self.outputs), len(self.outputs) + len(self.states)
        new.inputs, new.outputs, new._held = self.inputs, graph[:n[0]], self._held
        new.states = [] if delete_updates else graph[n[0]:n[1]]
        new.updates = dict(zip([swap.get(variable, variable) for variable in updates], graph[n[1]:]))
        return new

    @builds_graphs
    def on_host(self, subset=None):
        """Return the graph of all outputs, or of some, in variables of the host.

        Parameters
        ----------
        subset : list of int, optional

        Returns
        -------
        list of theano.Variable
            The explicit inputs.
        list of theano.Variable
            The outputs, then the new states.
        dict of SharedVariable to theano.Variable

        Raises
        ------
        GraphError
            If contexts cannot run the graph.
        """
        if self._held:
            raise Refusal('theano.In(%s) has the value of a container' % self._held[0])
        outputs = self.outputs if subset is None else [self.outputs[i] for i in subset]
        graph = with_givens(outputs + self.states, self.updates, None, no_default_updates=True)
        return ([given.variable for given in self.inputs],) + graph
