"""A graph that has the length of its batches written into it, made one for batches of any length."""
import theano
import theano.tensor as T
from theano.gof.graph import io_toposort
from theano.tensor import basic, opt
from theano.tensor.nnet.abstract_conv import BaseAbstractConv

from ..analysis import any_number_of_images, number
from ..replicas.random_streams import DRAWS


class AnyLength:
    """Replaces the length of a batch, where a graph has it as a number, by that of the batch which is given.

    The number is looked for where it is the first size: of the images of a convolution, of what samples are reshaped
    to, of an array that is filled, and of random numbers, of which the first rows are then taken. Elsewhere it stays.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those that have samples along axis 0, at least one.
    length : int or None
        Samples of the batches that the graph was built for; None for any. A 1 is no such number: it may be any size.

    Attributes
    ----------
    length : int or None
    found : bool
        Whether there was such a number.

    Examples
    --------
    >>> x = T.dmatrix('x')
    >>> free = AnyLength([x], 4)
    >>> y, = free([x.reshape((4, 2, 3))])
    >>> y.eval({x: [[1, 2, 3, 4, 5, 6]]}).shape, free.found
    ((1, 2, 3), True)
    """

    def __init__(self, inputs, length):
        self._inputs = list(inputs)
        self.length = length
        self._samples = inputs[0].shape[0]
        self._of_samples = set(inputs)
        self._drawn = set()
        self._new, self._old = {}, {}
        self.found = False

    def __call__(self, outputs):
        """The same expressions for batches of any length; a variable that does not change is returned as it is."""
        if self.length in (None, 0, 1):
            return list(outputs)
        for node in io_toposort(self._inputs, list(outputs)):
            if node.outputs[0] not in self._new:
                self._convert(node)
        return [self._new.get(output, output) for output in outputs]

    def original(self, variable):
        """The variable of the given graph that one of the new graph stands for."""
        return self._old.get(variable, variable)

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
            self._old.update(zip(new, node.outputs))

    def _freed(self, node, inputs):
        """Outputs of a node without the number; None if it has none."""
        op, value = node.op, inputs[0] if inputs else None
        if isinstance(op, BaseAbstractConv) and self._is_length(op.imshp[0]):
            return any_number_of_images(node, inputs).outputs
        if isinstance(op, basic.Alloc) and self._is_length(inputs[1]) and \
                (node.inputs[0] in self._of_samples or value.ndim < len(inputs) - 1 or value.broadcastable[0]):
            return node.clone_with_new_inputs([value, self._samples] + inputs[2:], strict=False).outputs
        if isinstance(op, basic.Reshape) and node.inputs[0] in self._of_samples:
            sizes = _elements(inputs[1])
            if sizes and self._is_length(sizes[0]):
                return node.clone_with_new_inputs([value, T.stack([self._samples] + sizes[1:])], strict=False).outputs
        if isinstance(op, (basic.Reshape,) + DRAWS) and node.outputs[-1] in self._drawn:
            sizes = _elements(inputs[1])
            # One number alone may be that of all random numbers, which are put into rows later.
            if len(sizes) > 1 and self._is_length(sizes[0]):
                self._of_samples.add(node.outputs[-1])
                return node.outputs[:-1] + [node.outputs[-1][:self._samples]]
        return None

    def _is_length(self, size):
        return size is not None and number(T.as_tensor_variable(size)) == self.length


def _elements(vector):
    """The elements of a vector of sizes, numbers or variables; none if they are not known one by one."""
    if isinstance(vector, theano.Constant):
        return list(vector.data)
    return list(vector.owner.inputs) if vector.owner and isinstance(vector.owner.op, opt.MakeVector) else []
