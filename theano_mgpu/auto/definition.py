"""The graph of a `theano.function` that `enable` has found."""
from __future__ import annotations

from typing import Any, Mapping

import theano
from theano.compile.sharedvalue import SharedVariable

from ..errors import GraphError
from ..graph.rewrites import substitute
from ..graph.theano_functions import builds_graphs
from ..graph.updates import with_givens
from .function_call import explicit_inputs


class Refusal(GraphError):
    """The reason why a function, or a batch of it, is not divided."""


class Definition:
    """The graph of a `theano.function`, with givens and default updates, before Theano's optimiser.

    Attributes
    ----------
    inputs : list of theano.In
        The inputs that a call may be given.
    outputs : list of theano.Variable
    states : list of theano.Variable
        New values of the inputs that have an update, see `theano.In`.
    updates : dict of SharedVariable to theano.Variable
    """

    def __init__(self, function: Any) -> None:
        maker = function.maker
        self.inputs = [each for each, _ in explicit_inputs(function)]
        self.outputs = [output.variable for output in maker.outputs]
        self.states = [each.update for each in self.inputs if each.update is not None]
        self.updates = {each.variable: each.update for each in maker.inputs if each.shared and each.update is not None}
        self._held = [each.variable for each in maker.expanded_inputs
                      if isinstance(each.value, theano.gof.Container) != isinstance(each.variable, SharedVariable)]

    @builds_graphs
    def copied(self, swap: Mapping[Any, Any] | None, delete_updates: bool) -> Definition:
        """Return the Definition of a copy, see `Function.copy`."""
        new, swap = object.__new__(Definition), swap or {}
        updates = {} if delete_updates else self.updates
        graph = substitute(self.outputs + self.states + list(updates.values()), swap)
        first_state, first_update = len(self.outputs), len(self.outputs) + len(self.states)
        new.inputs, new.outputs, new._held = self.inputs, graph[:first_state], self._held
        new.states = [] if delete_updates else graph[first_state:first_update]
        new.updates = dict(zip([swap.get(variable, variable) for variable in updates], graph[first_update:]))
        return new

    @builds_graphs
    def on_host(self) -> tuple[list[Any], list[Any], dict[Any, Any]]:
        """Return the inputs, the outputs with the new states, and the updates, for the host.

        A GraphError says why contexts cannot run the graph.
        """
        if self._held:
            raise Refusal('theano.In(%s) has the value of a container' % self._held[0])
        inputs = [each.variable for each in self.inputs]
        # An argument takes the place of the graph of its variable.
        leaves = {v: v.type(v.name) for v in inputs
                  if v.owner is not None and isinstance(v.type, theano.tensor.TensorType)}
        graph = with_givens(self.outputs + self.states, self.updates, leaves, no_default_updates=True)
        return ([leaves.get(v, v) for v in inputs], *graph)
