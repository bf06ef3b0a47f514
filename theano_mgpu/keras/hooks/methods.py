"""The methods of `keras.models.Model` that differ for a model that runs over contexts.

This is the only way in which a model comes to run over contexts. `multi_gpu_model` gives a model that it makes a
DividedModel; `enable` gives one to each model that is compiled.
"""
from __future__ import annotations

import functools
import os
from typing import Any, Callable

import numpy as np
import theano
from keras.models import Sequential
from keras.utils import io_utils

from ...auto.divided_model import divided_model_of
from ...comm.mpi import choose_ranks
from ...comm.rank_0 import write_on_rank_0
from ...compat.patch import AtImport, apply
from ...graph import theano_functions
from ...utils.files import whole_file
from ..models import KINDS, make_function, members
from . import keras_loops, patches
from .loops import run_loop
from .prefetch import look_ahead


def _standardize_user_data(original, self, x, y=None, *args, **kwargs):
    if not isinstance(x, np.ndarray) or not (y is None or isinstance(y, np.ndarray)):  # is_tensor is slow
        tensors = [value for value in members(x) + members(y) if isinstance(value, theano.Variable)]
        if tensors:
            raise ValueError('tensors (%s) cannot be split into sub-batches: pass the data as arrays, or from a '
                             'generator or keras.utils.Sequence' % ', '.join(map(str, tensors)))
    if keras_loops.running.batches is None or args:
        return original(self, x, y, *args, **kwargs)
    return keras_loops.running.batches.standardize(functools.partial(original, self), x, y, **kwargs)


def _save(original, self, filepath, overwrite=True, *args, **kwargs):
    """Save a model: a file is replaced as a whole. With several processes, the first one writes it.

    Another process that makes the same call waits until the file is written.
    """
    if not isinstance(filepath, (str, os.PathLike)):  # an h5py group or a stream: each process has its own
        original(self, filepath, True, *args, **kwargs)
        return
    path = os.path.abspath(filepath)

    def replace():
        if overwrite or not os.path.isfile(path) or io_utils.ask_to_proceed_with_overwrite(path):
            with whole_file(path) as unfinished:
                original(self, unfinished, True, *args, **kwargs)
    write_on_rank_0(choose_ranks(None), path, replace)


def _train(original, self, *args, **kwargs):
    return run_loop(functools.wraps(original)(functools.partial(look_ahead, original)), self, *args, **kwargs)


LOOPS: dict[str, Callable[..., Any]] = {
    'fit': _train, 'fit_generator': _train, 'evaluate': run_loop, 'evaluate_generator': run_loop,
    'predict': run_loop, 'predict_generator': run_loop}
METHODS: dict[str, Callable[..., Any]] = dict(
    LOOPS, _standardize_user_data=_standardize_user_data, save=_save, save_weights=_save,
    **{'_make_%s_function' % kind: functools.partial(make_function, kind) for kind in KINDS})


@functools.lru_cache(None)
def switch_methods_once() -> None:
    """Install these methods in Keras's Model, for the models that have a DividedModel."""
    theano_functions.hook_functions_once()
    apply(patches.PATCHES, AtImport)
    patches.switch_keras_methods(METHODS, applies=divided_model_of)
    if 'save_weights' in vars(Sequential):  # Keras 2.0 and 2.1
        patches.switch_keras_methods({'save_weights': _save}, divided_model_of, Sequential)
