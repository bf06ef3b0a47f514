"""Cut a stage where the device changes: pieces, each of which one device computes."""
from collections import namedtuple
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import io_toposort
from theano.tensor.elemwise import DimShuffle

from ..devices.mesh import Mesh
from ..graphs.graph import substitute
from ..patches.placement_tags import place_of
from .carrying import DEEPEST, is_cheap

Piece = namedtuple('Piece', 'place level given stand_ins outputs graphs')
Piece.__doc__ = """The part of a stage that one device computes without values from another one.

Attributes
----------
place : str
    See `mesh.Mesh`.
level : int
    The longest chain of pieces that it waits for; pieces of one level can be computed at the same time.
given : list of theano.Variable
    What it takes: of the stage, and from other pieces.
stand_ins : list of theano.Variable
    What stands for each in `graphs`.
outputs : list of theano.Variable
    What the stage or other pieces take of it.
graphs : list of theano.Variable
    The graph of each output.
"""


class Places:
    """The place of each variable of a program.

    Parameters
    ----------
    mesh : Mesh
        It has the places of shared variables. Those of the results of ops are in their tags; an op without one, which
        the division among replicas has made, is on the place of its first input that has one.
    """

    def __init__(self, mesh: Mesh):
        self._default, self._names = mesh.places[0], set(mesh.places)
        self._known: Dict[theano.Variable, Optional[str]] = dict(mesh.placement)

    def among(self, carried: Mapping[theano.Variable, theano.Variable]) -> Callable[[theano.Variable], str]:
        """`of`, for the variables of a stage into which values are carried."""
        self._known.update((stand_in, self.of(source)) for stand_in, source in carried.items())
        return self.of

    def of(self, variable: theano.Variable) -> str:
        """The place of a variable whose ancestors have been asked for, or have places by tag."""
        if variable not in self._known:
            place = place_of(variable)
            if place not in self._names:
                inputs = variable.owner.inputs if variable.owner else ()
                place = next((self._known[v] for v in inputs if self._known.get(v)), None)
            self._known[variable] = place
        return self._known[variable] or self._default


def cut(given: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
        place_of: Callable[[theano.Variable], str], recompute: bool = False,
        buckets: Sequence[Sequence[theano.Variable]] = ()) -> List[Piece]:
    """Cut a graph into pieces.

    Parameters
    ----------
    given : list of theano.Variable
        Inputs of the graph, of which any device can be given the value.
    outputs : list of theano.Variable
    place_of : callable
        The place of a variable.
    recompute : bool
        Whether a piece computes again what an earlier piece of its place has computed, from what that one was given,
        so that it need not be kept: the backward pass computes the forward pass again.
    buckets : list of list of theano.Variable, optional
        Outputs of which those of each list are to be computed before those of the next one: the graph is also cut
        between them, see `buckets`.

    Returns
    -------
    list of Piece
        By level. What takes little to compute, such as a view, is computed by each piece that needs it.

    Notes
    -----
    A chain of n devices makes 2 n - 1 pieces: the forward and the backward pass of each device, which on the last one
    are one piece. `recompute` is what GPipe calls re-materialisation (Huang et al., 2019).
    """
    pieces = _Pieces(given, outputs, place_of, recompute, buckets)
    found = [piece for key in reversed(pieces.order) for piece in pieces.piece(*key)]
    levels = {level: i for i, level in enumerate(sorted({piece.level for piece in found}))}
    return [piece._replace(level=levels[piece.level]) for piece in reversed(found)]


