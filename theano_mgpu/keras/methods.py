"""The methods of `keras.Model` that differ for a model that runs over contexts.

This is the only way in which a model comes to run over contexts. `multi_gpu_model` gives a model that it makes a
ParallelState; `enable` gives one to each model that is compiled.
"""
import contextlib
import functools
import os
from types import SimpleNamespace

import numpy as np
from keras import Model
from keras import backend as K
from keras.backend import theano_backend
from keras.engine import saving

from ..distributed.alone import Alone
from ..distributed.mpi import mpi_communicator
from ..distributed.rank_0 import write_on_rank_0
from ..jobs import mpi_environment
from ..patches import keras_loops, keras_models
from ..patches.theano_functions import plain_functions
from ..utils.files import whole_file
from .batch import batch_inputs, members
from .functions import MAKERS, BatchFunction, PlainKeras, WholeFunction
from .loops import loop_of
from .optimizer import Given
from .parallel_state import parallel_state_of
from .prefetch import looking_ahead


def _function_maker(kind):
    """The method that makes a model's train, test or predict function."""
    name = kind + '_function'

    def wrap(original):
        @functools.wraps(original)
        def make(self):
            state = parallel_state_of(self)
            if getattr(self, name, None) is not None or kind != 'predict' and not hasattr(self, name):
                original(self)  # which checks the model
            elif state.leaves_all():
                divided = MAKERS[kind](self)
                with plain_functions(), _updates_given(self, divided.optimizer_updates):
                    original(self)
                plain = getattr(self, name)
                if isinstance(plain, theano_backend.Function):  # else the user has replaced K.function
                    state.functions[kind] = WholeFunction(plain, divided, state.contexts[:1], state.steps(kind))
                    setattr(self, name, state.functions[kind])
            else:
                if kind == 'train':
                    self._check_trainable_weights_consistency()
                divided = MAKERS[kind](self, functools.partial(plain_maker, kind, self))
                plain = PlainKeras(divided, kind)
                state.functions[kind] = BatchFunction(divided, plain, state.steps(kind, plain))
                divided.compile()
                setattr(self, name, state.functions[kind])
        return make
    return wrap


@contextlib.contextmanager
def _updates_given(model, updates):
    """A block in which Keras finds the updates of a model's optimizer made already, unless they are None."""
    optimizer = getattr(model, 'optimizer', None)
    if updates is not None:
        model.optimizer = Given(updates)
    try:
        yield
    finally:
        if updates is not None:
            model.optimizer = optimizer


def _standardize_user_data(original):
    @functools.wraps(original)
    def _standardize_user_data(self, x, y=None, *args, **kwargs):
        if not isinstance(x, np.ndarray) or not (y is None or isinstance(y, np.ndarray)):  # which takes a while
            tensors = [value for value in members(x) + members(y) if K.is_tensor(value)]
            if tensors:
                raise ValueError('tensors (%s) cannot be split into sub-batches: pass the data as arrays, or from a '
                                 'generator or keras.utils.Sequence' % ', '.join(map(str, tensors)))
        if keras_loops.keras_batches is None or args:
            return original(self, x, y, *args, **kwargs)
        return keras_loops.keras_batches.standardize(functools.partial(original, self), x, y, **kwargs)
    return _standardize_user_data


def _save(original):
    """As `keras.Model.save`, but a file is replaced as a whole. With several processes, the first one writes it.

    Another process that makes the same call waits until the file is written.
    """
    @functools.wraps(original)
    def save(self, filepath, overwrite=True, include_optimizer=True):
        _save_whole(functools.partial(original, self, include_optimizer=include_optimizer), filepath, overwrite)
    return save


def _save_weights(original):
    """As `keras.Model.save_weights`; the file is written as by `_save`."""
    @functools.wraps(original)
    def save_weights(self, filepath, overwrite=True):
        _save_whole(functools.partial(original, self), filepath, overwrite)
    return save_weights


def _save_whole(write, filepath, overwrite):
    """Call ``write(path)`` such that an interrupted write leaves the old file intact."""
    if not isinstance(filepath, (str, os.PathLike)):  # an h5py group or a stream: each process has its own
        write(filepath)
        return
    path = os.path.abspath(filepath)

    def replace():
        if overwrite or not os.path.isfile(path) or saving.ask_to_proceed_with_overwrite(path):
            with whole_file(path) as unfinished:
                write(unfinished)
    ranks = mpi_communicator() if mpi_environment.trains_together() else Alone()
    write_on_rank_0(ranks, path, replace)


def _training_loop(original):
    return loop_of(looking_ahead(original))


LOOPS = {'fit': _training_loop, 'fit_generator': _training_loop, 'evaluate': loop_of, 'evaluate_generator': loop_of,
         'predict': loop_of, 'predict_generator': loop_of}
METHODS = dict(LOOPS, _standardize_user_data=_standardize_user_data, save=_save, save_weights=_save_weights,
               **{'_make_%s_function' % kind: _function_maker(kind) for kind in MAKERS})
_PLAIN = {kind: getattr(Model, '_make_%s_function' % kind) for kind in MAKERS}
_READ = ('optimizer', 'total_loss', 'outputs', 'updates', 'state_updates', '_collected_trainable_weights',
         '_function_kwargs')  # what these methods read of a model, besides its inputs and metrics


@functools.lru_cache(None)
def switch_methods_once():
    """Have the models that have a ParallelState use these methods."""
    keras_models.switch_keras_methods(METHODS, applies=parallel_state_of)


def plain_maker(kind, model, optimizer_updates=None):
    """Make a maker of the train, test or predict function of plain Keras for a model as it is now.

    The model may change before the function is made, as it may in plain Keras after it is made.

    Parameters
    ----------
    kind : {'train', 'test', 'predict'}
    model : keras.Model
    optimizer_updates : list of (SharedVariable, theano.Variable), optional
        What a train function has in place of those that the optimizer would make.

    Returns
    -------
    callable
        ``make()`` returns the function, the same one each time.
    """
    name, metrics = kind + '_function', model._get_training_eval_metrics() if model._is_compiled else []
    found = SimpleNamespace(**{read: getattr(model, read) for read in _READ if hasattr(model, read)})
    found._feed_inputs, found._feed_targets = batch_inputs(model, targets=kind != 'predict'), []
    found._feed_sample_weights, found._uses_dynamic_learning_phase = [], lambda: False  # they are among the inputs
    found._get_training_eval_metrics, found._check_trainable_weights_consistency = lambda: metrics, lambda: None
    if optimizer_updates is not None:
        found.optimizer = Given(optimizer_updates)

    @functools.lru_cache(None)
    def make():
        setattr(found, name, None)
        with plain_functions():
            _PLAIN[kind](found)
        return getattr(found, name)
    return make
