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
