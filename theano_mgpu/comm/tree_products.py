"""Sums of matrix products, such as the gradients of a dense layer's weights, in the order of the tree of the shards."""
from __future__ import annotations

import ctypes
import functools
import operator
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np
import theano
from theano.tensor.blas import ldflags

from ..utils import native
from ..utils.pointers import pointers_to
from ..utils.processor import threads
from .tree import Node, Tree, folded

SOURCE = Path(__file__).with_name('tree_products.cpp')
SMALL = 1 << 15  # elements of a product that is not worth being kept for later
SHARE = 1 << 17  # elements of a product for which one more thread is worth its start


class Product(NamedTuple):
    """The product ``left.T @ right`` of matrices with one row a sample, before it is computed."""

    left: np.ndarray
    right: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the product."""
        return self.left.shape[1], self.right.shape[1]

    @property
    def dtype(self) -> np.dtype:
        """The type of its elements."""
        return self.left.dtype

    @property
    def is_small(self) -> bool:
        """True if it is not worth being kept for later."""
        return int(np.prod(self.shape)) <= SMALL

    def computed(self) -> np.ndarray:
        """Return the product."""
        return np.dot(self.left.T, self.right)


def add_products(tree: Tree, products: Sequence[tuple[int, Product]], sums: Sequence[np.ndarray]) -> None:
    """Write the sums of products.

    Where Theano has a compiler and a BLAS, this computes them block by block, of all shards: they are in the cache when
    they are added. Each product of blocks is a call of its own, so that the bits depend on the shapes alone. Shards are
    neighbours from left to right, and so are the nodes that they come to, whose sums are C-contiguous.
    """
    library = compiled(theano.config.cxx)
    if library is None:
        nodes = tree.merged([Node(0, number, product.computed()) for number, product in products],
                            lambda values, level, place: folded(values, operator.add))
        for node, out in zip(nodes, sums):
            out[...] = node.value
        return
    every_left, every_right = ([np.ascontiguousarray(each[i]) for _, each in products] for i in (0, 1))
    n, nodes = len(products), []
    additions = [tree.merge(nodes, Node(0, number, None), lambda *_: None) for number, _ in products]
    function = getattr(library, 'add_%s' % sums[0].dtype)
    integers = ctypes.c_int * n
    n_threads = max(1, min(threads(), int(np.prod(sums[0].shape)) // SHARE))
    function(n_threads, n, pointers_to(every_left), pointers_to(every_right), integers(*map(len, every_left)),
             integers(*additions), *sums[0].shape, len(sums), pointers_to(sums))


@functools.lru_cache(maxsize=None)
def compiled(compiler: str) -> Any:
    """Return the compiled library, for Theano's compiler; None where it cannot be built."""
    if not ldflags():
        return None
    flags = ['-O3', '-pthread', *ldflags(libs=False, flags=True)]
    flags += ['-L' + path for path in ldflags(libs=False, libs_dir=True)]
    return native.load(SOURCE, flags, 'adds products of logical shards',
                       'NumPy adds them, in more time.', ldflags())
