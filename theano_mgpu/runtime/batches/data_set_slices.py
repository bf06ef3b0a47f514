"""Batches that are slices of shared data sets, such as ``X[index * 20:(index + 1) * 20]``.

Where the data sets fit, each device has a copy, and a replica slices its own part there. Where a device has too little
memory for that, the data sets stay on the host. A slice is then a view of them, and each replica is sent its own rows
of it, as of an argument. So a step divides the data set by rows, for slices of any length, in any order, by shares that
change, and `set_value` counts from the next step on. It costs what an argument costs: one copy of the batch.

Two other ways were left out. A layout in which each device keeps its rows of every batch needs slices of one length and
shares that stay, and no second function that slices otherwise. A cache of the rows that were sent needs a bound, and
takes memory from functions that do not know of it.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Mapping, Sequence

import theano
import theano.tensor as T
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors
from theano.gpuarray.type import GpuArrayType
from theano.sparse import GetItem2d
from theano.tensor.opt import Shape_i
from theano.tensor.subtensor import Subtensor, get_idx_list

from ...graph.graph import host_type, is_sparse, shared_ancestors, shared_variables
from ...graph.random_streams import DRAWS
from ...graph.repeatable import unrepeatable_in
from ...graph.rewrites import substitute
from ...graph.theano_functions import builds_graphs, host_function
from ...plan import Program, expressed
from .arguments import axes_for_samples, moved


class Slices:
    """The slices of shared data sets that are the batch of a graph.

    By default, a replica takes its own part of the slice, on its device, where it has a copy of the data set: nothing
    is sent in a step but the numbers that the slice is made of. If `sharded`, each process has a part of the data sets,
    and slices its own samples from that.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], updated: Collection[Any],
                 sharded: bool = False) -> None:
        self._inputs, self._outputs, self._updated, self._sharded = list(inputs), outputs, updated, sharded
        self._slices = _slices(inputs, outputs, updated)
        # The axes along which each slice may have samples: the one along which it slices, and the first two.
        self._axes = {v: [each for each in dict.fromkeys([axis, 0, 1]) if each < axes_for_samples(v)]
                      for v, (_, axis) in self._slices.items()}
        self.take({v: axis for v, (_, axis) in self._slices.items()})
        self.on_host: list[theano.Variable] = []  # the slices that are taken there

    def take(self, axes: Mapping[theano.Variable, int]) -> None:
        """Take slices with samples along these axes, and leave out all others: each replica gets them whole."""
        # For each slice an input with samples along axis 0, and the slice as an expression of it.
        self.stand_ins = {v: (v.type if is_sparse(v) else host_type(moved(v, axis, 0)))(
            '%s of the batch' % (v.owner.inputs[0].name or 'rows')) for v, axis in axes.items()}
        self.replacements = {v: moved(self.stand_ins[v], 0, axis) for v, axis in axes.items()}
        self._taken = {v: moved(_never_empty(v, self._slices[v][0]) if self._sharded else v, axis, 0)
                       for v, axis in axes.items()}
        # Variables that are read otherwise, too, are no sharded data sets.
        self._own = shared_ancestors([v.owner.inputs[0] for v in axes]).difference(
            shared_ancestors(substitute(self._outputs, self.replacements)), self._updated) if self._sharded else ()
        self._axis = axes

    def __bool__(self) -> bool:
        return bool(self.stand_ins)

    def shapes(self, values: Sequence[Any]) -> dict[theano.Variable, dict[int, int]]:
        """Return the length of each slice by axis, first the one along which it slices, for the arguments of a call."""
        lengths = iter(self._shape_function(*values) if self._slices else [])
        return {v: {axis: int(next(lengths)) for axis in axes} for v, axes in self._axes.items()}

    @functools.cached_property
    def _shape_function(self) -> Callable[..., list[Any]]:
        return self._on_host_of([Shape_i(axis)(v) for v, axes in self._axes.items() for axis in axes])

    def leave(self, inputs: Collection[theano.Variable]) -> None:
        """Leave slices to the analysis of the graph whose bounds depend on inputs with samples.

        A replica, which has a part of these, would not find the bounds of the whole batch, such as its length in
        ``positions[:x.shape[0]]``.
        """
        self.take({v: axis for v, axis in self._axis.items() if set(inputs).isdisjoint(ancestors([v]))})

    def lengths(self, values: Sequence[Any]) -> dict[theano.Variable, int]:
        """Return the number of samples of each slice, for the arguments of a call."""
        shapes = self.shapes(values) if self else {}
        return {v: shapes[v][axis] for v, axis in self._axis.items()}

    def data_sets(self) -> list[SharedVariable]:
        """Return the data sets that no device needs if slices are taken on the host."""
        movable = self._movable()
        others = shared_ancestors([v.owner.inputs[0] for v in self.stand_ins if v not in movable])
        return [v for v in shared_variables([v.owner.inputs[0] for v in movable]) if v not in others]

    def take_on_host(self) -> None:
        """Take slices on the host, where that frees the devices of their data sets."""
        self.on_host = self._movable()
        self._slice_function: Any = self._on_host_of([theano.Out(self._taken[v], borrow=True) for v in self.on_host])
        self._slice_function.mgpu_only_reads = True  # nobody writes to these slices of the data sets

    @property
    def sent(self) -> list[theano.Variable]:
        """The stand-ins of the slices that are taken on the host: inputs of the replicas."""
        return [self.stand_ins[v] for v in self.on_host]

    def taken(self, values: Sequence[Any]) -> dict[theano.Variable, Any]:
        """Return the slices that are taken on the host, by stand-in, for the arguments of a call."""
        return dict(zip(self.sent, self._slice_function(*values))) if self.on_host else {}

    def expressed(self, program: Program) -> Program:
        """Return the Program with slices that each replica takes in place of the other stand-ins."""
        if not self:
            return program
        _, own, first = program.numbers
        if self._sharded:
            first_here = T.lscalar('first sample of the process')
            first = first - first_here
            program = program._replace(numbers=program.numbers + [first_here], own=self._own)
        return expressed(program, {stand_in: self._taken[v][first:first + own]
                                   for v, stand_in in self.stand_ins.items() if v not in self.on_host})

    @builds_graphs
    def _movable(self) -> list[theano.Variable]:
        """Return the slices of data sets that lie on the host, that nothing else reads, and that no step changes."""
        otherwise = shared_ancestors(substitute(self._outputs, self.replacements)).union(self._updated)
        return [v for v in self.stand_ins if not any(
            each in otherwise or isinstance(each.type, GpuArrayType) for each in shared_ancestors([v.owner.inputs[0]]))]

    def _on_host_of(self, outputs: list[Any]) -> Callable[..., list[Any]]:
        """Return a function of the inputs that is computed on the host."""
        return host_function(self._inputs, outputs, on_unused_input='ignore')


