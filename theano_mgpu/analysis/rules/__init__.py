"""The rules, a file for each family of ops: what replicas compute of a node, and in which state its outputs are."""
from . import batch_norm, control_flow, draws, elementwise, indexing, products, reductions, shapes  # noqa: F401
