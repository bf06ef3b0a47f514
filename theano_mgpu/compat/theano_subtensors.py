"""Parts of tensors in Theano's graphs."""
from __future__ import annotations


def store_gradients_of_parts() -> None:
    """Store the gradients of parts of a tensor, which have no element in common, where Theano adds them to zeros.

    An LSTM takes its four gates from one matrix. NumPy takes five times as long to add to a part of a matrix as to copy
    to it. A zero with a minus sign keeps it.
    """
    from theano.gof import local_optimizer
    from theano.tensor.opt import register_specialize
    from theano.tensor.subtensor import IncSubtensor

    @register_specialize
    @local_optimizer([IncSubtensor])
    def local_store_in_zeros(node):
        op = node.op
        if op.set_instead_of_inc or not _is_zero(node.inputs[0], _bounds(node)):
            return False
        store = IncSubtensor(op.idx_list, op.inplace, True, op.destroyhandler_tolerate_aliased)
        return [store(*node.inputs)]


def _is_zero(x, bounds):
    """Return whether a part of a tensor is zero, since the tensor is zeros with other parts stored, or added."""
    from theano import tensor
    from theano.tensor.subtensor import IncSubtensor
    while bounds and x.owner is not None and isinstance(x.owner.op, IncSubtensor):
        if not _are_apart(bounds, _bounds(x.owner)):
            return False
        x = x.owner.inputs[0]
    try:
        return bool(bounds) and tensor.get_scalar_constant_value(x) == 0
    except tensor.NotScalarConstantError:
        return False


def _bounds(node):
    """Return the constant bounds of the part that an IncSubtensor writes to: axis, first element, end; else None."""
    from theano.tensor.subtensor import get_idx_list
    slices = get_idx_list(node.inputs[:1] + node.inputs[2:], node.op.idx_list)
    cut = [(axis, each) for axis, each in enumerate(slices) if each != slice(None)]
    if len(cut) != 1 or not isinstance(cut[0][1], slice) or cut[0][1].step is not None:
        return None
    axis, part = cut[0]
    first, end = (_number(part.start, 0), _number(part.stop, float('inf')))
    return None if first is None or end is None else (axis, first, end)


def _number(x, default):
    """Return an element of a slice, unless it is unknown or counts from the end: None."""
    if x is None:
        return default
    value = getattr(x, 'data', None)
    return None if value is None or value < 0 else int(value)


def _are_apart(bounds, others):
    """Return whether two parts of a tensor are known to have no element in common."""
    return others is not None and bounds[0] == others[0] and (bounds[2] <= others[1] or others[2] <= bounds[1])
