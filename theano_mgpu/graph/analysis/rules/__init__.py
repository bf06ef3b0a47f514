"""The rules, a file for each family of ops: what replicas compute of a node, and the states of its outputs.

`base` has what several of them use; it registers no rule.
"""
from . import along_axes, batch_norm, control_flow, diagonals, draws, elementwise, indexing, products, shapes  # noqa: F401
