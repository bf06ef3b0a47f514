"""Matrix products in Theano's graphs."""
from __future__ import annotations

from pathlib import Path

from .wrapping import mark_version, wrap


def compute_products_once() -> None:
    """Leave a matrix product as it is where another op reads it, too, and have an elementwise op scale it.

    Theano has BLAS scale the product, and so computes it once more for each scalar. The updates of Adam, RMSprop and
    others read each gradient of a dense layer scaled, and squared. A graph over several devices adds up the gradient
    before it is scaled, so that one device now rounds as several do. Two roundings differ from Theano's own graph: of
    two products that are added, g++ may fuse the other one with the sum; and BLAS scales the parts of a sum of more
    than some 300 terms, the samples of a batch, before it adds them.
    """
    from theano.tensor import blas

    @wrap(blas.local_dot22_to_dot22scalar)
    def transform(original, node):
        products = [x for x in node.inputs if x.owner is not None and x.owner.op == blas._dot22]
        return original(node) if all(len(x.clients) == 1 for x in products) else False


def multiply_few_rows_in_blocks() -> None:
    """Have OpenBLAS multiply few rows by a large matrix in blocks, for which it does not copy the matrix first.

    A small batch takes half to a third of the time, on processors with AVX-512, with one thread of BLAS.
    """
    from theano.tensor.blas import GemmRelated
    ours = Path(__file__).with_name('few_rows.h').read_text(encoding='utf-8')

    @wrap(GemmRelated)
    def c_support_code(original, self):
        return original(self) + ours

    mark_version(GemmRelated, lambda: ('in blocks', 1), 'build_gemm_version')


def multiply_by_transposed_rows() -> None:
    """Pass the matrix of all steps of a loop to BLAS as the transposed of its rows, not as a transposed copy.

    The gradient of a weight of a loop is the product of such a matrix with the gradients of all steps.
    """
    from theano.gof import local_optimizer
    from theano.tensor import Reshape
    from theano.tensor.elemwise import DimShuffle
    from theano.tensor.opt import register_specialize

    @register_specialize
    @local_optimizer([Reshape])
    def local_transpose_after_reshape(node):
        x, shape = node.inputs
        sizes = _elements(shape)
        if node.op.ndim != 2 or sizes is None or x.owner is None or not isinstance(x.owner.op, DimShuffle) or \
                tuple(x.owner.op.new_order) != (2, 0, 1) or not hasattr(node.fgraph, 'shape_feature'):
            return False
        steps, = x.owner.inputs
        if not _is_same_size(sizes[0], node.fgraph.shape_feature.get_shape(steps, 2)):
            return False
        rows = steps.reshape(sizes[::-1], 2).T
        return [rows] if rows.type == node.outputs[0].type else False


def _elements(shape):
    """Return the elements of a vector that are numbers or variables; None if they are unknown."""
    from theano import Constant
    from theano.tensor.opt import MakeVector
    if isinstance(shape, Constant):
        return [int(size) for size in shape.data]
    return list(shape.owner.inputs) if shape.owner is not None and isinstance(shape.owner.op, MakeVector) else None


def _is_same_size(size, other):
    """Return whether two sizes are one variable, or equal numbers."""
    return size is other or getattr(size, 'data', size) == getattr(other, 'data', other)
