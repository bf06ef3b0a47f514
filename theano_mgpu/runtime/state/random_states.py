"""The states of NumPy's and Python's random generators, which scripts draw the order of samples from."""
from __future__ import annotations

import random
from typing import Mapping

import numpy as np

from .training_state import from_array, to_array


def random_states() -> dict[str, np.ndarray]:
    """Return the states of NumPy's and Python's random generators, as arrays."""
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    _, words, gauss = random.getstate()
    return {'numpy': to_array(generator), 'python': np.array(words, 'uint64'),
            'gauss': np.array(np.nan if gauss is None else gauss)}


def set_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Set the states of NumPy's and Python's random generators, as `random_states` returned them."""
    for_numpy, for_python = generators(states)
    np.random.set_state(for_numpy)
    random.setstate(for_python.getstate())


def generators(states: Mapping[str, np.ndarray]) -> tuple[tuple, random.Random]:
    """Return the state of NumPy's generator, and one of Python with the state that `random_states` returned."""
    for_python = random.Random()
    gauss = float(states.get('gauss', np.nan))  # the second of two numbers; files of earlier versions lack it
    for_python.setstate((for_python.getstate()[0], tuple(map(int, states['python'])),
                         None if np.isnan(gauss) else gauss))
    return from_array(states['numpy']).get_state(), for_python
