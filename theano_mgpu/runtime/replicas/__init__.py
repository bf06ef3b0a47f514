"""Copies of shared variables on contexts, and edits of the memory that these have borrowed."""
