"""The calls of some functions, with their results, for a file."""
from __future__ import annotations

import builtins
import json
from typing import Any, Mapping

import numpy as np

from ... import errors
from ...comm.rank_errors import description
from .replay import Record, keys_of
from .state_file import parsing


class RecordedCalls(Record):
    """The calls of numbered functions in order, with the results: arrays, in a list or dict, or one of them."""

    MARK, FOREIGN = 'forms', 'was not written by mgpu.Checkpoint; name another folder'
    moments = 'begin', 'now'

    def __init__(self, n_functions: int) -> None:
        super().__init__()
        self._order: list[tuple[int, int]] = []  # of each call the function or, if below 0, the error; and the key
        self._forms: list[Any] = [None] * n_functions  # what a call returns: ONE, the keys of a dict, or their number
        self._columns: list[list[Column]] = [[] for _ in range(n_functions)]
        self._errors: list[list[Any]] = []  # the number of the function, and what `_description` returns
        self._counts = [0] * n_functions  # how often a function has returned

    def add(self, number: int, key: int, results: Any) -> None:
        """Add a call, with its results; a TypeError for others than arrays of numbers."""
        form, values = _taken_apart(results)
        arrays = list(map(np.array, values))  # copies: the caller may change them
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError('a Checkpoint records results that are arrays of numbers, not %r' % type(array.flat[0]))
        if self._forms[number] is None:
            self._forms[number], self._columns[number] = form, [Column() for _ in values]
        for column, array in zip(self._columns[number], arrays):
            column.add(array)
        self._order.append((number, key))
        self._counts[number] += 1

    def add_failure(self, number: int, key: int, error: Exception) -> None:
        self._order.append((-1 - len(self._errors), key))
        self._errors.append([number, *_description(error)])

    def next(self, path: str, done: RecordedCalls, number: int, key: int) -> Any:
        place, expected = self._order[len(done._order)]
        of, *error = self._errors[-1 - place] if place < 0 else [place]
        if of != number or expected not in (UNKNOWN, key):
            raise ValueError('%s was written by a loop that called %s here. Run the same script on the same data to '
                             'continue from it, with seeds for its random numbers, and with all calls in one order, as '
                             'in one thread; to train from the beginning, remove the folder, or pass resume=False'
                             % (path, 'another function' if of != number else 'its function with other arguments'))
        if error:
            return _error(*error)
        values = [column[done._counts[number]] for column in self._columns[number]]
        form = self._forms[number]
        return dict(zip(form, values)) if isinstance(form, list) else values if form != ONE else values[0]

    def is_replayed(self, done: RecordedCalls) -> bool:
        return len(done._order) == len(self._order)

    def to_arrays(self) -> dict[str, np.ndarray]:
        calls, keys = np.array(self._order, 'int64').reshape(-1, 2).T
        arrays = {'calls': calls, 'keys': keys, 'forms': np.array(json.dumps(self._forms)),
                  'errors': np.array(json.dumps(self._errors))}
        for number, columns in enumerate(self._columns):
            for i, column in enumerate(columns):
                arrays['flat/%d/%d' % (number, i)], arrays['shapes/%d/%d' % (number, i)] = column.to_arrays()
        return arrays

    def of_file(self, path: str, arrays: Mapping[str, np.ndarray]) -> RecordedCalls:
        with parsing('the record of calls'):
            forms = json.loads(str(arrays['forms']))
            calls = RecordedCalls(len(forms))
            calls._errors, calls._forms = json.loads(str(arrays['errors'])), forms
            order, (first, *keys) = arrays['calls'].tolist(), keys_of(arrays).tolist()
            unknown = [UNKNOWN] * (len(order) - 1 - len(keys))
            calls._order = list(zip(order, [first, *unknown, *keys]))
            calls._columns = [[Column(arrays['flat/%d/%d' % (number, i)], arrays['shapes/%d/%d' % (number, i)])
                               for i in range(_length(form))] for number, form in enumerate(forms)]
        if len(forms) != len(self._forms):
            raise ValueError('%s has the calls of %d functions, but there are %d: pass the same functions in the same '
                             'order' % (path, len(forms), len(self._forms)))
        return calls


ONE = 'one'
UNKNOWN = -1  # the key of a call that an earlier version has recorded
# A file cannot name anything else, which might run code.
ERRORS: Any = {name: each for name, each in {**vars(builtins), **vars(errors)}.items()
               if isinstance(each, type) and issubclass(each, Exception)}


def _description(error):
    """Return the name of the next class of an error that is Python's or the package's, and the text.

    After these are the descriptions of the errors of a group.
    """
    known, (name, text) = next(each for each in type(error).__mro__ if each in ERRORS.values()), description(error)
    parts = error.exceptions if isinstance(error, ERRORS.get('ExceptionGroup', ())) else ()
    return [known.__name__, text if name == known.__name__ else '%s: %s' % (name, text), *map(_description, parts)]


def _error(name, text, *parts):
    """Return an error by its description; its class is not called, as each takes other arguments."""
    cls, text = (ERRORS[name], text) if name in ERRORS else (RuntimeError, '%s: %s' % (name, text))
    shown = type(cls.__name__, (cls,), {'__str__': lambda error: text, '__module__': cls.__module__})
    return cls.__new__(shown, text, *[[_error(*part) for part in parts]] * bool(parts))


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

    def add(self, array: np.ndarray) -> None:
        """Add a value, whose memory nobody else has."""
        self._parts.append(array.ravel())
        self._shapes.append(array.shape)

    def __getitem__(self, i: int) -> np.ndarray:
        shape = self._shapes[i]
        end = self._ends[i]
        return self._parts[0][end - int(np.prod(shape)):end].reshape(shape).copy()

    def to_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements of all values, and the shape of each."""
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0], np.array(self._shapes, 'int64')
