"""Data sets inside of a function: shared variables and constants with many rows, which may be its batch.

Many programs pass parameters, and keep the data in the graph: densities, costs for `scipy.optimize`, the evaluation of
a whole validation set. This module finds the variables whose rows are worth a try. The analysis of the graph then
divides them exactly, or refuses.
"""
from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.tensor.elemwise import CAReduce
from theano.tensor.opt import Shape_i
from theano.tensor.sharedvar import TensorSharedVariable

from ..graph.graph import is_sparse, substitute
from ..graph.random_streams import DRAWS, is_random_state
from ..graph.repeatable import unrepeatable
from ..graph.theano_functions import plain_function
from ..plan import Program
from ..runtime.batches.arguments import axes_for_samples
from ..runtime.replicas.borrowed import is_lent
from ..runtime.replicas.replicated import replicated

FEWEST = 16  # rows; a call over fewer is too short to divide
LENGTHS = 3  # numbers of rows that are tried

_updated: weakref.WeakSet[Any] = weakref.WeakSet()  # shared variables that functions update, such as weights


class Rows(NamedTuple):
    """A way to take a batch: data sets with as many rows. These are shared variables, constants, or made of such.

    The `key` differs for each way that needs a program of its own.
    """

    variables: Sequence[Any]
    length: int
    n_bytes: int
    key: Any

    @property
    def data(self) -> str:
        """A text that names the data sets."""
        return 'by the {:,} rows of {}'.format(self.length, ', '.join(dict.fromkeys(map(_name, self.variables))))


