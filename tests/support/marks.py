"""Marks of tests that need what not every machine has."""
import importlib.util
import shutil

import theano_mgpu  # noqa: F401

import pytest
import theano

needs_compiler = pytest.mark.skipif(not theano.config.cxx, reason='Theano has no convolution without a C++ compiler')
needs_mpi = pytest.mark.skipif(
    not shutil.which('mpirun') or importlib.util.find_spec('mpi4py') is None,
    reason='no mpirun, or no mpi4py: apt-get install openmpi-bin python3-mpi4py')
