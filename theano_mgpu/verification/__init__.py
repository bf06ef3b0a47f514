"""Compares several contexts with one device, and certifies the result."""
