"""The rules, a file for each family of ops: what replicas compute of a node, and the states of its outputs.

`base` has what several of them use, and `rows` has facts about rows that rules ask for; these two register no rule.
"""
from . import batch_norm, control_flow, diagonals, draws, elementwise, indexing, products, reductions, shapes  # noqa: F401
