"""Indices that NumPy 1.23 and later reads otherwise: a list of slices, which it takes for an array of positions."""
from __future__ import annotations

import functools
import inspect
import re
import textwrap
from typing import Any

from .wrapping import wrap

# Functions of Theano and Keras that have such lists, each with its class, and these lists.
PLACES = (('Pool', 'perform'), ('AveragePoolGrad', 'perform'), ('MaxPoolRop', 'perform'), ('', '_topk_py_impl'),
          ('', 'convert_kernel'))
LIST = re.compile(r'\[(\[region_slices\[.*\]|region_slice|slices|idx)\]')


def index_by_tuples_of_slices(module: Any) -> None:
    """Have functions of a module index by tuples of slices, in place of lists of them."""
    for owner, name in PLACES:
        place = getattr(module, owner, module)
        if name in vars(place):
            wrap(place, name)(lambda original, *args, **kwargs: _by_tuples(original)(*args, **kwargs))


@functools.lru_cache(None)
def _by_tuples(function):
    """Return a function as it reads with tuples in place of the lists; it takes milliseconds to find its source."""
    source = LIST.sub(r'[tuple(\1)]', textwrap.dedent(inspect.getsource(function)))
    exec(source, function.__globals__, made := {})
    return made[function.__name__]
