"""The rewrite of a graph that has the length of its batches as a number, for batches of any length."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import theano
import theano.tensor as T
from theano.gof.graph import io_toposort
from theano.tensor import basic, elemwise, extra_ops, opt, subtensor
from theano.tensor.nnet.abstract_conv import BaseAbstractConv
from theano.tensor.nnet.conv import ConvOp

from ...compat.legacy_convolutions import has_steps
from ...graph.analysis import any_number, number
from ...graph.random_streams import DRAWS

BASIC = subtensor.Subtensor, subtensor.IncSubtensor
SHAPED = (basic.Reshape, *DRAWS)  # ops whose second input is the shape of their result
# Indices by arrays; those that write are the last two.
ADVANCED = (subtensor.AdvancedSubtensor, subtensor.AdvancedSubtensor1, subtensor.AdvancedIncSubtensor,
            subtensor.AdvancedIncSubtensor1)


class FreeBatchSize:
    """A rewrite that replaces the length of a batch, where a graph has it as a number, by the length of each batch.

    The number is looked for where it is the first size: of the images of a convolution, of a new shape of samples, of
    an array that is filled, and of random numbers, whose first rows are then taken. Elsewhere it stays. With
    `in_indices` it is looked for in indices of samples, too, where it is more often another number: in
    ``x[arange(20), labels]``, and in slices of batches that have been joined, such as ``x[20:40]``. A length of 1 is no
    such number: it may be any size. Whether there was such a number is `found`, and `found_in_indices`.

    >>> x = T.dmatrix('x')
    >>> free = FreeBatchSize([x], 4)
    >>> y, = free([x.reshape((4, 2, 3))])
    >>> y.eval({x: [[1, 2, 3, 4, 5, 6]]}).shape, free.found
    ((1, 2, 3), True)
    """

    def __init__(self, inputs: Sequence[theano.Variable], length: int | None, in_indices: bool = False) -> None:
        self._inputs, self.length, self._in_indices = list(inputs), length, in_indices
        self._samples = inputs[0].shape[0]
        self._of_samples: set[theano.Variable] = set(inputs)
        self._drawn: set[theano.Variable] = set()
        self._new: dict[theano.Variable, theano.Variable] = {}
        self.found = self.found_in_indices = False

    def __call__(self, outputs: Sequence[theano.Variable]) -> list[theano.Variable]:
        """Return the same expressions for batches of any length; a variable that does not change stays as it is."""
        if self.length in (None, 0, 1):
            return list(outputs)
        nodes = io_toposort(self._inputs, list(outputs))
        if self._in_indices:
            self._replace_positions(nodes)
        for node in nodes:
            if node.outputs[0] not in self._new:
                self._convert(node)
        return [self._new.get(output, output) for output in outputs]

    def _replace_positions(self, nodes):
        """Replace the positions of all samples, in indices of samples, by as many as a batch has samples."""
        of_samples = set(self._of_samples)
        for node in nodes:
            if of_samples.isdisjoint(node.inputs):
                continue
            of_samples.update(node.outputs)
            if isinstance(node.op, ADVANCED) and node.inputs[0] in of_samples:
                first = 2 if isinstance(node.op, ADVANCED[2:]) else 1
                for variable in _terms(node.inputs[first]):
                    step = self._step_of_positions(variable)
                    if step:
                        positions = T.cast(T.arange(self._samples) * step, variable.dtype)
                        self._new[variable] = positions
                        self.found = self.found_in_indices = True

    def _step_of_positions(self, variable):
        """Return the step of a vector of as many positions as the length, from 0 on; None for another variable."""
        if isinstance(variable, theano.Constant):
            return positions_step(variable, self.length)
        if not variable.owner or not isinstance(variable.owner.op, basic.ARange):
            return None
        start, stop, step = [number(v) for v in variable.owner.inputs]
        return int(step) if start == 0 and step and stop == self.length * step else None

    def _convert(self, node):
        if not self._of_samples.isdisjoint(node.inputs):
            self._of_samples.update(node.outputs)
        elif isinstance(node.op, DRAWS) or not self._drawn.isdisjoint(node.inputs):
            self._drawn.update(node.outputs)
        inputs = [self._new.get(variable, variable) for variable in node.inputs]
        new = self._freed(node, inputs)
        self.found = self.found or new is not None
        if new is None and inputs != node.inputs:
            new = node.clone_with_new_inputs(inputs, strict=False).outputs
        if new is not None:
            self._new.update(zip(node.outputs, new))

    def _freed(self, node, inputs):
        """Return the outputs of a node without the number; None if the node does not have it."""
        op, value = node.op, inputs[0] if inputs else None
        if self._in_indices and isinstance(op, BASIC) and node.inputs[0] in self._of_samples:
            return self._freed_slice(node, inputs)
        sizes = _sizes(op, inputs)
        if not sizes or _number(sizes[0]) != self.length:
            return None
        if isinstance(op, BaseAbstractConv) or isinstance(op, ConvOp) and not has_steps(op):
            return any_number(node, inputs).outputs
        if isinstance(op, basic.Alloc) and \
                (node.inputs[0] in self._of_samples or value.ndim < len(sizes) or value.broadcastable[0]):
            return node.clone_with_new_inputs([value, self._samples] + sizes[1:], strict=False).outputs
        if isinstance(op, basic.Reshape) and node.inputs[0] in self._of_samples:
            return node.clone_with_new_inputs([value, T.stack([self._samples] + sizes[1:])], strict=False).outputs
        # One number alone may count all random numbers, which are put into rows later.
        if isinstance(op, SHAPED) and node.outputs[-1] in self._drawn and len(sizes) > 1:
            self._of_samples.add(node.outputs[-1])
            return node.outputs[:-1] + [node.outputs[-1][:self._samples]]
        return None

    def _freed_slice(self, node, inputs):
        """Return the outputs of a slice along axis 0 between multiples of the number; None for another index."""
        before = 0 if isinstance(node.op, subtensor.Subtensor) else 1
        first, *others = subtensor.get_idx_list(inputs[before:], node.op.idx_list) or [None]
        if not isinstance(first, slice):
            return None
        start, stop = (self._multiple(bound) for bound in (first.start, first.stop))
        if start is first.start and stop is first.stop:
            return None
        self.found_in_indices = True
        part = inputs[0][(slice(start, stop, first.step),) + tuple(others)]
        if not before:
            return [part]
        return [(T.set_subtensor if node.op.set_instead_of_inc else T.inc_subtensor)(part, inputs[1])]

    def _multiple(self, bound):
        """Return a bound of a slice, as a multiple of the number of samples where it is a multiple of the number."""
        value = _number(bound)
        if value is None or value <= 0 or value % self.length:
            return bound
        return self._samples * int(value // self.length)


def positions_step(variable: Any, length: int) -> int | None:
    """Return the step of a constant vector of so many positions, from 0 on; None for another variable."""
    if not isinstance(variable, T.TensorConstant) or variable.data.shape != (length,) or \
            variable.dtype not in T.discrete_dtypes:
        return None
    step = int(variable.data[1])
    return step if np.array_equal(variable.data, np.arange(length) * step) else None


def written_lengths(outputs: Sequence[theano.Variable]) -> set[int]:
    """Return the numbers that a graph has where the length of its batches may be written into it."""
    numbers = [_number(size) for node in io_toposort([], outputs) for size in _sizes(node.op, node.inputs)[:1]]
    return {int(each) for each in numbers if each is not None}


def _number(size):
    """Return the number that a size or bound is, given as a number or a variable; None if it is none."""
    return None if size is None else number(T.as_tensor_variable(size))


def _sizes(op, inputs):
    """Return the sizes of an array that an op makes, or takes, whose first one may be the length of a batch."""
    if isinstance(op, BaseAbstractConv):
        return op.imshp
    if isinstance(op, ConvOp):
        return [op.bsize]
    return inputs[1:] if isinstance(op, basic.Alloc) else _elements(inputs[1]) if isinstance(op, SHAPED) else []


def _terms(index):
    """Return an index and, if it is computed elementwise, the variables that it is computed of."""
    terms = [index]
    for variable in terms:
        if variable.owner and isinstance(variable.owner.op, (elemwise.Elemwise, elemwise.DimShuffle, basic.Reshape,
                                                             extra_ops.RepeatOp)):
            terms += [v for v in variable.owner.inputs if v not in terms]
    return terms


def _elements(vector):
    """Return the elements of a vector of sizes, numbers or variables; none if they are not known one by one."""
    if isinstance(vector, theano.Constant):
        return list(vector.data)
    return list(vector.owner.inputs) if vector.owner and isinstance(vector.owner.op, opt.MakeVector) else []
