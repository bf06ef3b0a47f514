"""Random streams, and jumps in them: parts of a stream that do not overlap."""
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomFunction, RandomStateType

DRAWS = rng_mrg.mrg_uniform_base, RandomFunction  # the ops that draw

# MRG_RandomStreams spaces the streams of one draw 2**72 numbers apart (at most 2**14 of them) and
# the draws 2**134 apart: jumps of 2**100 meet neither, up to 2**34 jumps.
SQUARINGS = 100 - 72  # of the matrices for jumps of 2**72, which Theano has


def is_random_state(variable: Any) -> bool:
    """Return whether a shared variable is the state of a random stream."""
    return getattr(variable.tag, 'is_rng', False) or isinstance(variable.type, RandomStateType)


def jumped(state: Any) -> Any:
    """Return the state of a random stream after a jump, for a part of the stream that does not overlap with this one.

    Parameters
    ----------
    state : ndarray of int32, shape (streams, 6), or numpy.random.RandomState
        Of `MRG_RandomStreams` or of `RandomStreams`; it stays as it is.

    Returns
    -------
    ndarray or numpy.random.RandomState
        A new state, 2**100 (MRG31k3p) or 2**128 (Mersenne Twister) numbers ahead.

    Notes
    -----
    L'Ecuyer and Touzin, "Fast combined multiple recursive generators with multipliers of the form
    a = +-2**q +-2**r", 2000; the recurrence and its matrices are Theano's (sandbox/rng_mrg.py).
    """
    if isinstance(state, np.random.RandomState):
        twister: Any = np.random.MT19937()
        twister.state = state.get_state(legacy=False)
        return np.random.RandomState(twister.jumped())
    halves = zip(_jumps(), np.split(state, 2, axis=-1), (rng_mrg.M1, rng_mrg.M2))
    return np.concatenate([_multiply(*half) for half in halves], axis=-1).astype(state.dtype)


def _multiply(matrix, vectors, modulus):
    # Each product is reduced before the sum: three products of 62 bits overflow 64.
    return (matrix * vectors[..., None, :].astype('int64') % modulus).sum(-1) % modulus


@functools.lru_cache(maxsize=1)
def _jumps():
    """Return the two 3x3 matrices that advance MRG31k3p by 2**100."""
    jumps = []
    for matrix, modulus in ((rng_mrg.A1p72, rng_mrg.M1), (rng_mrg.A2p72, rng_mrg.M2)):
        power = np.asarray(matrix).astype(object)
        for _ in range(SQUARINGS):
            power = power.dot(power) % modulus
        jumps.append(power.astype('int64'))
    return jumps