def along(length: int | None, shapes: Mapping[theano.Variable, Mapping[int, int]]) -> dict[theano.Variable, int]:
    """Return the slices that have a length, by their `shapes`, each with the first axis that has it."""
    return {v: next(axis for axis, each in lengths.items() if each == length)
            for v, lengths in shapes.items() if length in lengths.values()}


def _slices(inputs, outputs, updated):
    """Return slices of data sets that depend on an input, or on a variable that a step changes.

    Each has the number of its index that is such a slice, and the axis of the result along which it slices.
    """
    moving = set(inputs).union(updated)
    slices, known = {}, {}
    for variable in ancestors(outputs):
        node = variable.owner
        if node is None or not isinstance(node.op, (Subtensor, GetItem2d)) or \
                not _is_data_set(node.inputs[0], known, inputs) or unrepeatable_in(node.inputs):
            continue
        axis = 0
        for number, index in enumerate(_indices(node)[:1 if is_sparse(variable) else None]):
            if not isinstance(index, slice):
                continue  # an integer: this axis is gone
            bounds = [v for v in (index.start, index.stop) if isinstance(v, theano.Variable)]
            if getattr(index.step, 'data', index.step) in (None, 1) and not moving.isdisjoint(ancestors(bounds)):
                slices[variable] = number, axis
                break
            axis += 1
    return slices


def _indices(node):
    if isinstance(node.op, GetItem2d):
        bounds = [None if getattr(v, 'data', v) is None else v for v in node.inputs[1:]]
        return [slice(*bounds[:3]), slice(*bounds[3:])]
    return list(get_idx_list(node.inputs, node.op.idx_list))


def _never_empty(variable, number):
    """Return a slice with at least one row, for a process whose data has ended: a sample that does not count."""
    data, indices = variable.owner.inputs[0], _indices(variable.owner)
    start, stop = indices[number].start, indices[number].stop
    start = T.minimum(0 if start is None else start, Shape_i(number)(data) - 1)
    if stop is not None:  # a negative one counts from the end
        stop = T.switch(T.lt(stop, 0), stop, T.maximum(stop, start + 1))
    indices[number] = slice(start, stop)
    return data[tuple(indices)]


def _is_data_set(variable, known, inputs):
    """Return whether a variable is a function of shared variables alone, and not drawn."""
    if variable not in known:
        met = ancestors([variable])
        known[variable] = set(inputs).isdisjoint(met) and any(hasattr(v, 'container') for v in met) and \
            not any(v.owner and isinstance(v.owner.op, DRAWS) for v in met)
    return known[variable]
