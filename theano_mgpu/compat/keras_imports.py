"""Keras 2.3.1's choice of a backend when it is imported, and its data sets of texts."""
from __future__ import annotations

import importlib.util
import json
import os
import types
from typing import Any


def default_keras_backend() -> None:
    """Choose Theano as Keras's backend where TensorFlow, Keras's own default, is not installed.

    Without this, ``import keras`` ends with "No module named 'tensorflow'".
    """
    if 'KERAS_BACKEND' in os.environ:
        return
    path = os.path.join(os.path.expanduser(os.environ.get('KERAS_HOME', '~/.keras')), 'keras.json')
    chosen = 'tensorflow'
    if os.path.exists(path):
        with open(path) as file:
            chosen = json.load(file).get('backend', chosen)
    if chosen == 'tensorflow' and importlib.util.find_spec('tensorflow') is None:
        os.environ['KERAS_BACKEND'] = 'theano'


def keep_ragged_arrays(dataset: Any) -> None:
    """Make an array of objects from the texts of a data set, which differ in length: NumPy 1.24 refuses any other.

    Without this, ``imdb.load_data()`` and ``reuters.load_data()`` end with "inhomogeneous shape".
    """
    numpy = dataset.np

    def array(values):
        lengths = {len(value) for value in values if isinstance(value, list)}
        return numpy.array(values, dtype=object if len(lengths) > 1 else None)

    dataset.np = types.SimpleNamespace(**dict(vars(numpy), array=array))
