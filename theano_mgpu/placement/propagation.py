"""Give each op of a graph a place, from the few that the user has placed.

The rules are those of MXNet's pass ``PlaceDevice`` (nnvm, src/pass/place_device.cc): a node's own group, else the
device of its first placed input; backwards for what is left; the rest on a default device. They are improved in four
ways. A node is beside the parameters that it reads, rather than beside its first input. A gradient is beside its
forward op: see `patches.placement_tags`. Updates, and the state of an optimizer, are beside their parameter. Shared
variables have a place, too.
"""
from collections import defaultdict

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort

from .. import patches
from ..patches.placement_tags import Beside, place_of, place_of_node
from . import inner_graphs

_SEVERAL = object()  # a node feeds several parameters, or something else than an update
_ROUNDS = 4          # forwards and backwards; further ones settle what hangs together by a `Beside` or an update only


def is_placed(outputs):
    """Whether the user has placed any variable of a graph, shared variables included.

    Parameters
    ----------
    outputs : list of theano.Variable
        Of a function, those of its updates included.

    Returns
    -------
    bool
    """
    placed = any(isinstance(own_place(variable), str) for variable in ancestors(list(outputs)))
    if placed:
        patches.apply(patches.FIRST_PLACEMENT)  # the graph may be one that was unpickled
    return placed


def assigned(outputs, updates, default):
    """Copy a graph, with a place for each op.

    The rules, the first that applies:

    1. A node's own place. A node with a `Beside` is where the first one with the same `Beside` is.
    2. The root of a new value of a shared variable with a place, and untagged nodes that feed only new values of
       variables with that place, are there.
    3. The place of the node's first input that is made of shared variables alone and is no scalar; else that of its
       first input with a place.
    4. The place of the first node, in topological order, that reads it.
    5. `default`.

    A shared variable is at its own place; else where the first op that reads it is, if the user has placed one. Of what
    is left, one that is updated, and that only the updates of one other variable read, is state of an optimizer, and is
    where this variable is. Any other one is where the first op with a place is that reads it, else at the root of its
    new value.

    Parameters
    ----------
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values.
    default : str
        The place of what no rule finds one for.

    Returns
    -------
    outputs : list of theano.Variable
        Each variable with an owner has its place, a str, in ``tag.mgpu_place``.
    updates : dict of SharedVariable to theano.Variable
    variables : dict of SharedVariable to str
        The places of all shared variables of the graph, and of those that are updated. Neither they nor inputs are
        copied or tagged.

    Raises
    ------
    GraphError
        If an op inside of a scan is placed elsewhere than the scan.
    """
    found = _Propagation(list(outputs), dict(updates))
    found.propagate()
    variables = {variable: found.leaves.get(variable, default) for variable in found.shared_variables()}
    copies = {}
    for node in found.nodes:
        place = found.places.get(node) or found.groups.get(place_of_node(node), default)
        inner_graphs.check(node, place)
        copy = node.clone_with_new_inputs([copies.get(variable, variable) for variable in node.inputs])
        for output in copy.outputs:
            output.tag.mgpu_place = place
        copies.update(zip(node.outputs, copy.outputs))
    return ([copies.get(output, output) for output in outputs],
            {variable: copies.get(value, value) for variable, value in updates.items()}, variables)


def own_place(variable):
    """The place that a variable is tagged with; that of the GPU variable which it stands for, if it does."""
    return place_of(getattr(variable.tag, 'stands_for', variable))


