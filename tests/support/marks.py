"""Markers by the names that they had before; new tests use pytest.mark."""
import pytest

needs_mpi = pytest.mark.mpi
needs_compiler = pytest.mark.needs_compiler
