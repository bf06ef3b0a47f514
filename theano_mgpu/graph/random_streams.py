"""Random streams: the ops that draw, and the states."""
from __future__ import annotations

from typing import Any

from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomFunction, RandomStateType

DRAWS = rng_mrg.mrg_uniform_base, RandomFunction  # the ops that draw


def is_random_state(variable: Any) -> bool:
    """Return whether a shared variable is the state of a random stream."""
    return getattr(variable.tag, 'is_rng', False) or isinstance(variable.type, RandomStateType)