class DataSets:
    """The data sets that a graph may have: variables with many rows, which no function is known to update.

    Attributes
    ----------
    leaves : list of theano.Variable
        The shared variables and constants that may be data sets, as of the last `ways`.
    steps : set of ParallelFunction
        The functions that divide data sets.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updated: Iterable[Any]) -> None:
        self._inputs, self._outputs, self._changed = inputs, list(outputs), set(updated)
        self._hidden: dict[theano.Variable, Any] = {}  # shared variables in place of constants and expressions
        self._computed: list[Computed] = []
        self.leaves: list[Any] = []
        self.steps: set[Any] = set()

    def ways(self, values: Sequence[Any], number: Callable[[int], Any], of_expressions: bool = False) -> list[Rows]:
        """Return the ways to take data sets for the batch of a call, the one with most bytes first.

        A parameter is no data set: its rows meet another axis, of an argument, of a variable that a step updates, or of
        another parameter. ``number(length)`` is a length that the graph has as a number, else None. With
        `of_expressions`, a value that the graph computes of data sets alone is a data set, such as a subset.
        """
        self.leaves = [v for v in ancestors(self._outputs) if may_be_data(v) and v not in self._changed]
        others = {size for value in values for size in getattr(value, 'shape', ())}
        others.update(size for variable in self._changed for size in _shape(variable))
        others.update(size for variable in self.leaves for size in _shape(variable)[1:])
        groups: dict[int, dict[Any, int]] = {}
        for variable, shape in (self._expressions() if of_expressions else zip(self.leaves, map(_shape, self.leaves))):
            if shape[0] >= FEWEST and shape[0] not in others:
                groups.setdefault(shape[0], {})[variable] = _bytes(variable, shape)
        ways = [Rows(list(group), length, sum(group.values()), (tuple(group), number(length)))
                for length, group in groups.items()]
        return sorted(ways, key=lambda way: -way.n_bytes)[:LENGTHS]

    def graph(self, way: Rows) -> tuple[list[theano.Variable], list[Any]]:
        """Return the graph with shared variables in place of the data sets of a way, and these variables."""
        for variable in way.variables:
            if variable not in self._hidden and not isinstance(variable, SharedVariable):
                if variable.owner is not None:
                    self._computed.append(Computed(variable))
                self._hidden[variable] = self._computed[-1].variable if variable.owner is not None else \
                    _hidden(variable, variable.data)
        new = {v: self._hidden.get(v, v) for v in way.variables}
        return substitute(self._outputs, new), list(new.values())

    def refresh(self) -> None:
        """Compute expressions of data sets anew where these have changed."""
        for each in self._computed:
            each.refresh()

    def _expressions(self):
        """Return the largest expressions of data sets alone, and the data sets that are read beside them, with shapes.
        """
        inputs, frontier = {*self._inputs, *self._changed}, dict.fromkeys(self._outputs)
        fixed = {v for v in ancestors(self._outputs) if v.owner is None and v not in inputs and not is_random_state(v)}
        for node in io_toposort(self._inputs, self._outputs):
            if fixed.issuperset(node.inputs) and not isinstance(node.op, DRAWS) and not unrepeatable(node.op):
                fixed.update(node.outputs)
            else:
                frontier.update(dict.fromkeys(node.inputs))
        made = [v for v in frontier if v in fixed and v.owner and axes_for_samples(v) and not is_sparse(v) and
                not set(self.leaves).isdisjoint(ancestors([v]))]
        shapes = _function([Shape_i(i)(v) for v in made for i in range(v.ndim)])() if made else []
        for variable in made:
            yield variable, tuple(map(int, shapes[:variable.ndim]))
            shapes = shapes[variable.ndim:]
        yield from ((v, _shape(v)) for v in self.leaves if v in frontier)


class Computed:
    """A shared variable in place of an expression of data sets, which is computed anew when one of these is set."""

    def __init__(self, expression: theano.Variable) -> None:
        self._compute = _function(expression)
        self._of = [replicated(v) for v in ancestors([expression]) if isinstance(v, SharedVariable)]
        self._versions = self._latest()
        self.variable = _hidden(expression, self._compute())

    def refresh(self) -> None:
        """Compute the value anew if a data set has changed."""
        versions = self._latest()
        if versions != self._versions or any(each.divided for each in self._of):
            self._versions = versions
            self.variable.set_value(self._compute(), borrow=True)

    def _latest(self):
        for each in self._of:
            if each.lent:
                each.note_edits()
            if is_lent(each.variable.container.storage):
                each.lend()
        return [each.version for each in self._of]


def note_updates(function: Any) -> None:
    """Note that a function updates shared variables: they are no data sets."""
    _updated.update(each.variable for each in function.maker.inputs if each.shared and each.update is not None)


def may_be_data(variable: Any) -> bool:
    """Return whether a variable is shared or constant, has many rows, and no function is known to update it."""
    if isinstance(variable, SharedVariable):
        if is_random_state(variable) or getattr(variable.tag, 'stands_for', variable) in _updated:
            return False
    elif not isinstance(variable, theano.Constant):
        return False
    return axes_for_samples(variable) > 0 and _shape(variable)[0] >= FEWEST


def has_data(outputs: Sequence[Any]) -> bool:
    """Return whether a graph has a variable that may be a data set."""
    return any(map(may_be_data, ancestors(outputs)))


# Predicates for the program of a way.

def in_one_stage(sets: DataSets, way: Any, program: Program) -> bool:
    """Return whether replicas exchange nothing before their work is done."""
    return sum(bool(stage.outputs) for stage in program.stages) <= 1


def has_all(sets: DataSets, way: Any, program: Program) -> bool:
    """Return whether replicas work in one stage, and none needs the whole of a data set that is larger."""
    read = set(ancestors(program.in_stages))
    return in_one_stage(sets, way, program) and not any(
        v in read and _bytes(v, _shape(v)) > way.n_bytes for v in sets.leaves)


def is_apart(sets: DataSets, way: Any, program: Program) -> bool:
    """Return whether replicas exchange results alone: nothing is summed, or made of data sets, after an exchange."""
    late = [output.variable for output in program.outputs if output.reduction is None]
    exchanged = {each.variable for each in program.exchanges if each.variable.ndim}
    read: set[Any] = set()
    for node in io_toposort([], late):
        if not exchanged.isdisjoint(node.inputs):
            if isinstance(node.op, (CAReduce, theano.tensor.Dot)):
                return False
            exchanged.update(node.outputs)
            read.update(node.inputs)
    return in_one_stage(sets, way, program) and set(sets.leaves).isdisjoint(ancestors(list(read)))


def _name(variable):
    if variable.owner or isinstance(variable, SharedVariable):
        return str(variable)
    return variable.name or 'a constant of %s' % ' x '.join(map(str, _shape(variable)))


def _shape(variable):
    """Return the shape of a shared variable or a constant; none for a value without axes."""
    value = variable.container.storage[0] if isinstance(variable, SharedVariable) else variable.data
    return tuple(getattr(value, 'shape', ()))


def _bytes(variable, shape):
    return int(np.prod(shape, dtype='int64')) * np.dtype(variable.dtype).itemsize


def _hidden(variable, value):
    """Return a shared variable of a variable's type, which the user does not know of."""
    new = theano.shared(value, borrow=True) if is_sparse(variable) else \
        TensorSharedVariable(None, variable.type, value, True)
    new.name, new.tag.constant = _name(variable), True
    return new


def _function(outputs):
    """Return a function of data sets that computes on the host."""
    return plain_function([], outputs, mode=theano.compile.get_default_mode().excluding('gpuarray_opt'))
