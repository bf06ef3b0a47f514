"""The states of NumPy's and Python's random generators, which scripts draw the order of samples from."""
from __future__ import annotations

import random
from typing import Mapping

import numpy as np

from .training_state import from_array, to_array


def random_states() -> dict[str, np.ndarray]:
    """Return the states of NumPy's and Python's random generators as arrays, by name."""
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    _, words, gauss = random.getstate()
    second = [] if gauss is None else [gauss]  # `random.gauss` draws two numbers at once, and keeps one
    return {'numpy': to_array(generator),
            'python': np.append(np.array(words, 'uint64'), np.array(second, 'float64').view('uint64'))}


def set_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Set the states of NumPy's and Python's random generators, as `random_states` returned them, if there are any."""
    if states:
        for_numpy, for_python = generators(states)
        np.random.set_state(for_numpy)
        random.setstate(for_python.getstate())


def generators(states: Mapping[str, np.ndarray]) -> tuple[tuple, random.Random]:
    """Return the state of NumPy's generator, and one of Python with the state that `random_states` returned."""
    for_python = random.Random()
    version, of_its_own, _ = for_python.getstate()
    words, second = np.split(states['python'], [len(of_its_own)])
    gauss = second.view('float64').item() if len(second) else None
    for_python.setstate((version, tuple(map(int, words)), gauss))
    return from_array(states['numpy']).get_state(), for_python
