"""Copies of shared variables on contexts, random streams, transfers, and sums on the host."""
