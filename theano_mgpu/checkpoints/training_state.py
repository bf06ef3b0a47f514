"""Save and load a training state as .npz, without pickle."""
import json
import os
import re
import zipfile

import numpy as np

from ..errors import warn
from ..replicas.copies import host_value
from ..replicas.replicated import ReplicatedStream
from ..utils.files import whole_file

FORMAT = 'theano_mgpu training state 1'
PREVIOUS = '.previous'

_damaged = set()     # damaged files; they must not replace the intact ones before them
_not_finite = set()  # files whose non-finite values the user has been warned about


def save(path, variables, contexts, ranks, extra=None, allow_nan=False):
    """Write variables to an .npz file. Every rank has to call it; rank 0 writes.

    An interrupted write leaves the old file intact. The old content stays as ``path + '.previous'``.

    Parameters
    ----------
    path : str
    variables : list of Replicated
    contexts : list of Context
        The contexts of this process; their random streams are saved.
    ranks : Ranks
    extra : dict of str to ndarray, optional
        Further arrays for the file.
    allow_nan : bool
        Also write values that are infinite or not a number. Otherwise a warning names them, and the file is not
        written.

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
    """As numpy.savez, but without pickle, and the file is closed properly if the disk is full."""
    with zipfile.ZipFile(file, 'w') as parts:
        for name, array in arrays.items():
            with parts.open(name + '.npy', 'w', force_zip64=True) as part:
                np.lib.format.write_array(part, array, allow_pickle=False)


def _all_finite(path, names, values):
    """Whether all values are finite; if not, warn the user, once until they are finite again."""
    found = [name for name, value in zip(names, values) if value.dtype.kind in 'fc' and not np.isfinite(value).all()]
    if found and path not in _not_finite:
        warn('%s: not a number, or infinite. %s is not written, and stays as it is. Look for the cause '
             '(check_finite=True finds the first such step), or pass allow_nan=True' % (', '.join(found), path))
    (_not_finite.add if found else _not_finite.discard)(path)
    return not found


def _streams(variables, contexts):
    """States of the random streams among variables: position to a list with one state for each context."""
    found = {}
    for i, variable in enumerate(variables):
        if isinstance(variable, ReplicatedStream):
            variable.refresh(contexts)
            found[i] = [to_array(host_value(variable.copies[context])) for context in contexts]
    return found


def load(path, variables, contexts, ranks):
    """Read variables from a file that `save` wrote. Every rank has to call it; rank 0 reads.

    Contexts that the file has no random streams for derive theirs from the master's.

    Parameters
    ----------
    path, variables, contexts, ranks
        As for `save`; the contexts may differ.

    Returns
    -------
    dict of str to ndarray
        The file's `extra`.

    Raises
    ------
    ValueError
        If the file is not a training state, has other variables, or is damaged and so is the one before it. Nothing is
        changed then.
    """
    saved = Saved(path, ranks, len(contexts))
    saved.give(variables, contexts)
    return saved.extra


class Saved:
    """A file that `save` wrote, on every rank as rank 0 reads it; every rank has to make one.

    Parameters
    ----------
    path : str
        If the file is damaged, the state before it is read instead, with a warning.
    ranks : Ranks
    n_contexts : int
        Number of contexts of this process.

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
        """Set the values of variables; if the file has other variables, raise a ValueError and change nothing."""
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
        """Raise a ValueError if the file has other variables."""
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
    """The arrays of a file or, if it is damaged, of the one before it."""
    path = os.fspath(path)
    damage = _damage(path)
    if damage:
        previous = path + PREVIOUS
        if not os.path.exists(previous) or _damage(previous):
            raise ValueError('%s is damaged, or no training state of theano_mgpu (%s), and there is no intact %s. Name '
                             'another file, or remove it to begin anew' % (path, damage, previous))
        warn('%s is damaged (%s): the state before it is taken, from %s' % (path, damage, previous))
        _damaged.add(os.path.abspath(path))
        path = previous
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    if str(arrays.get('format')) != FORMAT:
        raise ValueError('%s is no training state of theano_mgpu; name a file that step.save wrote' % path)
    return arrays


def _damage(path):
    """What is wrong with a file, as text; None if the checksum of each of its parts is right."""
    with open(path, 'rb') as f:
        try:
            with zipfile.ZipFile(f) as parts:
                broken = parts.testzip()
        except Exception as error:  # zipfile raises errors of many classes for damaged files
            return '%s: %s' % (type(error).__name__, error)
    return broken and 'the checksum of its part %s is wrong' % broken


def _unnumbered(names):
    """Names without numbers: Keras counts them up from model to model (dense_1, dense_2)."""
    return [re.sub(r'\d+', '#', name) for name in names]


def _name(replicated):
    return str(replicated.variable.name or 'unnamed')


def to_array(value):
    """A value as an array without objects; a numpy.random.RandomState as JSON text of its state."""
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
