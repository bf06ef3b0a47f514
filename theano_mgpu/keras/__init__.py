"""The add-on for Keras on Theano: one model, trained and run on several contexts.

Keras 2.3 has all of it; Keras 1 and 2.0 to 2.2 have `Predictor` alone.

>>> from theano_mgpu.keras import multi_gpu_model
"""
from typing import Any

from ..compat import keras_versions

if keras_versions.number() < (1, 0):
    raise ImportError('theano_mgpu.keras is for Keras 1.0 to 2.3.1, but Keras %s is installed. "theano-mgpu run" and '
                      'theano_mgpu.enable() divide the batches of its models, too. To use theano_mgpu.keras: pip '
                      'install Keras==2.3.1' % keras_versions.version())
if keras_versions.backend() != 'theano':
    raise ImportError('theano_mgpu.keras is for Keras on Theano, but the backend of Keras is %s: set '
                      'KERAS_BACKEND=theano in the environment (or "backend": "theano" in ~/.keras/keras.json)'
                      % keras_versions.backend())

from .api.predictor import Predictor

if keras_versions.is_hooked():
    from .api.balancing import balance
    from .api.enabling import disable, enable
    from .api.multi_gpu import multi_gpu_model
    from .api.placement import place
    from .api.verification import verify
    from .hooks.checkpoint import Checkpoint

__all__ = ['Checkpoint', 'Predictor', 'balance', 'disable', 'enable', 'multi_gpu_model', 'place', 'verify']


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError('module %r has no attribute %r' % (__name__, name))
    raise ImportError('theano_mgpu.keras.%s is for Keras 2.3.1, but Keras %s is installed. "theano-mgpu run" and '
                      'theano_mgpu.enable() divide the batches of its models, too. To use %s: pip install '
                      'Keras==2.3.1' % (name, keras_versions.version(), name))
