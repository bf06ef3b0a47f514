"""Data sets inside of a function: shared variables and constants with many rows, which may be its batch.

Many programs pass parameters, and keep the data in the graph: densities, costs for `scipy.optimize`, the evaluation of
a whole validation set. This module finds the variables whose rows are worth a try. The analysis of the graph then
divides them exactly, or refuses.
"""
from __future__ import annotations

import functools
import weakref
from typing import Any, Iterable, NamedTuple, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.tensor.elemwise import CAReduce
from theano.tensor.opt import Shape_i
from theano.tensor.sharedvar import TensorSharedVariable
from theano.tensor.subtensor import AdvancedSubtensor, AdvancedSubtensor1, Subtensor

from ..graph.graph import is_sparse, substitute
from ..graph.random_streams import DRAWS, is_random_state
from ..graph.repeatable import unrepeatable
from ..graph.theano_functions import plain_function
from ..plan import Program
from ..runtime.batches.arguments import axes_for_samples
from ..runtime.replicas.borrowed import is_lent
from ..runtime.replicas.replicated import replicated

FEWEST = 16  # rows; a call over fewer is too short to divide

_updated: weakref.WeakSet[Any] = weakref.WeakSet()  # shared variables that functions update, such as weights


class Rows(NamedTuple):
    """A way to take a batch: data sets with as many rows. These are shared variables, constants, or made of such."""

    key: Sequence[Any]  # the data sets
    length: int
    n_bytes: int

    @property
    def data(self) -> str:
        """A text that names the data sets."""
        return 'by the {:,} rows of {}'.format(self.length, ', '.join(dict.fromkeys(map(_name, self.key))))


