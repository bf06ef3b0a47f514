"""Save and load a training state as .npz, without pickle."""
import json
import os
import re

import numpy as np

from .files import whole_file
from .replicate import ReplicatedStream, host_value

FORMAT = 'theano_mgpu training state 1'


def save(path, variables, contexts, ranks, extra=None):
    """Write variables to an .npz file, whole or not at all. Every rank has to call it; rank 0 writes.

    Parameters
    ----------
    path : str
    variables : list of Replicated
    contexts : list of Context
        Of this process, whose random streams are saved.
    ranks : Ranks
    extra : dict of str to ndarray, optional
        What else is to be in the file.
    """
    arrays = {'extra/' + name: array for name, array in (extra or {}).items()}
    arrays.update(format=np.array(FORMAT), names=np.array([_name(variable) for variable in variables]))
    streams = ranks.collect(_streams(variables, contexts))
    if ranks.rank:
        return
    for i, variable in enumerate(variables):
        arrays['value/%d' % i] = to_array(variable.value())
    for i in streams[0]:
        states = [state for of_rank in streams for state in of_rank[i]]
        arrays.update(('stream/%d/%d' % (i, replica), state) for replica, state in enumerate(states))
    with whole_file(path) as unfinished, open(unfinished, 'wb') as f:
        np.savez(f, **arrays)
        f.flush()
        os.fsync(f.fileno())


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
        If the file is no training state or not of these variables; nothing is changed then.
    """
    arrays = read(path, ranks)
    set_values(path, arrays, variables, contexts, ranks)
    return {key[len('extra/'):]: value for key, value in arrays.items() if key.startswith('extra/')}


def read(path, ranks):
    """The arrays of a file, on every rank as rank 0 finds them."""
    arrays = error = None
    if ranks.rank == 0:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
            if str(arrays.get('format')) != FORMAT:
                raise ValueError('%s is no training state of theano_mgpu; give a file that step.save wrote' % path)
        except (OSError, ValueError) as failure:
            error = failure
    arrays, error = ranks.tell((arrays, error))
    if error is not None:
        raise error
    return arrays


def set_values(path, arrays, variables, contexts, ranks):
    """Give variables the values that `read` found; nothing is changed if they are not the file's."""
    check(path, arrays, variables)
    n_contexts = ranks.everyones(len(contexts))
    first = sum(n_contexts[:ranks.rank])
    for i, variable in enumerate(variables):
        variable.variable.container.value = from_array(arrays['value/%d' % i])
        variable.after_write()
        if isinstance(variable, ReplicatedStream):
            variable.refresh(contexts)
            for replica, context in enumerate(contexts):
                saved = arrays.get('stream/%d/%d' % (i, first + replica))
                if saved is not None:
                    variable.copies[context].container.value = from_array(saved)


def check(path, arrays, variables):
    saved, wanted = list(arrays['names']), [_name(variable) for variable in variables]
    if _unnumbered(saved) != _unnumbered(wanted):
        raise ValueError('%s holds the variables %s, but this function has %s: load it into a function of the '
                         'same model and updates' % (path, ', '.join(saved), ', '.join(wanted)))
    for i, variable in enumerate(variables):
        value, saved_value = host_value(variable.variable), arrays['value/%d' % i]
        if isinstance(value, np.ndarray) and (value.shape, value.dtype) != (saved_value.shape, saved_value.dtype):
            raise ValueError('%s holds %s with shape %s and dtype %s, but this function has shape %s and dtype %s'
                             % (path, wanted[i], saved_value.shape, saved_value.dtype, value.shape, value.dtype))


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
