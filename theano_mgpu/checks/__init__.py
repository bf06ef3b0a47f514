"""Checks that compute the same in two ways, and compare: on one device and several, on ranks, in two runs."""
