"""How whole numbers that are computed from shapes depend on the number of samples."""
import copy

import numpy as np
import theano
import theano.tensor as T
from theano.compile import ops as compile_ops
from theano.gof.graph import Apply
from theano.scalar import basic as scalar
from theano.tensor import basic, elemwise, opt, subtensor

from .states import COUNT, NUMBER

# What is computed of integers that are known.
ARITHMETIC = (scalar.Add, scalar.Sub, scalar.Mul, scalar.Neg, scalar.Identity, scalar.Cast, scalar.Maximum,
              scalar.Minimum, scalar.EQ, scalar.NEQ, scalar.LT, scalar.GT, scalar.LE, scalar.GE)


def size_of(node, sizes):
    """What the outputs of a node are, if its inputs are constants of these sizes.

    Parameters
    ----------
    node : theano.Apply
    sizes : list of {COUNT, NUMBER, None} or tuple
        Not all None.

    Returns
    -------
    {COUNT, NUMBER, None} or tuple
    """
    op = node.op
    if isinstance(op, opt.MakeVector):
        return _vector(sizes)
    if isinstance(op, (basic.ScalarFromTensor, basic.TensorFromScalar, compile_ops.Rebroadcast, compile_ops.ViewOp,
                       elemwise.DimShuffle, opt.Assert)):
        return sizes[0] if node.outputs[0].ndim <= 1 or not isinstance(sizes[0], tuple) else NUMBER
    if isinstance(op, compile_ops.Shape) or isinstance(op, compile_ops.Shape_i):
        return NUMBER  # the shape of what has as many elements as a size says; see rules.shapes
    if isinstance(op, subtensor.Subtensor):
        return _picked(node, sizes)
    if isinstance(op, basic.Join):
        pieces = [elements(v, s) for v, s in zip(node.inputs[1:], sizes[1:])]
        return NUMBER if None in pieces else _vector(sum(pieces, ()))
    if isinstance(op, elemwise.CAReduce):
        found = elements(node.inputs[0], sizes[0])
        if found is None or not isinstance(op.scalar_op, (scalar.Add, scalar.Mul)):
            return NUMBER
        return _sum(found) if isinstance(op.scalar_op, scalar.Add) else _product(found)
    if isinstance(op, elemwise.Elemwise):
        return _elementwise(node, sizes)
    return NUMBER


def elements(variable, size):
    """The sizes of a vector's elements, a tuple; None if its length is not known."""
    if isinstance(size, tuple):
        return size
    length = length_of(variable)
    return None if length is None else (size,) * length


def _vector(sizes):
    return tuple(sizes) if any(size is not None for size in sizes) else None


def _picked(node, sizes):
    if not node.op.idx_list:
        return sizes[0]
    if not isinstance(sizes[0], tuple) or any(size is not None for size in sizes[1:]):
        return sizes[0] if sizes[0] == COUNT and node.inputs[0].ndim == 1 else NUMBER
    entry, = subtensor.get_idx_list(node.inputs, node.op.idx_list)
    if isinstance(entry, slice):
        parts = [part if part is None else number(part) for part in (entry.start, entry.stop, entry.step)]
        if any(part is None and given is not None for part, given in
               zip(parts, (entry.start, entry.stop, entry.step))):
            return NUMBER
        return _vector(sizes[0][slice(*[None if part is None else int(part) for part in parts])])
    place = number(entry)
    return NUMBER if place is None else sizes[0][int(place)]


def _elementwise(node, sizes):
    if not any(isinstance(size, tuple) for size in sizes):
        return _scalar(node, sizes)
    lengths = {length_of(v) for v in node.inputs if not v.broadcastable[0]} or {1} if node.outputs[0].ndim == 1 else ()
    if len(lengths) != 1 or None in lengths:
        return NUMBER
    n, = lengths
    sizes = [size * n if isinstance(size, tuple) and len(size) == 1 else size for size in sizes]
    return _vector([_scalar(node, [size[i] if isinstance(size, tuple) else size for size in sizes])
                    for i in range(n)])


