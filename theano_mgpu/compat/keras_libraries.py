"""Keras on the Python and NumPy of today: its backend, its data sets of texts, and its queues of batches."""
from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import types
from typing import Any

from .wrapping import wrap


def default_keras_backend() -> None:
    """Choose Theano as Keras's backend where TensorFlow, Keras's own default, is not installed."""
    if 'KERAS_BACKEND' in os.environ:
        return
    path = os.path.join(os.path.expanduser(os.environ.get('KERAS_HOME', '~/.keras')), 'keras.json')
    chosen = 'tensorflow'
    if os.path.exists(path):
        with open(path) as file:
            chosen = json.load(file).get('backend', chosen)
    if chosen == 'tensorflow' and importlib.util.find_spec('tensorflow') is None:
        os.environ['KERAS_BACKEND'] = 'theano'


def close_name_scopes(theano_backend: Any) -> None:
    """Close a name scope also where its block ends with an error."""
    if hasattr(theano_backend, 'NAME_SCOPE_STACK'):
        @contextlib.contextmanager
        def name_scope(name):
            theano_backend.NAME_SCOPE_STACK.append(name)
            try:
                yield
            finally:
                theano_backend.NAME_SCOPE_STACK.pop()
        theano_backend.name_scope = name_scope


def keep_ragged_arrays(dataset: Any) -> None:
    """Make an array of objects from the texts of a data set, which differ in length, and load such an array."""
    numpy = dataset.np

    def array(values):
        lengths = {len(value) for value in values if isinstance(value, list)}
        return numpy.array(values, dtype=object if len(lengths) > 1 else None)

    load = functools.partial(numpy.load, allow_pickle=True)
    dataset.np = types.SimpleNamespace(**dict(vars(numpy), array=array, load=load))


def end_queues_by_stop_iteration(data_utils: Any) -> None:
    """Let queues of batches end by a StopIteration that a generator raises, as before Python 3.7 (PEP 479)."""
    names = set() if hasattr(data_utils, 'init_pool_generator') else {'OrderedEnqueuer', 'GeneratorEnqueuer'}  # 2.2 on
    for name in names.intersection(vars(data_utils)):
        @wrap(getattr(data_utils, name))
        def get(original, self):
            try:
                yield from original(self)
            except RuntimeError as error:
                if not isinstance(error.__cause__, StopIteration):
                    raise
                return error.__cause__.value
