"""Save and load a training state as .npz, without pickle."""
import json
import os
import re
import zipfile

import numpy as np

from ..errors import warn
from ..replicas.replicated import ReplicatedStream, host_value
from ..utils.files import whole_file

FORMAT = 'theano_mgpu training state 1'
PREVIOUS = '.previous'

_damaged = set()     # files that are not to replace the whole ones before them
_not_finite = set()  # files of which the user knows that they are not written


def save(path, variables, contexts, ranks, extra=None, allow_nan=False):
    """Write variables to an .npz file, whole or not at all. Every rank has to call it; rank 0 writes.

    What the file held before stays as ``path + '.previous'``.

    Parameters
    ----------
    path : str
    variables : list of Replicated
    contexts : list of Context
        Of this process, whose random streams are saved.
    ranks : Ranks
    extra : dict of str to ndarray, optional
        What else is to be in the file.
    allow_nan : bool
        Write values that are infinite or not a number, too. Otherwise a warning names them, and the file stays as
        it is.

    Raises
    ------
    OSError
        If the file cannot be written, on every rank.
    """
    streams = ranks.gather_object(_streams(variables, contexts))
    ranks.by_first(lambda: _write(path, variables, streams, extra or {}, allow_nan))


def _write(path, variables, streams, extra, allow_nan):
    path = os.path.abspath(path)
    names, values = [_name(variable) for variable in variables], [to_array(v.value()) for v in variables]
    if not allow_nan and not _all_finite(path, names, values):
        return
    arrays = {'extra/' + name: array for name, array in extra.items()}
    arrays.update(format=np.array(FORMAT), names=np.array(names))
    arrays.update(('value/%d' % i, value) for i, value in enumerate(values))
    for i in streams[0]:
        states = [state for of_rank in streams for state in of_rank[i]]
        arrays.update(('stream/%d/%d' % (i, replica), state) for replica, state in enumerate(states))
    previous = None if path in _damaged else path + PREVIOUS
    with whole_file(path, previous) as unfinished, open(unfinished, 'wb') as f:
        _save_arrays(f, arrays)
    _damaged.discard(path)


