"""Data sets inside of a function: shared variables and constants with many rows, which may be its batch.

Many programs pass parameters, and keep the data in the graph: densities, costs for `scipy.optimize`, the evaluation of
a whole validation set. This module finds the variables whose rows are worth a try. The analysis of the graph then
divides them exactly, or refuses.
"""
from __future__ import annotations

import weakref
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors, io_toposort
from theano.tensor.basic import float_dtypes
from theano.tensor.sharedvar import TensorSharedVariable
from theano.tensor.subtensor import AdvancedSubtensor, AdvancedSubtensor1, Subtensor

from ..errors import named
from ..graph.analysis import ROWS, CannotCut, Shards, Value
from ..graph.analysis.states import rows
from ..graph.graph import is_sparse, n_axes
from ..graph.random_streams import DRAWS, is_random_state
from ..graph.repeatable import unrepeatable
from ..graph.rewrites import substitute
from ..graph.theano_functions import host_function
from ..plan import Program
from ..runtime.batches.arguments import axes_for_samples
from ..runtime.batches.free_batch_size import positions_step
from ..runtime.replicas.replicated import replicated

FEWEST = 16  # rows; a call over fewer is too short to divide

_updated: weakref.WeakSet[Any] = weakref.WeakSet()  # shared variables that functions update, such as weights


class BatchWay(NamedTuple):
    """A way to take a batch of a length: arguments with samples along some axes, or the rows of data sets.

    The `key` differs for each way that needs a program of its own. Of data sets it has the shared variables, the
    constants, and the expressions of such, and `n_bytes` is their size. Chains of a sampler are such a way, too. A
    length that is not likely may be a number of features.
    """

    axes: dict[theano.Variable, int]
    length: int
    key: Any
    n_bytes: int = 0
    is_likely: bool = True

    def __str__(self) -> str:
        return 'the {:,} rows of {}'.format(self.length, ', '.join(dict.fromkeys(map(_name, self.key))))


