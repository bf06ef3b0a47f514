"""Pieces of a stage, which is cut where the device changes: one device computes a piece."""
from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.tensor.elemwise import DimShuffle

from ..devices.mesh import Mesh
from ..graph.placement.tags import place_of
from ..graph.repeatable import unrepeatable
from ..graph.rewrites import substitute
from ..graph.saved_values import missing_for
from ..graph.traces import keep_trace


class Piece(NamedTuple):
    """The part of a stage that one device computes without values from another one.

    Attributes
    ----------
    place : str
        See `mesh.Mesh`.
    level : int
        The longest chain of pieces that it waits for; pieces of one level can be computed at the same time.
    given : list of theano.Variable
        The values that it takes: of the stage, and from other pieces.
    stand_ins : list of theano.Variable
        Inputs that stand for them in `graphs`.
    outputs : list of theano.Variable
        The values that the stage or other pieces take of it.
    graphs : list of theano.Variable
        The graph of each output.
    """

    place: str
    level: int
    given: list[theano.Variable]
    stand_ins: list[theano.Variable]
    outputs: list[theano.Variable]
    graphs: list[theano.Variable]


class Places:
    """The place of each variable of a program.

    Parameters
    ----------
    mesh : Mesh
        It has the places of shared variables. Results of ops have a place in their tags; an op without one, which the
        division among replicas has made, is on the place of its first input that has one.
    """

    def __init__(self, mesh: Mesh):
        self._default, self._names = mesh.places[0], set(mesh.places)
        self._known: dict[theano.Variable, str | None] = dict(mesh.placement)

    def among(self, saved: Mapping[theano.Variable, theano.Variable]) -> Callable[[theano.Variable], str]:
        """Return `of`, for the variables of a stage with saved values of earlier stages."""
        self._known.update((placeholder, self.of(source)) for placeholder, source in saved.items())
        return self.of

    def of(self, variable: theano.Variable) -> str:
        """Return the place of a variable whose ancestors have been asked for, or have places by tag."""
        if variable not in self._known:
            place = place_of(variable)
            if place in self._names:
                self._known[variable] = str(place)
            else:
                inputs = variable.owner.inputs if variable.owner else ()
                self._known[variable] = next((self._known[v] for v in inputs if self._known.get(v)), None)
        return self._known[variable] or self._default


def cut(given: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
        place_of: Callable[[theano.Variable], str], recompute: bool = False,
        buckets: Sequence[Sequence[theano.Variable]] = ()) -> list[Piece]:
    """Cut a graph into pieces, by level.

    Any device can be given the values of `given`. Cheap values, such as a view, are computed by each piece that needs
    them. To `recompute`, a piece computes the values of an earlier piece of its place again, from the same inputs, so
    that they need not be kept: the backward pass computes the forward pass again. Each bucket of outputs is computed
    before the next one, and the graph is also cut between them.

    A chain of n devices makes 2 n - 1 pieces: the forward and the backward pass of each device, which on the last one
    are one piece. `recompute` is what GPipe calls re-materialisation (Huang et al., 2019).
    """
    cutter = _Cutter(given, outputs, place_of, recompute, buckets)
    pieces = [piece for key in reversed(cutter.order) for piece in cutter.piece(*key)]
    levels = {level: i for i, level in enumerate(sorted({piece.level for piece in pieces}))}
    return [piece._replace(level=levels[piece.level]) for piece in reversed(pieces)]


