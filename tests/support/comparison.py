"""Comparisons of the results of training."""
import numpy as np


def note_of(error):
    """Return the last note of an exception; before Python 3.11, the end of its text."""
    return (getattr(error, '__notes__', None) or str(error).split('\n'))[-1]


def has_text(error, text):
    """Return whether an exception has a text; before Python 3.11, with a note at its end."""
    return str(error) == text or not hasattr(error, 'add_note') and str(error).startswith(text.rstrip("'"))


def assert_bitwise(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        np.testing.assert_array_equal(a, b)
