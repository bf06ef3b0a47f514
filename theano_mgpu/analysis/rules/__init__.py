"""The rules, a file for each family of ops: what replicas compute of a node, and the states of its outputs."""
from . import (  # noqa: F401
    advanced_indexing,
    batch_norm,
    control_flow,
    diagonals,
    draws,
    elementwise,
    indexing,
    products,
    reductions,
    shapes,
)
