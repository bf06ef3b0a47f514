"""The table of the patches of this room: shared variables that tell of reads and writes, and new functions."""
from ..compat.patch import AFTER_THEANO, AT_ENABLE, Patch
from . import theano_functions
from .replicas import shared_variables

PATCHES = [
    Patch('Theano', '1.0.5', 'copies of a shared variable on other contexts become stale in silence',
          AFTER_THEANO, shared_variables.hook_shared_variables,
          'tests/runtime/test_replicate.py::test_without_the_hooks_values_are_stale'),
    Patch('Theano', '1.0.5', 'theano.function makes functions for one device only',
          AT_ENABLE, theano_functions.after_each_function,
          'tests/auto/test_every_function.py::test_scripts_give_the_figures_of_plain_theano'),
    Patch('Theano', '1.0.5', 'a copy of a function runs on one device only',
          AT_ENABLE, theano_functions.divide_copies,
          'tests/auto/test_calls.py::test_a_copy_is_divided'),
]