class DataSets:
    """The data sets that a graph may have: variables with many rows, which no function is known to update.

    Attributes
    ----------
    leaves : list of theano.Variable
        The shared variables and constants that may be data sets, as of the last `ways`.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updated: Iterable[Any]) -> None:
        self._inputs, self._outputs, self._changed = inputs, list(outputs), set(updated)
        self._private: dict[theano.Variable, Private] = {}
        self.leaves: list[Any] = []

    def ways(self, values: Sequence[Any], of_expressions: bool = False) -> list[Rows]:
        """Return the ways to take data sets for the batch of a call, three at most, the one with most bytes first.

        A parameter is no data set: arguments pick some of its rows, or they meet another axis, of an argument, of a
        variable that a step updates, or of another parameter. With `of_expressions`, a value that the graph computes of
        data sets alone is a data set, too.
        """
        if not has_data(self._outputs):
            return []
        fixed, frontier, picked = self._walk()
        self.leaves = leaves = [v for v in ancestors(self._outputs) if may_be_data(v) and v in fixed.difference(picked)]
        shapes = {v: _shape(v) for v in leaves if v in frontier or not of_expressions}
        if of_expressions:
            made = [v for v in frontier if v in fixed and v.owner and axes_for_samples(v) and not is_sparse(v) and
                    not set(leaves).isdisjoint(ancestors([v]))]
            sizes = iter(_function([Shape_i(i)(v) for v in made for i in range(v.ndim)])() if made else ())
            shapes.update((v, tuple(int(next(sizes)) for _ in range(v.ndim))) for v in made)
        others = [*[getattr(value, 'shape', ()) for value in values], *map(_shape, self._changed),
                  *[_shape(v)[1:] for v in leaves]]
        groups: dict[int, dict[Any, int]] = {}
        for variable, shape in shapes.items():
            if shape[0] >= FEWEST and not any(shape[0] in other for other in others):
                groups.setdefault(shape[0], {})[variable] = _bytes(variable, shape)
        ways = [Rows(tuple(group), length, sum(group.values())) for length, group in groups.items()]
        return sorted(ways, key=lambda way: -way.n_bytes)[:3]

    def _walk(self):
        """Return values without arguments or updates above, values that others read, and those that are picked from."""
        moving, frontier, picked = {*self._inputs, *self._changed}, dict.fromkeys(self._outputs), set()
        fixed = {v for v in ancestors(self._outputs) if v.owner is None and v not in moving and not is_random_state(v)}
        for node in io_toposort(self._inputs, self._outputs):
            if fixed.issuperset(node.inputs) and not isinstance(node.op, DRAWS) and not unrepeatable(node.op):
                fixed.update(node.outputs)
                continue
            frontier.update(dict.fromkeys(node.inputs))
            if isinstance(node.op, (Subtensor, AdvancedSubtensor1, AdvancedSubtensor)) and \
                    not fixed.issuperset(node.inputs[1:]):
                picked.add(node.inputs[0])
        return fixed, frontier, picked

    def graph(self, way: Rows) -> tuple[list[theano.Variable], dict[Any, int]]:
        """Return the graph with shared variables in place of the data sets of a way, and the axes of their samples."""
        for variable in way.key:
            if variable not in self._private and not isinstance(variable, SharedVariable):
                self._private[variable] = Private(variable)
        new = {v: self._private[v].variable if v in self._private else v for v in way.key}
        return substitute(self._outputs, new), dict.fromkeys(new.values(), 0)

    def refresh(self, step: Any) -> None:
        """Compute the expressions of data sets that a ParallelFunction divides, where the data sets have changed."""
        for each in self._private.values():
            if each.variable in step.inputs.data:
                each.refresh()


class Private:
    """A shared variable in place of a constant, or of an expression of data sets, which is computed when these are set.
    """

    def __init__(self, variable: theano.Variable) -> None:
        is_constant = isinstance(variable, theano.Constant)
        value = variable.data if is_constant else np.zeros(list(map(int, variable.broadcastable)), variable.dtype)
        self.variable = theano.shared(value, borrow=True) if is_sparse(variable) else \
            TensorSharedVariable(None, variable.type, value, True)
        self.variable.name, self.variable.tag.constant = _name(variable), True
        self._of = [replicated(v) for v in ancestors([variable]) if isinstance(v, SharedVariable)]
        self._compute = functools.lru_cache(None)(lambda: _function(variable))
        self._versions: list[int] | None = [] if is_constant else None

    def refresh(self) -> None:
        """Compute the value if it was not computed yet, or a data set has changed."""
        for each in self._of:
            if each.lent:
                each.note_edits()
            if is_lent(each.variable.container.storage):
                each.lend()
        versions = [each.version for each in self._of]
        if versions != self._versions or any(each.divided for each in self._of):
            self._versions = versions
            self.variable.set_value(self._compute()(), borrow=True)


def note_updates(function: Any) -> None:
    """Note that a function updates shared variables: they are no data sets."""
    _updated.update(each.variable for each in function.maker.inputs if each.shared and each.update is not None)


def may_be_data(variable: Any) -> bool:
    """Return whether a variable is shared or constant, has many rows, and no function is known to update it."""
    known = isinstance(variable, (SharedVariable, theano.Constant)) and not is_random_state(variable)
    return known and axes_for_samples(variable) > 0 and _shape(variable)[0] >= FEWEST and \
        getattr(variable.tag, 'stands_for', variable) not in _updated


def has_data(outputs: Sequence[Any]) -> bool:
    """Return whether a graph has a variable that may be a data set."""
    return any(map(may_be_data, ancestors(outputs)))


# Predicates for the program of a way.

def has_all(sets: DataSets, way: Any, program: Program) -> bool:
    """Return whether replicas work in one stage, and none needs the whole of a data set that is larger."""
    read = set(ancestors(program.in_stages))
    return _in_one_stage(program) and not any(v in read and _bytes(v, _shape(v)) > way.n_bytes for v in sets.leaves)


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
    return _in_one_stage(program) and set(sets.leaves).isdisjoint(ancestors(list(read)))


def _in_one_stage(program):
    return sum(bool(stage.outputs) for stage in program.stages) <= 1


def _name(variable):
    return str(variable) if variable.owner or isinstance(variable, SharedVariable) else \
        variable.name or 'a constant of %s' % ' x '.join(map(str, _shape(variable)))


def _shape(v):
    """Return the shape of a shared variable or a constant; none for a value without axes."""
    return tuple(getattr(v.container.storage[0] if hasattr(v, 'container') else v.data, 'shape', ()))


def _bytes(variable, shape):
    return int(np.prod(shape, dtype='int64')) * np.dtype(variable.dtype).itemsize


def _function(outputs):
    """Return a function of data sets that computes on the host."""
    return plain_function([], outputs, mode=theano.compile.get_default_mode().excluding('gpuarray_opt'))