def _scalar(node, sizes):
    op = node.op.scalar_op
    if all(size is None for size in sizes):
        return None
    whole = all(np.dtype(v.dtype).kind in 'iu' for v in node.outputs)
    if isinstance(op, scalar.Second):
        return sizes[1]
    if not whole:
        return NUMBER
    if isinstance(op, (scalar.Identity, scalar.Cast)):
        return sizes[0] if np.dtype(node.inputs[0].dtype).kind in 'iu' else NUMBER
    if isinstance(op, (scalar.Minimum, scalar.Maximum)) and set(sizes) == {COUNT}:
        return COUNT
    if isinstance(op, (scalar.Add, scalar.Sub, scalar.Neg)):
        return _sum(size for size, v in zip(sizes, node.inputs) if size is not None or number(v) != 0)
    if isinstance(op, scalar.Mul):
        return _product(sizes)
    if isinstance(op, scalar.IntDiv):
        return None if sizes == [COUNT, COUNT] else NUMBER
    if isinstance(op, scalar.Switch) and sizes[0] is None:
        return sizes[1] if sizes[1] == sizes[2] else NUMBER
    return NUMBER


def _sum(sizes):
    found = set(sizes)
    return COUNT if found == {COUNT} else None if found <= {None} else NUMBER


def _product(sizes):
    found = [size for size in sizes if size is not None]
    return COUNT if found == [COUNT] else NUMBER if found else None


def length_of(vector):
    """The length that a vector is known to have, else None."""
    try:
        return T.get_vector_length(vector)
    except (ValueError, TypeError, IndexError):  # the last: of x[()]
        pass
    node = vector.owner
    if not node or not isinstance(node.op, (elemwise.Elemwise, basic.Join)):
        return None
    lengths = [length_of(v) for v in node.inputs if v.ndim == 1]
    if not lengths or None in lengths:
        return None
    return max(lengths) if isinstance(node.op, elemwise.Elemwise) else sum(lengths)


def number(variable):
    """The number that a scalar is known to be, else None."""
    if not isinstance(variable, theano.Variable):
        return variable
    try:
        return T.get_scalar_constant_value(variable)
    except (T.NotScalarConstantError, TypeError, IndexError):  # the last: of a vector that is joined
        return _whole_number(variable) if variable.owner and variable.ndim == 0 else None


def _whole_number(variable):
    """The integer that a scalar is known to be, from lengths and their sums and choices, else None."""
    node = variable.owner
    if isinstance(node.op, (opt.Assert, basic.ScalarFromTensor, basic.TensorFromScalar)):
        return number(node.inputs[0])
    if isinstance(node.op, subtensor.Subtensor) and node.inputs[0].ndim == 1 and node.inputs[0].owner:
        place = number(subtensor.get_idx_list(node.inputs, node.op.idx_list)[0])
        return None if place is None else _element(node.inputs[0], int(place))
    if not isinstance(node.op, elemwise.Elemwise) or np.dtype(variable.dtype).kind not in 'biu':
        return None
    if isinstance(node.op.scalar_op, scalar.Switch):
        chosen = number(node.inputs[0])
        return None if chosen is None else number(node.inputs[1 if chosen else 2])
    if not isinstance(node.op.scalar_op, ARITHMETIC):
        return None
    numbers = [number(v) for v in node.inputs]
    return None if any(n is None for n in numbers) else np.asarray(node.op.scalar_op.impl(*numbers), variable.dtype)


def _element(vector, place):
    """The integer that an element of a vector is known to be, else None."""
    node = vector.owner
    if isinstance(node.op, compile_ops.Shape):
        x = node.inputs[0]
        return 1 if x.broadcastable[place] else length_of(x) if x.ndim == 1 else None
    if isinstance(node.op, elemwise.DimShuffle):
        return number(node.inputs[0] if node.op.new_order == ('x',) else node.inputs[0][place])
    length = length_of(vector)
    if length is None or not -length <= place < length:
        return None
    place %= length
    if isinstance(node.op, elemwise.Elemwise):
        inputs = [v[place if length_of(v) == length else 0] for v in node.inputs]
        return number(node.op(*inputs))
    if not isinstance(node.op, basic.Join):
        return None
    for piece in node.inputs[1:]:
        if place < length_of(piece):
            return number(piece[place])
        place -= length_of(piece)
    return None


def any_number_of_images(node, inputs):
    """A convolution whose op does not know the number of images."""
    op = copy.copy(node.op)
    op.imshp = (None,) + tuple(op.imshp[1:])
    return Apply(op, inputs, [output.type(output.name) for output in node.outputs])
