"""The difference of two arrays, for programs with any Keras and for tests."""
import numpy as np


def difference(one, other):
    """Return the largest difference of two arrays, relative to the largest number."""
    one, other = np.asarray(one, 'float64'), np.asarray(other, 'float64')
    return float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30)) if one.size else 0.
