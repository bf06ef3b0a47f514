"""The saving and loading of a training state as .npz, without pickle."""
from __future__ import annotations

import json
import os
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ...checks.ledger_file import unnumbered
from ...comm.communicator import Communicator
from ...comm.rank_0 import on_rank_0
from ...errors import warn
from ...utils.files import whole_file
from ..replicas.replicated import Replicated, host_value
from . import state_file
from .state_file import Damaged, parsing, under

PREVIOUS = '.previous'

_damaged: set[str] = set()     # damaged files; they must not replace the intact ones before them
_foreign: set[str] = set()     # files of others, which are not written: the user has been told
_not_finite: set[str] = set()  # files whose non-finite values the user has been warned about


def save(path: str, variables: Sequence[Replicated], ranks: Communicator,
         extra: Mapping[str, np.ndarray] | None = None, allow_nan: bool = False,
         settings: Mapping[str, str] | None = None) -> None:
    """Write variables, further arrays, and the settings that they depend on, to an .npz file.

    Every rank has to make the call; rank 0 writes, and an OSError is one of all. An interrupted write leaves the old
    file intact; the old content stays as ``path + '.previous'``. Values that are infinite or not a number are written
    with `allow_nan` alone. Otherwise a warning names them, and the file is not written.
    """
    on_rank_0(ranks, lambda: _write(path, variables, extra or {}, allow_nan, settings or {}))


def _write(path, variables, extra, allow_nan, settings):
    path = os.path.realpath(path)  # a link stays: its target is written
    names, values = list(map(_name, variables)), [to_array(variable.value()) for variable in variables]
    if not allow_nan and not _all_finite(path, names, values):
        return
    arrays = {'extra/' + name: array for name, array in extra.items()}
    arrays.update(names=np.array(names), settings=np.array(json.dumps(settings)))
    arrays.update(('value/%d' % i, value) for i, value in enumerate(values))
    previous = None if path in _damaged else path + PREVIOUS
    if previous and os.path.lexists(previous) and not state_file.is_own(previous):
        if previous not in _foreign:
            warn('%s was not written by theano_mgpu: it stays as it is, and no checkpoint before the last one is kept. '
                 'Move it to keep one' % previous)
        _foreign.add(previous)
        previous = None
    with whole_file(path, previous) as unfinished, open(unfinished, 'w+b') as f:
        state_file.write(f, arrays)
    _damaged.discard(path)


def _all_finite(path, names, values):
    """Return whether all values are finite; if not, warn the user, once until they are finite again."""
    infinite = [name for name, value in zip(names, values) if value.dtype.kind in 'fc' and not np.isfinite(value).all()]
    if infinite and path not in _not_finite:
        warn('%s: not a number, or infinite. %s is not written, and stays as it is. Look for the cause '
             '(check_finite=True finds the first such step), or pass allow_nan=True' % (', '.join(infinite), path))
    (_not_finite.add if infinite else _not_finite.discard)(path)
    return not infinite


def read(path: str, ranks: Communicator, check: Callable[[Saved], Any]) -> Saved:
    """Return the content of a file as rank 0 reads it; every rank has to make the call.

    If the file is damaged, the state before it is read instead, with a warning; if this is damaged, too, it is a
    ValueError. ``check(saved)`` raises a ValueError on rank 0 if a file cannot be used.
    """
    return Saved(*on_rank_0(ranks, lambda: _usable(path, check)))


def _usable(path, check):
    """Return the path and the arrays of a file or, if it is damaged, of the one before it."""
    path = os.path.realpath(path) if os.path.islink(path) else os.fspath(path)
    previous = path + PREVIOUS
    try:
        return path, _checked(path, check)
    except Damaged as error:
        try:
            arrays = _checked(previous, check)
        except (ValueError, OSError):  # it cannot be used either, or is missing
            raise ValueError('%s is damaged, or no training state of theano_mgpu (%s), and there is no intact %s. Name '
                             'another file, or remove it to begin anew' % (path, error, previous)) from error
        warn('%s is damaged (%s): the state before it is taken, from %s' % (path, error, previous))
    _damaged.add(os.path.realpath(path))
    return previous, arrays


def _checked(path, check):
    arrays = state_file.read(path)
    check(Saved(path, arrays))
    return arrays


class Saved:
    """The content of a file that `save` wrote; its `settings` are empty in files of earlier versions."""

    def __init__(self, path: str, arrays: dict[str, np.ndarray]) -> None:
        self.path = path
        self._arrays = arrays
        self.extra = under('extra/', arrays)
        with parsing('the record of settings'):
            self.settings: dict[str, str] = dict(json.loads(str(arrays.get('settings', '{}'))))

    def give(self, variables: Sequence[Replicated]) -> None:
        """Set the values of variables, all or none; if the file has other variables, raise a ValueError."""
        self.check(variables)
        new = [self._value(i) for i in range(len(variables))]
        old = []
        try:
            for variable, value in zip(variables, new):
                old.append(variable.value())
                _set(variable, value)
        except BaseException:  # an interrupt, too
            for variable, value in zip(variables, old):
                _set(variable, value)
            raise

    def check(self, variables: Sequence[Replicated]) -> None:
        saved, wanted = list(self._arrays['names']), list(map(_name, variables))
        if unnumbered(saved) != unnumbered(wanted):
            raise ValueError('%s holds the variables %s, but this function has %s: load it into a function of the '
                             'same model and updates' % (self.path, ', '.join(saved), ', '.join(wanted)))
        for i, variable in enumerate(variables):
            ours, theirs = host_value(variable.variable), self._value(i)
            if _kind(ours) not in (None, _kind(theirs)):
                raise ValueError('%s holds %s with %s, but this function has %s'
                                 % (self.path, wanted[i], _kind(theirs), _kind(ours)))

    def _value(self, i):
        # Earlier versions could also save the state of a random stream on each context, as stream/0/1.
        return from_array(self._arrays['value/%d' % i])


def _set(variable, value):
    variable.variable.container.unwatched = value
    variable.after_write()


def _kind(value):
    """Return in words the properties that two values of one variable share; None for values that are not saved."""
    if isinstance(value, np.ndarray):
        return 'shape %s and dtype %s' % (value.shape, value.dtype)
    return 'the state of a random stream' if isinstance(value, np.random.RandomState) else None


def _name(replicated):
    return str(replicated.variable.name or 'unnamed')


def to_array(value: Any) -> np.ndarray:
    """Return a value as an array without objects; a numpy.random.RandomState as JSON text of its state."""
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        state['state']['key'] = state['state']['key'].tolist()
        return np.array(json.dumps(state, default=int))
    return np.asarray(value)


def from_array(array: np.ndarray) -> Any:
    """Return the value from which `to_array` made an array; raise a Damaged for any other array."""
    if array.dtype.kind != 'U':
        return array
    random_state = np.random.RandomState()
    with parsing('the state of a random stream'):
        state = json.loads(str(array))
        state['state']['key'] = np.array(state['state']['key'], 'uint32')
        random_state.set_state(state)
    return random_state