def _save_arrays(file, arrays):
    """As numpy.savez, but without pickle, and closed in order where the disk is full."""
    with zipfile.ZipFile(file, 'w') as parts:
        for name, array in arrays.items():
            with parts.open(name + '.npy', 'w', force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def _all_finite(path, names, values):
    """Whether all values are finite; else the user is warned, once until they are again."""
    found = [name for name, value in zip(names, values) if value.dtype.kind in 'fc' and not np.isfinite(value).all()]
    if found and path not in _not_finite:
        warn('%s: not a number, or infinite. %s is not written, and stays as it is. Look for what makes them so '
             '(check_finite=True finds the first step that would), or give allow_nan=True' % (', '.join(found), path))
    (_not_finite.add if found else _not_finite.discard)(path)
    return not found


def _streams(variables, contexts):
    """States of the random streams among variables: position to a list, one a context."""
    found = {}
    for i, variable in enumerate(variables):
        if isinstance(variable, ReplicatedStream):
            variable.refresh(contexts)
            found[i] = [to_array(host_value(variable.copies[context])) for context in contexts]
    return found


def load(path, variables, contexts, ranks):
    """Read variables back from what `save` wrote. Every rank has to call it; rank 0 reads.

    Random streams of contexts that the file does not know go on from the master's, at their own place.

    Parameters
    ----------
    path, variables, contexts, ranks
        As for `save`; the contexts may be others.

    Returns
    -------
    dict of str to ndarray
        The file's `extra`.

    Raises
    ------
    ValueError
        If the file is no training state, not of these variables, or damaged, and so is the one before it; nothing is
        changed then.
    """
    saved = Saved(path, ranks, len(contexts))
    saved.give(variables, contexts)
    return saved.extra


class Saved:
    """What `save` wrote, on every rank as rank 0 reads it; every rank has to make it.

    Parameters
    ----------
    path : str
        Where it is damaged, the state before it is read instead, with a warning.
    ranks : Ranks
    n_contexts : int
        Of this process.

    Attributes
    ----------
    extra : dict of str to ndarray
    """

    def __init__(self, path, ranks, n_contexts):
        self.path = path
        self._arrays = ranks.by_first(lambda: _read(path))
        self._first = sum(ranks.everyones(n_contexts)[:ranks.rank])
        self.extra = {key[len('extra/'):]: value for key, value in self._arrays.items() if key.startswith('extra/')}

    def give(self, variables, contexts):
        """Give variables their values; nothing is changed if they are not those of the file: a ValueError."""
        self.check(variables)
        for i, variable in enumerate(variables):
            variable.variable.container.value = from_array(self._arrays['value/%d' % i])
            variable.after_write()
            if isinstance(variable, ReplicatedStream):
                variable.refresh(contexts)
                for replica, context in enumerate(contexts):
                    state = self._arrays.get('stream/%d/%d' % (i, self._first + replica))
                    if state is not None:
                        variable.copies[context].container.value = from_array(state)

    def check(self, variables):
        """Raise a ValueError where the file is not of these variables."""
        saved, wanted = list(self._arrays['names']), [_name(variable) for variable in variables]
        if _unnumbered(saved) != _unnumbered(wanted):
            raise ValueError('%s holds the variables %s, but this function has %s: load it into a function of the '
                             'same model and updates' % (self.path, ', '.join(saved), ', '.join(wanted)))
        for i, variable in enumerate(variables):
            value, other = host_value(variable.variable), self._arrays['value/%d' % i]
            if isinstance(value, np.ndarray) and (value.shape, value.dtype) != (other.shape, other.dtype):
                raise ValueError('%s holds %s with shape %s and dtype %s, but this function has shape %s and dtype %s'
                                 % (self.path, wanted[i], other.shape, other.dtype, value.shape, value.dtype))


def _read(path):
    """The arrays of a file; where it is damaged, of the one before it."""
    path = os.fspath(path)
    damage = _damage(path)
    if damage:
        previous = path + PREVIOUS
        if not os.path.exists(previous) or _damage(previous):
            raise ValueError('%s is damaged, or no training state of theano_mgpu (%s), and there is no whole %s. Give '
                             'another file, or remove it to begin anew' % (path, damage, previous))
        warn('%s is damaged (%s): the state before it is taken, from %s' % (path, damage, previous))
        _damaged.add(os.path.abspath(path))
        path = previous
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    if str(arrays.get('format')) != FORMAT:
        raise ValueError('%s is no training state of theano_mgpu; give a file that step.save wrote' % path)
    return arrays


def _damage(path):
    """What is wrong with a file, in words; None where each part of it has its checksum."""
    with open(path, 'rb') as f:
        try:
            with zipfile.ZipFile(f) as parts:
                broken = parts.testzip()
        except Exception as error:  # there is hardly one that zipfile does not raise for some file
            return '%s: %s' % (type(error).__name__, error)
    return broken and 'the checksum of its part %s is wrong' % broken


def _unnumbered(names):
    """Names without numbers, which Keras counts up from model to model: dense_1, dense_2."""
    return [re.sub(r'\d+', '#', name) for name in names]


def _name(replicated):
    return str(replicated.variable.name or 'unnamed')


def to_array(value):
    """An array without objects; the state of a numpy.random.RandomState as JSON text."""
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        state['state']['key'] = state['state']['key'].tolist()
        return np.array(json.dumps(state, default=int))
    return np.asarray(value)


def from_array(array):
    if array.dtype.kind != 'U':
        return array
    random_state = np.random.RandomState()
    state = json.loads(str(array))
    state['state']['key'] = np.array(state['state']['key'], 'uint32')
    random_state.set_state(state)
    return random_state
