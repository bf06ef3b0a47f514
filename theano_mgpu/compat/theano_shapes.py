"""The lengths of tensors, as Theano's optimiser knows them."""
from __future__ import annotations

from collections import deque


def express_no_length_by_itself() -> None:
    """Have Theano's optimiser express no length of a tensor by the tensor itself.

    A tensor that takes the place of another one gets the lengths of that one. But for ``T.fill(x[:y.shape[0]], y)``,
    which becomes ``y``, these are made of the lengths of ``y``. They would take the place of lengths that they read:
    nodes in a circle, along which Theano goes until the memory is full.
    """
    from theano.tensor.opt import ShapeFeature

    from .wrapping import wrap

    @wrap(ShapeFeature)
    def update_shape(original, self, r, other_r):
        before = self.shape_of.get(r)
        original(self, r, other_r)
        if before is not None:
            self.shape_of[r] = tuple([old if new is old or _is_made_of(new, r, self.shape_of) else new
                                      for old, new in zip(before, self.shape_of[r])])


def _is_made_of(length, tensor, lengths):
    """Return whether a length is made of a tensor, or of another one whose lengths are."""
    from theano.gof.graph import stack_search

    def sources(variable):
        return [*(variable.owner.inputs if variable.owner else ()), *(lengths.get(variable) or ())]
    return tensor in stack_search(deque([length]), sources)