class _Pieces:

    def __init__(self, given, outputs, place_of, recompute, buckets):
        self._given, self._place_of, self._recompute = list(dict.fromkeys(given)), place_of, recompute
        self._keys = {}  # variable -> level and place of the piece that computes it
        self._order = {}
        self._constants = set()
        nodes = io_toposort(self._given, outputs)
        needed = _first_needed(nodes, buckets)
        for node in nodes:
            if all(self._is_constant(variable) for variable in node.inputs):
                self._constants.update(node.outputs)  # any piece can compute it
                continue
            place = place_of(node.outputs[0])
            above = [self._keys[v] for v in node.inputs if v in self._keys]
            first = min(needed.get(v, 0) for v in node.outputs)
            key = max([level + (other != place) for level, other in above] + [first]), place
            self._keys.update((v, key) for v in node.outputs)
            for v in node.outputs:  # no two alike: each rank has to take values in the same order
                self._order[v] = len(self._order)
        self._wanted: Dict[tuple, Dict[theano.Variable, None]] = {}
        self._want(outputs)
        places = list(dict.fromkeys(place for _, place in list(self._keys.values()) + list(self._wanted)))
        self.order = sorted(set(self._keys.values()) | set(self._wanted),
                            key=lambda key: (key[0], places.index(key[1])))

    def _is_constant(self, variable):
        return isinstance(variable, theano.Constant) or variable in self._constants

    def _want(self, variables):
        for variable in variables:
            key = self._keys.get(variable) or (0, self._place_of(variable))
            self._wanted.setdefault(key, {})[variable] = None

    def piece(self, level, place) -> List[Piece]:
        """The piece of a level and place, in a list; none if nothing needs it. Those of higher levels come first."""
        outputs = list(self._wanted.get((level, place), ()))
        if not outputs:
            return []
        taken = self._taken((level, place), outputs)
        self._want(taken)
        met = self._met(outputs, set(taken))
        taken = [v for v in self._given if v in met] + taken
        stand_ins = [v if v.owner is None else v.type(v.name) for v in taken]
        graphs = substitute(outputs, {v: new for v, new in zip(taken, stand_ins) if new is not v})
        return [Piece(place, level, taken, stand_ins, outputs, graphs)]

    def _taken(self, key, outputs) -> List[theano.Variable]:
        """What a piece takes from other pieces, in the order in which it is computed."""
        met = self._met(outputs, (), lambda v: self._is_here(v, key))
        found = {self._viewed(v, key) for v in met if v in self._keys and not self._is_here(v, key)}
        found = sorted(found, key=self._order.get)
        for variable in reversed(found):
            others = set(found) - {variable}
            if self._can_be_made_of(variable, others, key[1]):
                found.remove(variable)
        # What is made again may need less, and what nothing needs any more is not taken.
        met = self._met(outputs, set(found))
        return [variable for variable in found if variable in met]

    def _viewed(self, variable, key):
        """What a variable is a view of: taken in its place, it serves all views."""
        while isinstance(variable.owner.op, DimShuffle):
            viewed, = variable.owner.inputs
            if viewed not in self._keys or self._is_here(viewed, key):
                break
            variable = viewed
        return variable

    def _is_here(self, variable, key):
        level, place = self._keys[variable]
        return place == key[1] and (self._recompute or level == key[0])

    def _can_be_made_of(self, variable, taken, place):
        """Whether little is to be computed to make a variable of those that are taken, and what every piece has."""
        todo, seen = [(variable, 0)], set()
        while todo:
            v, depth = todo.pop()
            if v in seen or v in taken:
                continue
            seen.add(v)
            if v not in self._keys:
                if isinstance(v, SharedVariable) and self._place_of(v) != place:
                    return False
            elif depth < DEEPEST and is_cheap(v.owner):
                todo += [(each, depth + 1) for each in v.owner.inputs]
            else:
                return False
        return True

    def _met(self, outputs, taken, enters=lambda variable: True) -> Set[theano.Variable]:
        """The variables that outputs depend on, as far as what is taken, and as what is not entered."""
        todo, seen = list(outputs), set()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self._keys and v not in taken and enters(v):
                todo += v.owner.inputs
        return seen


def _first_needed(nodes, buckets):
    """For each variable that is computed, the number of the first bucket that needs it."""
    found = {}
    for number, bucket in reversed(list(enumerate(buckets))):
        found.update(dict.fromkeys(bucket, number))
    for node in reversed(nodes):
        number = min((found[v] for v in node.outputs if v in found), default=0)
        for v in node.inputs:
            found[v] = min(number, found.get(v, number))
    return found