class _Cutter:
    """The level and place of the piece that computes each variable, and the outputs of each piece."""

    def __init__(self, given, outputs, place_of, recompute, buckets):
        self._given, self._place_of, self._recompute = list(dict.fromkeys(given)), place_of, recompute
        self._keys: dict[theano.Variable, tuple[int, str]] = {}  # in an order that is the same on each rank
        constants: set[theano.Variable] = set()  # any piece can compute them
        nodes = io_toposort(self._given, outputs)
        needed = _first_needed(nodes, buckets)
        for node in nodes:
            if all(isinstance(v, theano.Constant) or v in constants for v in node.inputs) and not unrepeatable(node.op):
                constants.update(node.outputs)
                continue
            place = place_of(node.outputs[0])
            above = [self._keys[v] for v in node.inputs if v in self._keys]
            first = min(needed.get(v, 0) for v in node.outputs)
            key = max([level + (other != place) for level, other in above] + [first]), place
            self._keys.update((v, key) for v in node.outputs)
        self._anywhere = constants.union(self._given)  # what any piece has, or can compute
        self._order = {v: i for i, v in enumerate(self._keys)}
        self._wanted: dict[tuple[int, str], dict[theano.Variable, None]] = {}
        self._want(outputs)
        places = list(dict.fromkeys(place for _, place in [*self._keys.values(), *self._wanted]))
        self.order = sorted({*self._keys.values(), *self._wanted}, key=lambda key: (key[0], places.index(key[1])))

    def _want(self, variables: Iterable[theano.Variable]) -> None:
        for variable in variables:
            key = self._keys.get(variable) or (0, self._place_of(variable))
            self._wanted.setdefault(key, {})[variable] = None

    def piece(self, level: int, place: str) -> list[Piece]:
        """Return the piece of a level and place, in a list; none if nothing needs it. Higher levels come first."""
        outputs = list(self._wanted.get((level, place), ()))
        if not outputs:
            return []
        taken = self._taken((level, place), outputs)
        self._want(taken)
        met = self._met(outputs, set(taken))
        taken = [v for v in self._given if v in met] + taken
        stand_ins = [v if v.owner is None else v.type(v.name) for v in taken]
        for new, variable in zip(stand_ins, taken):
            keep_trace([new], variable)
        graphs = substitute(outputs, {v: new for v, new in zip(taken, stand_ins) if new is not v})
        return [Piece(place, level, taken, stand_ins, outputs, graphs)]

    def _taken(self, key, outputs) -> list[theano.Variable]:
        """Return the values that a piece takes from other pieces, in the order in which they are computed."""
        elsewhere = {v for v in self._keys if not self._is_here(v, key)}
        taken = {self._viewed(v, key) for v in self._met(outputs, elsewhere) & elsewhere}
        for variable in sorted(taken, key=self._order.__getitem__, reverse=True):
            others = taken - {variable}
            if not missing_for(variable, functools.partial(self._is_there, others, key[1])):
                taken = others
        # Values computed again may need fewer inputs; inputs that nothing needs any more are not taken.
        return sorted(taken & self._met(outputs, taken), key=self._order.__getitem__)

    def _viewed(self, variable, key):
        """Return the variable that another one is a view of: taken in its place, it serves all views."""
        while isinstance(variable.owner.op, DimShuffle):
            viewed, = variable.owner.inputs
            if viewed not in self._keys or self._is_here(viewed, key):
                break
            variable = viewed
        return variable

    def _is_here(self, variable, key):
        level, place = self._keys[variable]
        return place == key[1] and (level == key[0] or self._recompute and not unrepeatable(variable.owner.op))

    def _is_there(self, taken, place, variable):
        """Return whether a piece takes a variable, or every piece of its place has it or can compute it."""
        return variable in taken or variable not in self._keys and not (
            isinstance(variable, SharedVariable) and self._place_of(variable) != place)

    def _met(self, outputs, taken) -> set[theano.Variable]:
        """Return the variables that outputs depend on, down to those that are taken."""
        return set(ancestors(outputs, self._anywhere | taken))


def _first_needed(nodes: Sequence[Any], buckets: Sequence[Sequence[theano.Variable]]) -> dict[theano.Variable, int]:
    """Return the number of the first bucket that needs a variable, for each one that is computed."""
    first = {variable: i for i, bucket in reversed(list(enumerate(buckets))) for variable in bucket}
    for node in reversed(nodes):
        number = min((first[v] for v in node.outputs if v in first), default=0)
        for v in node.inputs:
            first[v] = min(number, first.get(v, number))
    return first
