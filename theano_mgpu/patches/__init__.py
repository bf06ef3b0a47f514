"""Fixes and hooks in libraries that get no more releases."""