class DataSets:
    """The data sets that a graph may have: variables with many rows, which no function is known to update.

    Attributes
    ----------
    leaves : list of theano.Variable
        The shared variables and constants that may be data sets, as of the last `ways`.
    lengths : set of int
        The numbers of rows of all ways so far.
    chains : list of theano.Variable
        The `chains` of the graph.
    picked : list of theano.Variable
        Variables that could be data sets, but for rows that arguments, drawn numbers or changed values pick from them.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updates: Mapping[Any, theano.Variable]) -> None:
        self._outputs, self._changed = list(outputs), set(updates)
        self.chains = chains(updates) if outputs else []
        self._private: Any = weakref.WeakValueDictionary()  # a Private for each constant, or expression, that has one
        self.leaves: list[Any] = []
        self.lengths: set[int] = set()
        # Values without arguments or updates above, but those that arguments pick rows from; values that others read;
        # and those that are read otherwise than by a product with their rows, as weights are.
        moving = self._changed.union(inputs)
        self._fixed = {v for v in ancestors(self._outputs) if v.owner is None and v not in moving}
        self._frontier, self._read, picked = dict.fromkeys(self._outputs), set(), set()
        for node in io_toposort(inputs, self._outputs):
            self._read.update(node.inputs[:1] if isinstance(node.op, theano.tensor.Dot) else node.inputs)
            if self._fixed.issuperset(node.inputs) and not unrepeatable(node.op):
                self._fixed.update(node.outputs)
                continue
            self._frontier.update(dict.fromkeys(node.inputs))
            if isinstance(node.op, (Subtensor, AdvancedSubtensor1, AdvancedSubtensor)) and \
                    not self._fixed.issuperset(node.inputs[1:]):
                picked.add(node.inputs[0])
        self._fixed -= picked
        self.picked = [v for v in self._frontier if v in picked and may_be_data(v)]

    def ways(self, values: Sequence[Any], of_expressions: bool = False) -> list[BatchWay]:
        """Return the ways to take data sets for the batch of a call, three at most, the one with most bytes first.

        A parameter is no data set: arguments pick some of its rows, or they meet another axis, of an argument, of a
        variable that a step updates, or of another parameter. With `of_expressions`, a value that the graph computes of
        data sets alone is a data set, too. There is none beside a batch of one.
        """
        others: list[Any] = [getattr(value, 'shape', ()) for value in values]
        if any(len(shape) > 1 and shape[0] == 1 for shape in others):
            return []
        self.leaves = leaves = [v for v in ancestors(self._outputs) if v in self._fixed and may_be_data(v)]
        shapes = {v: _shape(v) for v in leaves if v in self._frontier or not of_expressions}
        if of_expressions:
            made = [v for v in self._frontier if v in self._fixed and v.owner and axes_for_samples(v) and
                    not set(leaves).isdisjoint(ancestors([v]))]
            shapes.update(zip(made, map(np.shape, host_function([], made)())))
        others += [*map(_shape, self._changed), *[_shape(v)[1:] for v in leaves]]
        found = {v: shape for v, shape in shapes.items()
                 if shape[0] >= FEWEST and not any(shape[0] in other for other in others)}
        self.lengths.update(shape[0] for shape in found.values())
        return [way for way in _ways(found) if not self._read.isdisjoint(way.key)][:3]

    def tries_of_chains(self) -> list[tuple[BatchWay, Any]]:
        """Return the ways to take chains for the batch, three at most, each with the predicate for its program."""
        return [(way, walk_apart) for way in _ways({v: _shape(v) for v in self.chains})[:3]]

    def graph(self, way: BatchWay) -> tuple[list[theano.Variable], dict[Any, int]]:
        """Return the graph with shared variables in place of the data sets of a way, and the axes of their samples."""
        private = {v: self._private.get(v) or Private(v) for v in way.key if not isinstance(v, SharedVariable)}
        self._private.update(private)
        new = {v: private[v].variable if v in private else v for v in way.key}
        return substitute(self._outputs, new), dict.fromkeys(new.values(), 0)


class Private:
    """A shared variable in place of a constant, or of an expression of data sets, which follows these."""

    def __init__(self, variable: theano.Variable) -> None:
        is_constant = isinstance(variable, theano.Constant)
        self._of = [replicated(v) for v in ancestors([variable]) if isinstance(v, SharedVariable)]
        self._compute: Any = None if is_constant else host_function([], variable)
        self._versions = self._latest()
        value = variable.data if is_constant else self._compute()
        self.variable = theano.shared(value, borrow=True) if is_sparse(variable) else \
            TensorSharedVariable(None, variable.type, value, True)
        self.variable.name, self.variable.tag.private = _name(variable), self
        self._replica = replicated(self.variable)
        self._replica.ask(None if is_constant else self._follow)

    def _latest(self):
        """Return the versions of the data sets, whose memory is watched from now on if it is lent."""
        for each in self._of:
            each.note_edits()
            each.is_in_expressions = True
            each.watch_lent_memory()
        return [each.version for each in self._of]

    def _follow(self, variable):
        """Compute the value of the variable anew if a data set has changed."""
        versions = self._latest()
        if versions != self._versions or any(each.divided for each in self._of):
            self._versions = versions
            self._replica.give(self._compute())
            self._replica.touched = True  # ranks compare it


def note_updates(function: Any) -> None:
    """Note that a function updates shared variables: they are no data sets."""
    _updated.update(each.variable for each in function.maker.inputs if each.shared and each.update is not None)


def may_be_data(variable: Any) -> bool:
    """Return whether a variable is shared or constant, has many rows, and no function is known to update it."""
    length = _shape(variable)[:1]
    return length >= (FEWEST,) and axes_for_samples(variable) > 0 and not is_random_state(variable) and \
        getattr(variable.tag, 'stands_for', variable) not in _updated and not positions_step(variable, *length)


def has_data(outputs: Sequence[Any]) -> bool:
    """Return whether a graph has a variable that may be a data set."""
    return any(map(may_be_data, ancestors(outputs)))


def chains(updates: Mapping[Any, theano.Variable]) -> list[Any]:
    """Return variables with many rows that are updated where numbers are drawn, as the chains of a sampler."""
    new = [each for each in updates.values() if isinstance(each, theano.Variable)]  # not numbers and arrays
    if not any(v.owner and isinstance(v.owner.op, DRAWS) for v in ancestors(new)):
        return []
    return [v for v in updates if _shape(v)[:1] >= (FEWEST,) and axes_for_samples(v) and not is_random_state(v)]


# Predicates for the program of a way.

def fits(sets: DataSets, way: BatchWay, program: Program) -> bool:
    """Return whether replicas do not need the whole of a data set that is larger."""
    read = set(ancestors(program.in_stages))
    return not any(v in read and _bytes(v, _shape(v)) > way.n_bytes for v in sets.leaves)


def fits_at_once(sets: DataSets, way: BatchWay, program: Program) -> bool:
    """Return whether replicas work in one stage, too."""
    return fits(sets, way, program) and sum(bool(stage.outputs) for stage in program.stages) <= 1


def walk_apart(sets: DataSets, way: BatchWay, program: Program) -> bool:
    """Return whether the chains of a way walk by themselves: replicas exchange no more than single numbers of them."""
    return fits_at_once(sets, way, program) and not any(n_axes(each.source) for each in program.every_exchange)


def is_of_parameters(way: BatchWay) -> bool:
    """Return whether arguments beside larger data sets look like parameters: floats in vectors, or a few components."""
    return bool(way.axes) and all(v.dtype in float_dtypes and (v.ndim == 1 or way.length < FEWEST) for v in way.axes)


def is_apart(sets: DataSets, way: BatchWay, program: Program, is_known: bool = True) -> bool:
    """Return whether it is known that replicas exchange no value with a row for each of a data set.

    They may exchange such an output, unless the batch looks like parameters.
    """
    late = [output.variable for output in program.outputs if output.reduction is None]
    used = {v for node in io_toposort([], [*program.in_stages, *late]) for v in node.inputs}
    sources = [each.source for each in program.every_exchange if each.variable in used or is_of_parameters(way)]
    for length in sets.lengths:
        known = {v: Value(v, rows(_shape(v).index(length))) for v in ancestors(sources) if length in _shape(v)}
        try:
            if any(value.kind == ROWS for value in Shards([], sources, known=known).outputs):
                return False
        except CannotCut:
            if is_known:
                return False
    return True


def may_be_apart(sets: DataSets, way: BatchWay, program: Program) -> bool:
    """Return whether it is not known that a value such as `is_apart` looks for has rows."""
    return is_apart(sets, way, program, is_known=False)


def _ways(shapes):
    """Return a way for each number of rows of variables, the one with most bytes first."""
    groups: dict[int, list[Any]] = {}
    for variable, shape in shapes.items():
        groups.setdefault(shape[0], []).append(variable)
    ways = [BatchWay({}, length, tuple(group), sum(_bytes(v, shapes[v]) for v in group))
            for length, group in groups.items()]
    return sorted(ways, key=lambda way: -way.n_bytes)


def _name(variable):
    return named(variable) if variable.name or not isinstance(variable, theano.Constant) else \
        'a constant of %s' % ' x '.join(map(str, _shape(variable)))


def _shape(v):
    """Return the shape of a shared variable or a constant; none for a value without axes, or another variable."""
    return tuple(getattr(v.container.storage[0] if hasattr(v, 'container') else getattr(v, 'data', None), 'shape', ()))


def _bytes(variable, shape):
    return int(np.prod(shape, dtype='int64')) * np.dtype(variable.dtype).itemsize