class _Propagation:
    """The places of a graph's nodes and shared variables, as they are found.

    Attributes
    ----------
    nodes : list of theano.Apply
        In topological order.
    places : dict of theano.Apply to str
    groups : dict of Beside to str
    leaves : dict of theano.Variable to str
        Of shared variables and inputs.
    """

    def __init__(self, outputs, updates):
        self._outputs, self._updates = set(outputs), updates
        self._whole = outputs + list(updates.values())
        self.nodes = io_toposort([], self._whole)
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

    def shared_variables(self):
        """The graph's shared variables, and those that are updated, each once."""
        return list(dict.fromkeys([v for v in ancestors(list(self._whole)) if isinstance(v, SharedVariable)] +
                                  list(self._updates)))

    def propagate(self):
        for variable in list(self._readers) + list(self._updates):
            if variable.owner is None and not isinstance(variable, theano.Constant):
                self._place_leaf(variable)
        self._place_updates()
        for _ in range(_ROUNDS):
            before = len(self.places), len(self.leaves)
            self._forwards()
            self._backwards()
            for variable in self.shared_variables():
                self._infer_shared(variable)
            if before == (len(self.places), len(self.leaves)):
                break
        self._place_updates()  # those of parameters whose place was inferred

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
        """The place of a shared variable or an input: its own, else that of the first op that the user placed on it."""
        candidates = [own_place(variable)]
        if isinstance(variable, SharedVariable):
            candidates += [self._tags[node] for node in self._readers[variable]]
        place = next((place for place in candidates if isinstance(place, str)), None)
        if place is not None:
            self.leaves[variable] = place

    # --- Updates -----------------------------------------------------------------------------------

    def _place_updates(self):
        """Place optimizer state and the arithmetic of updates beside the parameters."""
        fed = self._fed({value: variable for variable, value in self._reversed_updates() if variable in self.leaves})
        for variable in self._updates:
            if variable not in self.leaves:
                parameter = _common([fed[node] for node in self._readers[variable]])
                if parameter is not None and parameter is not _SEVERAL:
                    self.leaves[variable] = self.leaves[parameter]
        fed = self._fed({value: self.leaves[variable] for variable, value in self._reversed_updates()
                         if variable in self.leaves})
        self.places.update((node, place) for node, place in fed.items() if place not in (None, _SEVERAL))

    def _reversed_updates(self):
        """So that the first of two variables with one new value is the one that counts."""
        return reversed(list(self._updates.items()))

    def _fed(self, new_values):
        """What each node computes something for.

        Parameters
        ----------
        new_values : dict of theano.Variable to object
            What new values are computed for: a parameter, or a place.

        Returns
        -------
        dict of theano.Apply to object
            A value of `new_values`; None, if it feeds none of them; or _SEVERAL. Tagged nodes belong to the model and
            its gradients, and not to the updates: they and what they read are for _SEVERAL.
        """
        found = {}
        for node in reversed(self.nodes):
            own = [new_values[output] for output in node.outputs if output in new_values]
            if self._tags[node] is not None:
                found[node] = _SEVERAL
            elif own:
                found[node] = own[0]
            elif not self._outputs.isdisjoint(node.outputs):
                found[node] = _SEVERAL
            else:
                found[node] = _common([found[reader] for output in node.outputs for reader in self._readers[output]])
        return found

    # --- The model and its gradients -----------------------------------------------------------------

    def _forwards(self):
        for node in self.nodes:
            if node not in self.places:
                self._settle(node, self._place_of_inputs)

    def _backwards(self):
        for node in reversed(self.nodes):
            if node not in self.places:
                self._settle(node, self._place_of_readers)

    def _settle(self, node, inferred):
        """Place a node by its tag, else as inferred from its neighbours."""
        tag = self._tags[node]
        place = tag if isinstance(tag, str) else self.groups.get(tag) or inferred(node)
        if place is not None:
            self.places[node] = place
            if isinstance(tag, Beside):
                self.groups[tag] = place

    def _place_of_inputs(self, node):
        placed = [(variable, self._place(variable)) for variable in node.inputs if self._place(variable) is not None]
        arrays = [place for variable, place in placed
                  if getattr(variable, 'ndim', 1) and self._is_of_shared_alone(variable)]
        return next(iter(arrays + [place for _, place in placed]), None)

    def _place_of_readers(self, node):
        readers = [reader for output in node.outputs for reader in self._readers[output] if reader in self.places]
        return self.places[min(readers, key=self._index.get)] if readers else None


def _common(values):
    """The one value of a list, leaving out None; None if there is no other, _SEVERAL if there are several."""
    found = {value for value in values if value is not None}
    return found.pop() if len(found) == 1 else _SEVERAL if found else None
