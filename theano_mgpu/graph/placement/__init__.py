"""Placement: which device each op of one graph runs on, by blocks of the user and by propagation."""
