"""Places for all ops of a graph, from the few ops that the user has placed.

The rules come from MXNet's pass ``PlaceDevice`` (nnvm, src/pass/place_device.cc): a node's own group, else the
device of its first placed input; backwards for the other nodes; the rest on a default device. They are improved in four
ways. A node is beside the parameters that it reads, rather than beside its first input. A gradient is beside its
forward op: see `tags`. Updates, and the state of an optimizer, are beside their parameter. Shared
variables have a place, too.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterable, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.scan_module.scan_op import Scan

from ...errors import GraphError, named
from ..patches import record_places
from ..rewrites import inner_inputs, inner_outputs, rebuilt
from .tags import Beside, place_of, place_of_node, tag

_SEVERAL = object()  # a node feeds several parameters, or something else than an update


def is_placed(outputs: Iterable[theano.Variable]) -> bool:
    """Return whether the user has placed any variable of a graph, shared variables included.

    Parameters
    ----------
    outputs : list of theano.Variable
        The outputs of a function, new values included.
    """
    placed = any(isinstance(own_place(variable), str) for variable in ancestors(list(outputs)))
    if placed:
        record_places()  # the graph may be one that was unpickled
    return placed


def assigned(outputs: Sequence[theano.Variable], updates: dict[SharedVariable, theano.Variable], default: str,
             ) -> tuple[list[theano.Variable], dict[SharedVariable, theano.Variable], dict[SharedVariable, str]]:
    """Copy a graph, with a place for each op in ``tag.mgpu_place``; return the places of its shared variables, too.

    The rules, the first that applies:

    1. A node's own place. A node with a `Beside` is where the first one with the same `Beside` is.
    2. The root of a new value of a shared variable with a place, and untagged nodes that feed only new values of
       variables with that place, are there.
    3. The place of the node's first input that is made of shared variables alone and is no scalar; else the
       place of its first input with one.
    4. The place of the first node, in topological order, that reads it.
    5. `default`.

    A shared variable is at its own place; else where the first op that reads it is, if the user has placed one. Of the
    other variables, one that is updated, and that only the updates of one other variable read, is state of an
    optimizer, and is where this variable is. Any other one is where the first op with a place is that reads it, else at
    the root of its new value. Neither shared variables nor inputs are copied or tagged.

    Raise a GraphError if an op inside of a scan is placed elsewhere than the scan.
    """
    placement = _Propagation(list(outputs), dict(updates))

    def placed(node, inputs):
        place = placement.places.get(node) or placement.groups.get(place_of_node(node), default)
        _check_inside(node, place)
        copy = node.clone_with_new_inputs(inputs)
        tag(copy, place)
        return copy.outputs
    whole = rebuilt(list(outputs) + list(updates.values()), placed)
    return whole[:len(outputs)], dict(zip(updates, whole[len(outputs):])), \
        {variable: placement.leaves.get(variable, default) for variable in placement.shared_variables}


def own_place(variable: theano.Variable) -> Any:
    """Return the place that a variable, or the GPU variable which it stands for, is tagged with."""
    return place_of(getattr(variable.tag, 'stands_for', variable))


def _check_inside(node, place):
    """Raise a GraphError if an op of the inner graph of a node on this place is placed elsewhere.

    An op that does not change from step to step of a scan may be anywhere: Theano copies such expressions from around
    the scan into it, and moves them out of it again.
    """
    outputs = inner_outputs(node.op)
    if not outputs:
        return
    steps = set(inner_inputs(node.op))
    if isinstance(node.op, Scan):  # the inputs that change from step to step
        steps.difference_update(node.op.inner_non_seqs(node.op.inputs), node.op.inner_shared(node.op.inputs))
    for inner in io_toposort([], outputs):
        if steps.isdisjoint(inner.inputs):
            continue
        steps.update(inner.outputs)
        own = place_of_node(inner)
        if isinstance(own, str) and own != place:
            raise GraphError('%s is placed on %r inside of %s, which is on %r: a scan runs as a whole on one device. '
                             'Put the call of theano.scan, not its steps, into mgpu.device(%r)'
                             % (named(inner), own, named(node.op), place, own))
        _check_inside(inner, place)


class _Propagation:
    """The places of a graph's nodes, and in `leaves` of shared variables and inputs, as they are found."""

    def __init__(self, outputs, updates):
        self._outputs, self._updates = set(outputs), updates
        whole = outputs + list(updates.values())
        self.nodes = io_toposort([], whole)
        self.shared_variables = list(dict.fromkeys([v for v in ancestors(whole) if isinstance(v, SharedVariable)] +
                                                   list(updates)))
        self._index = {node: i for i, node in enumerate(self.nodes)}
        self._tags = {node: place_of_node(node) for node in self.nodes}
        self._readers = defaultdict(list)
        self._of_shared_alone = set()
        for node in self.nodes:
            for variable in dict.fromkeys(node.inputs):
                self._readers[variable].append(node)
            if all(isinstance(variable, theano.Constant) or self._is_of_shared_alone(variable)
                   for variable in node.inputs):
                self._of_shared_alone.add(node)
        self.places, self.groups, self.leaves = {}, {}, {}
        for variable in list(self._readers) + list(self._updates):
            if variable.owner is None and not isinstance(variable, theano.Constant):
                self._place_leaf(variable)
        self._place_updates()
        before = None
        while before != (len(self.places), len(self.leaves)):  # a `Beside` or an update alone connects some ops
            before = len(self.places), len(self.leaves)
            for node in self.nodes:
                self._settle(node, self._place_of_inputs)
            for node in reversed(self.nodes):
                self._settle(node, self._place_of_readers)
            for variable in self.shared_variables:
                self._infer_shared(variable)
        self._place_updates()  # for parameters whose place was inferred

    def _infer_shared(self, variable):
        """Place a shared variable where the first node with a place reads it, else at the root of its new value."""
        if variable not in self.leaves:
            place = next((self.places[node] for node in self._readers[variable] if node in self.places), None)
            if place is None and variable in self._updates:
                place = self._place(self._updates[variable])
            if place is not None:
                self.leaves[variable] = place

    def _is_of_shared_alone(self, variable):
        return isinstance(variable, SharedVariable) if variable.owner is None else \
            variable.owner in self._of_shared_alone

    def _place(self, variable):
        return self.leaves.get(variable) if variable.owner is None else self.places.get(variable.owner)

    def _place_leaf(self, variable):
        """Place a shared variable or an input by its own tag, else by the tag of the first op that the user placed."""
        tags = [own_place(variable)]
        if isinstance(variable, SharedVariable):
            tags += [self._tags[node] for node in self._readers[variable]]
        place = next((tag for tag in tags if isinstance(tag, str)), None)
        if place is not None:
            self.leaves[variable] = place

    # --- Updates -----------------------------------------------------------------------------------

    def _place_updates(self):
        """Place optimizer state and the arithmetic of updates beside the parameters."""
        fed = self._fed(lambda variable: variable)
        for variable in self._updates:
            if variable not in self.leaves:
                parameter = _common([fed[node] for node in self._readers[variable]])
                if parameter is not None and parameter is not _SEVERAL:
                    self.leaves[variable] = self.leaves[parameter]
        self.places.update((node, place) for node, place in self._fed(self.leaves.get).items()
                           if place not in (None, _SEVERAL))

    def _fed(self, purpose):
        """Return a dict of each node to the one purpose that it computes something for.

        `purpose` is a function of an updated variable with a place. A node that feeds no new value of such a variable
        has None, one that feeds several purposes _SEVERAL. Tagged nodes belong to the model and its gradients, and not
        to the updates: they and their inputs have _SEVERAL.
        """
        # Reversed, so that the first of two variables with one new value is the one that counts.
        purposes = {value: purpose(variable) for variable, value in reversed(list(self._updates.items()))
                    if variable in self.leaves}
        fed = {}
        for node in reversed(self.nodes):
            own = [purposes[output] for output in node.outputs if output in purposes]
            if self._tags[node] is not None:
                fed[node] = _SEVERAL
            elif own:
                fed[node] = own[0]
            elif not self._outputs.isdisjoint(node.outputs):
                fed[node] = _SEVERAL
            else:
                fed[node] = _common([fed[reader] for output in node.outputs for reader in self._readers[output]])
        return fed

    # --- The model and its gradients -----------------------------------------------------------------

    def _settle(self, node, inferred):
        """Place a node by its tag, else as inferred from its neighbours."""
        if node in self.places:
            return
        own = self._tags[node]
        place = own if isinstance(own, str) else self.groups.get(own) or inferred(node)
        if place is not None:
            self.places[node] = place
            if isinstance(own, Beside):
                self.groups[own] = place

    def _place_of_inputs(self, node):
        placed = [(variable, self._place(variable)) for variable in node.inputs if self._place(variable) is not None]
        arrays = [place for variable, place in placed
                  if getattr(variable, 'ndim', 1) and self._is_of_shared_alone(variable)]
        return next(iter(arrays + [place for _, place in placed]), None)

    def _place_of_readers(self, node):
        readers = [reader for output in node.outputs for reader in self._readers[output] if reader in self.places]
        return self.places[min(readers, key=self._index.get)] if readers else None


def _common(values):
    """Return the one value of a list, leaving out None; None if there is no other, _SEVERAL if there are several."""
    others = {value for value in values if value is not None}
    return others.pop() if len(others) == 1 else _SEVERAL if others else None
