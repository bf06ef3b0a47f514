"""The version of the Keras that is installed, 0.3 to 2.3.1, and the parts that depend on it."""
from __future__ import annotations

import importlib


def version() -> str:
    """Return the version of the imported Keras."""
    return importlib.import_module('keras').__version__


def backend() -> str:
    """Return the name of Keras's backend."""
    module = getattr(importlib.import_module('keras'), 'backend', None)
    module = module or importlib.import_module('keras.backend')  # Keras 0.3 does not import it
    return module.backend() if hasattr(module, 'backend') else module._BACKEND


def is_hooked() -> bool:
    """Return whether `theano_mgpu.keras` knows the methods of this Keras; others have functions of Theano alone."""
    return version().startswith('2.3.')
