"""The add-on for Keras on Theano: one model, trained and run on several contexts.

It is for Keras 1.0 to 2.3.1.

>>> from theano_mgpu.keras import multi_gpu_model
"""
from ..auto.enabling import disable, enable
from ..compat import keras_versions

if not keras_versions.is_hooked():
    raise ImportError('theano_mgpu.keras is for Keras 1.0 to 2.3.1, but Keras %s is installed. "theano-mgpu run" and '
                      'theano_mgpu.enable() divide the batches of its models, too. To use theano_mgpu.keras: pip '
                      'install Keras==2.3.1' % keras_versions.version())
if keras_versions.backend() != 'theano':
    raise ImportError('theano_mgpu.keras is for Keras on Theano, but the backend of Keras is %s: set '
                      'KERAS_BACKEND=theano in the environment (or "backend": "theano" in ~/.keras/keras.json)'
                      % keras_versions.backend())

from .api.balancing import balance
from .api.multi_gpu import multi_gpu_model
from .api.placement import place
from .api.predictor import Predictor
from .api.verification import verify
from .hooks.checkpoint import Checkpoint

__all__ = ['Checkpoint', 'Predictor', 'balance', 'disable', 'enable', 'multi_gpu_model', 'place', 'verify']
