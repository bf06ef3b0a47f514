"""Reductions: the ways in which the values of all replicas become one value, the same on every replica."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reduction:
    """A way to make one value of the values of all replicas."""

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Elementwise(Reduction):
    """A reduction of arrays of one shape, element by element; `ufunc` reduces two of them."""

    ufunc: np.ufunc

    def __str__(self) -> str:
        return self.ufunc.__name__


@dataclass(frozen=True)
class Gather(Reduction):
    """The rows of all samples along an axis, in the order of the samples."""

    axis: int = 0


class Stack(Gather):
    """The values of all shards that have samples, along axis 0, which each shard puts in front: one row a shard."""


class Same(Reduction):
    """The value of any replica: each computes the same one."""


SUM, MAX, MIN, PROD = Elementwise(np.add), Elementwise(np.maximum), Elementwise(np.minimum), Elementwise(np.multiply)
STACK, SAME = Stack(), Same()
