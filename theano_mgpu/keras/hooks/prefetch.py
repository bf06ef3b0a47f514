"""The next batch of `fit` and `fit_generator`, which is sliced and sent while the current one is computed."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np
from keras.callbacks import Callback
from keras.models import Model

from ...auto.divided_model import divided_model_of
from ...utils.attributes import temporarily
from . import keras_loops
from .feed import FedIterator, next_of_queue


class LoopObserver:
    """An observer of the batches that a loop of a model takes; `keras_loops.running.batches` observes the running loop.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._last: Any = None      # (slicing function, arrays, rows) of the current batch
        self._sliced: Any = None    # (rows, arrays) of the next one
        self._source: Any = None    # the queue or FedIterator that batches come from
        self._standard: Any = None  # (item of a generator, its standardised arrays) of the next one
        self._class_weight: Any = None

    def calls(self, function: Any) -> bool:
        """Return whether the loop calls a function itself: the user's own in its place may change the arrays."""
        return getattr(self._model.train_function, 'function', None) is function

    def slice(self, original: Callable[..., Any], arrays: Any, rows: Any) -> Any:
        """Slice a batch of `fit`, in place of Keras's slice_arrays."""
        sliced, self._sliced = self._sliced, None
        self._last = original, arrays, rows
        return sliced[1] if sliced and _is_same(sliced[0], rows) else original(arrays, rows)

    def queue(self, source: Any) -> None:
        """Note that batches are taken from a queue of Keras's, or from a FedIterator."""
        self._source = source

    def standardize(self, original: Callable[..., Any], x: Any, y: Any = None, sample_weight: Any = None,
                    class_weight: Any = None, **kwargs: Any) -> Any:
        """Standardise a batch, in place of Keras's _standardize_user_data."""
        self._class_weight = class_weight
        ready, self._standard = self._standard, None
        if ready and not kwargs and all(a is b for a, b in zip(ready[0], (x, y, sample_weight))):
            return ready[1]
        return original(x, y, sample_weight=sample_weight, class_weight=class_weight, **kwargs)

    def after(self, inputs: list[Any]) -> list[Any] | None:
        """Return the inputs of the batch after the current one; None if it is not known, or not there yet."""
        following = self._next_slice() if self._source is None else self._next_item()
        return following + inputs[len(following):] if following else None

    def _next_slice(self):
        original, arrays, rows = self._last or (None, None, None)
        following = next_rows(rows)
        if following is None:
            return None
        self._sliced = following, original(arrays, following)
        return self._sliced[1]

    def _next_item(self):
        item = self._source.ahead if isinstance(self._source, FedIterator) else next_of_queue(self._source)
        if not isinstance(item, tuple) or len(item) not in (2, 3):
            return None  # Keras raises an error
        x, y, sample_weight = (item + (None,))[:3]
        standard = self._model._standardize_user_data(x, y, sample_weight=sample_weight,
                                                      class_weight=self._class_weight)
        self._standard = (x, y, sample_weight), standard
        return sum(map(list, standard), [])


def next_rows(rows: Any) -> np.ndarray | None:
    """Return the next rows of the array that some rows are a slice of, as many or all that are left; None at the end.

    >>> order = np.array([4, 2, 0, 1, 3])
    >>> next_rows(order[2:4])
    array([3])
    """
    whole = getattr(rows, 'base', None)
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.dtype != rows.dtype or not len(rows):
        return None
    stop = (rows.ctypes.data - whole.ctypes.data) // whole.itemsize + len(rows)
    return whole[stop:stop + len(rows)] if stop < len(whole) else None


def _is_same(rows, others):
    return getattr(others, 'base', None) is rows.base and rows.ctypes.data == others.ctypes.data and \
        len(rows) == len(others)


def look_ahead(method: Callable[..., Any], self: Model, *args: Any, **kwargs: Any) -> Any:
    """Run a training loop of `keras.Model`, for a model over contexts, in which the next batch is known.

    It is not if a callback of the user's runs after each batch: it may edit the data.
    """
    # Their keyword is not asked for: fit_generator has others than its signature tells.
    ends = [getattr(each, name, None) for value in [*args, *kwargs.values()] if isinstance(value, (list, tuple))
            for each in value if isinstance(each, Callback) for name in ('on_batch_end', 'on_train_batch_end')]
    are_known = all(end.__module__.startswith(('keras.', 'theano_mgpu.')) for end in ends if end)
    try:
        with temporarily(keras_loops.running, 'batches', LoopObserver(self) if are_known else None):
            return method(self, *args, **kwargs)
    finally:
        # A loop that was interrupted leaves a batch on the devices.
        divided = divided_model_of(self)  # none where the first batch was to compile the model, and failed
        if divided is not None and 'train' in divided.functions:
            divided.functions['train'].forget_prepared()
