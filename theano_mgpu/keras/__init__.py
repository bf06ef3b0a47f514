"""The add-on for Keras 2.3.1 on Theano: one model, trained and run on several contexts.

>>> from theano_mgpu.keras import multi_gpu_model
"""
import keras

if keras.backend.backend() != 'theano':
    raise ImportError('theano_mgpu.keras is for Keras on Theano, but the backend of Keras is %s: set '
                      'KERAS_BACKEND=theano in the environment (or "backend": "theano" in ~/.keras/keras.json)'
                      % keras.backend.backend())

from .balancing import balance
from .checkpoint import Checkpoint
from .enabling import disable, enable
from .learning_rate import LearningRateWarmup
from .multi_gpu import multi_gpu_model
from .placement import place
from .plot import plot_model
from .predictor import Predictor
from .verification import verify

__all__ = ['Checkpoint', 'LearningRateWarmup', 'Predictor', 'balance', 'disable', 'enable', 'multi_gpu_model', 'place',
           'plot_model', 'verify']
