"""Code for fresh interpreters in which a patch of the package is missing."""

# Removes a patch, given by its function's name, from the table before the package is imported.
WITHOUT_PATCH = """
import importlib.util, sys, types
bare = types.ModuleType('theano_mgpu')
bare.__path__ = importlib.util.find_spec('theano_mgpu').submodule_search_locations
sys.modules['theano_mgpu'] = bare
from theano_mgpu.compat import PATCHES
PATCHES[:] = [patch for patch in PATCHES if patch.apply.__name__ != %r]
del sys.modules['theano_mgpu']
"""
