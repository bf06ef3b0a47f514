"""The calls of some functions, with their results, for a file."""
from __future__ import annotations

import builtins
import json
from typing import Any, Mapping

import numpy as np

from ... import errors
from .state_file import parsing


class RecordedCalls:
    """The calls of numbered functions in order, with the results: arrays, in a list or dict, or one of them."""

    def __init__(self, n_functions: int) -> None:
        self._order: list[int] = []
        self._forms: list[Any] = [None] * n_functions  # what a call returns: ONE, the keys of a dict, or their number
        self._columns: list[list[Column]] = [[] for _ in range(n_functions)]
        self._errors: list[list[Any]] = []  # the number of the function, the class and the text
        self._next, self._counts = 0, [0] * n_functions

    def __len__(self) -> int:
        return len(self._order)

    def add(self, number: int, results: Any) -> None:
        """Add a call of a function, which has returned these results."""
        form, values = _taken_apart(results)
        if self._forms[number] is None:
            self._forms[number], self._columns[number] = form, [Column() for _ in values]
        for column, value in zip(self._columns[number], values):
            column.add(value)
        self._order.append(number)

    def add_failure(self, number: int, error: Exception) -> None:
        """Add a call of a function, which has raised an error."""
        self._order.append(-1 - len(self._errors))
        self._errors.append([number, type(error).__name__, str(error)])

    def next(self) -> tuple[int, Any]:
        """Return the number of the function that was called next, and the results, or the error that it raised."""
        number = self._order[self._next]
        self._next += 1
        if number < 0:
            number, name, text = self._errors[-1 - number]
            cls = getattr(builtins, name, None) or getattr(errors, name, None)
            return number, cls(text) if cls else RuntimeError('%s: %s' % (name, text))
        values = [column[self._counts[number]] for column in self._columns[number]]
        self._counts[number] += 1
        form = self._forms[number]
        return number, dict(zip(form, values)) if isinstance(form, list) else values if form != ONE else values[0]

    @property
    def is_replayed(self) -> bool:
        """Return whether `next` has returned all calls."""
        return self._next == len(self._order)

    def count(self, number: int) -> int:
        """Return how often a function has returned."""
        return self._order.count(number)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the calls as arrays, by name."""
        arrays = {'calls': np.array(self._order, 'int32'), 'forms': np.array(json.dumps(self._forms)),
                  'errors': np.array(json.dumps(self._errors))}
        for number, columns in enumerate(self._columns):
            for i, column in enumerate(columns):
                arrays['flat/%d/%d' % (number, i)], arrays['shapes/%d/%d' % (number, i)] = column.to_arrays()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> RecordedCalls:
        """Return the calls of a file; raise a Damaged if they cannot be read."""
        with parsing('the record of calls'):
            forms = json.loads(str(arrays['forms']))
            calls = cls(len(forms))
            calls._order, calls._forms = arrays['calls'].tolist(), forms
            calls._errors = json.loads(str(arrays['errors']))
            calls._columns = [[Column(arrays['flat/%d/%d' % (number, i)], arrays['shapes/%d/%d' % (number, i)])
                               for i in range(_length(form))] for number, form in enumerate(forms)]
        return calls

    def check(self, path: str, n_functions: int) -> None:
        """Raise a ValueError if a file has the calls of another number of functions."""
        if len(self._forms) != n_functions:
            raise ValueError('%s has the calls of %d functions, but there are %d: pass the same functions in the same '
                             'order' % (path, len(self._forms), n_functions))


ONE = 'one'


def _taken_apart(results):
    """Return the form of results, and their values as a list."""
    if isinstance(results, dict):
        return list(results), list(results.values())
    if isinstance(results, (list, tuple)):
        return len(results), list(results)
    return (0, []) if results is None else (ONE, [results])


def _length(form):
    return len(form) if isinstance(form, list) else 1 if form == ONE else form or 0


class Column:
    """The values of one output, call by call: arrays of one dtype and number of axes."""

    def __init__(self, flat: Any = None, shapes: Any = ()) -> None:
        self._parts = [] if flat is None else [flat]
        self._shapes = list(map(tuple, shapes))
        self._ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])

    def add(self, value: Any) -> None:
        """Add a value; raise a TypeError unless it is an array of numbers."""
        value = np.array(value)  # a copy: the caller may change it
        if value.dtype.hasobject:
            raise TypeError('a Checkpoint records results that are arrays of numbers, not %r' % type(value.flat[0]))
        self._parts.append(value.ravel())
        self._shapes.append(value.shape)

    def __getitem__(self, i: int) -> np.ndarray:
        shape = self._shapes[i]
        end = self._ends[i]
        return self._parts[0][end - int(np.prod(shape)):end].reshape(shape).copy()

    def to_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements of all values, and the shape of each."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0], np.array(self._shapes, 'int64')
