"""The rules, a file for each family of ops: what replicas compute of a node, and the states of its outputs."""
from . import batch_norm, control_flow, diagonals, draws, elementwise, indexing, products, reductions, shapes  # noqa: F401
