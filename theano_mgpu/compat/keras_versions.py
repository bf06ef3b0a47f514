"""What depends on the version of Keras that is installed: 0.3 to 2.3.1."""
from __future__ import annotations

import importlib


def version() -> str:
    """Return the version of the imported Keras."""
    return importlib.import_module('keras').__version__


def backend() -> str:
    """Return the name of Keras's backend: a package that Keras 0.3 does not import by itself."""
    module = importlib.import_module('keras.backend')
    return module.backend() if hasattr(module, 'backend') else module._BACKEND


def is_hooked() -> bool:
    """Return whether `theano_mgpu.keras` knows the methods of this Keras; those of others are functions of Theano."""
    return version().startswith('2.3.')
