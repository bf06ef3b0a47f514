"""Devices of this machine, and contexts on them."""
