"""The states, for a checkpoint, of the callbacks whose decisions depend on earlier batches."""
from __future__ import annotations

from typing import Any

import numpy as np
from keras.callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

from .learning_rate import LearningRateWarmup

NAMES = {EarlyStopping: ('wait', 'best', 'stopped_epoch'), ReduceLROnPlateau: ('wait', 'best', 'cooldown_counter'),
         ModelCheckpoint: ('best', 'epochs_since_last_save'), LearningRateWarmup: ('first_batch',)}


def states_of(callbacks: list[Callback]) -> dict[str, np.ndarray]:
    """Return the states of callbacks, under names that begin with ``callbacks/``."""
    arrays = {key: np.array(getattr(callback, name)) for key, callback, name in _attributes(callbacks)}
    for prefix, callback in _with_weights(callbacks):
        arrays.update((prefix + str(i), weights) for i, weights in enumerate(callback.best_weights or ()))
    return arrays


def restore_states(callbacks: list[Callback], arrays: dict[str, Any]) -> None:
    """Set the states of callbacks from arrays of `states_of`; other arrays may be among them."""
    for key, callback, name in _attributes(callbacks):
        if key in arrays:
            setattr(callback, name, arrays[key][()])
    for prefix, callback in _with_weights(callbacks):
        n = sum(key.startswith(prefix) for key in arrays)
        callback.best_weights = [arrays[prefix + str(i)] for i in range(n)] or None


def _attributes(callbacks):
    for position, callback in enumerate(callbacks):
        for cls, names in NAMES.items():
            if isinstance(callback, cls):
                yield from (('callbacks/%d/%s/%s' % (position, cls.__name__, name), callback, name) for name in names)


def _with_weights(callbacks):
    for position, callback in enumerate(callbacks):
        if isinstance(callback, EarlyStopping):
            yield 'callbacks/%d/best_weights/' % position, callback
