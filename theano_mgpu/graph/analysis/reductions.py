"""Reductions: the ways in which the values of all replicas become one value, the same on every replica."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Reduction:
    """A way to make one value of the values of all replicas."""

    def __str__(self) -> str:
        return type(self).__name__.lower()


class Elementwise(Reduction):
    """A reduction of arrays of one shape, element by element; `ufunc` reduces two of them."""

    ufunc: ClassVar[np.ufunc]


class Sum(Elementwise):
    """The sum of the replicas' parts."""

    ufunc = np.add


class Max(Elementwise):
    """The largest element of the replicas' parts."""

    ufunc = np.maximum


class Min(Elementwise):
    """The smallest element of the replicas' parts."""

    ufunc = np.minimum


class Prod(Elementwise):
    """The product of the replicas' parts."""

    ufunc = np.multiply


@dataclass(frozen=True)
class Gather(Reduction):
    """The rows of all samples along an axis, in the order of the samples."""

    axis: int = 0


class Stack(Gather):
    """The values of all shards that have samples, along axis 0, which each shard puts in front: one row a shard."""


class Same(Reduction):
    """The value of any replica: each computes the same one."""


SUM, MAX, MIN, PROD, STACK, SAME = Sum(), Max(), Min(), Prod(), Stack(), Same()
