"""Shorter names of markers."""
import pytest

needs_mpi = pytest.mark.mpi
needs_compiler = pytest.mark.needs_compiler
