"""The methods of `keras.Model` that differ where a model runs over contexts.

ParallelModel has them, and after `enable` every model. Each is made from Keras's own.
"""
import functools
import os

import keras
from keras import backend as K
from keras.engine import saving

from ..distributed.mpi import mpi_ranks
from ..distributed.process_group import Ranks
from ..jobs import mpi_environment
from ..patches import compat
from ..utils.files import whole_file
from . import functions
from .batch import members
from .loops import loop_of
from .parallel_state import parallel_state_of
from .prefetch import looking_ahead


def _make_train_function(original):
    @functools.wraps(original)
    def _make_train_function(self):
        _check_compiled(self, 'train_function')
        self._check_trainable_weights_consistency()
        if self.train_function is None:
            self.train_function = functions.train_function(self)
            parallel_state_of(self).observe('train', self.train_function)
    return _make_train_function


def _make_test_function(original):
    @functools.wraps(original)
    def _make_test_function(self):
        _check_compiled(self, 'test_function')
        if self.test_function is None:
            self.test_function = functions.test_function(self)
            parallel_state_of(self).observe('test', self.test_function)
    return _make_test_function


def _make_predict_function(original):
    @functools.wraps(original)
    def _make_predict_function(self):
        if getattr(self, 'predict_function', None) is None:
            self.predict_function = functions.predict_function(self)
            parallel_state_of(self).observe('predict', self.predict_function)
    return _make_predict_function


def _check_compiled(model, name):
    if not hasattr(model, name):
        raise RuntimeError('You must compile your model before using it.')


def _standardize_user_data(original):
    @functools.wraps(original)
    def _standardize_user_data(self, x, y=None, *args, **kwargs):
        tensors = [value for value in members(x) + members(y) if K.is_tensor(value)]
        if tensors:
            raise ValueError('tensors (%s) cannot be split into sub-batches: give the data as arrays, or from a '
                             'generator or keras.utils.Sequence' % ', '.join(map(str, tensors)))
        standardize = functools.partial(original, self)
        if compat.keras_batches is None or args:
            return standardize(x, y, *args, **kwargs)
        return compat.keras_batches.standardize(standardize, x, y, **kwargs)
    return _standardize_user_data


def save(original):
    """As `keras.Model.save`, but a file is replaced whole. With several processes, the first one writes it.

    Another process that makes the same call waits until the file is written.
    """
    @functools.wraps(original)
    def save(self, filepath, overwrite=True, include_optimizer=True):
        _save_whole(functools.partial(original, self, include_optimizer=include_optimizer), filepath, overwrite)
    return save


def save_weights(original):
    """As `keras.Model.save_weights`; a file is written as by `save`."""
    @functools.wraps(original)
    def save_weights(self, filepath, overwrite=True):
        _save_whole(functools.partial(original, self), filepath, overwrite)
    return save_weights


def _save_whole(write, filepath, overwrite):
    """``write(path)`` such that whoever reads the file finds a whole one, also after an interrupted write."""
    if not isinstance(filepath, (str, os.PathLike)):  # an h5py group, or a stream, which each process has for itself
        write(filepath)
        return
    path = os.path.abspath(filepath)

    def replace():
        if overwrite or not os.path.isfile(path) or saving.ask_to_proceed_with_overwrite(path):
            with whole_file(path) as unfinished:
                write(unfinished)
    ranks = mpi_ranks() if mpi_environment.trains_together() else Ranks()
    ranks.write_by_first(path, replace)


def _training_loop(original):
    return loop_of(looking_ahead(original))


LOOPS = {'fit': _training_loop, 'fit_generator': _training_loop, 'evaluate': loop_of, 'evaluate_generator': loop_of,
         'predict': loop_of, 'predict_generator': loop_of}
METHODS = {wrap.__name__: wrap for wrap in (_make_train_function, _make_test_function, _make_predict_function,
                                            _standardize_user_data, save, save_weights)}
PLAIN = {name: getattr(keras.Model, name) for name in METHODS}


def plain_train_function(model):
    """Give a model the train function of plain Keras; returns it."""
    model.train_function = None
    PLAIN['_make_train_function'](model)
    return model.train_function


def plain_predict_function(model):
    """Give a model the predict function of plain Keras; returns it."""
    model.predict_function = None
    PLAIN['_make_predict_function'](model)
    return model.predict_function


def over_contexts(cls):
    """Give a subclass of keras.Model these methods."""
    for name, wrap in dict(METHODS, **LOOPS).items():
        setattr(cls, name, wrap(getattr(keras.Model, name)))
    return cls
