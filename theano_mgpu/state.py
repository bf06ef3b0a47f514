"""Save and load a training state as .npz, without pickle."""
import json
import os

import numpy as np

from .replicate import ReplicatedStream, host_value

FORMAT = 'theano_mgpu training state 1'


def save(path, variables, contexts):
    """Write variables to an .npz file, whole or not at all.

    Parameters
    ----------
    path : str
    variables : list of Replicated
    contexts : list of Context
        Whose random streams are saved.
    """
    arrays = {'format': np.array(FORMAT), 'names': np.array([_name(variable) for variable in variables])}
    for i, variable in enumerate(variables):
        arrays['value/%d' % i] = _to_array(variable.value())
        if isinstance(variable, ReplicatedStream):
            variable.refresh(contexts)
            for replica, context in enumerate(contexts):
                arrays['stream/%d/%d' % (i, replica)] = _to_array(host_value(variable.copies[context]))
    unfinished = '%s.%d.unfinished' % (path, os.getpid())
    try:
        with open(unfinished, 'wb') as f:
            np.savez(f, **arrays)
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def load(path, variables, contexts):
    """Read variables back from what `save` wrote.

    Random streams of contexts that the file does not know go on from the master's, at their own place.

    Parameters
    ----------
    path, variables, contexts
        As for `save`; the contexts may be others.

    Raises
    ------
    ValueError
        If the file is no training state or not of these variables; nothing is changed then.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    if str(arrays.get('format')) != FORMAT:
        raise ValueError('%s is no training state of theano_mgpu; give a file that step.save wrote' % path)
    _check(path, arrays, variables)
    for i, variable in enumerate(variables):
        variable.variable.container.value = _from_array(arrays['value/%d' % i])
        variable.after_write()
        if isinstance(variable, ReplicatedStream):
            variable.refresh(contexts)
            for replica, context in enumerate(contexts):
                saved = arrays.get('stream/%d/%d' % (i, replica))
                if saved is not None:
                    variable.copies[context].container.value = _from_array(saved)


def _check(path, arrays, variables):
    saved, wanted = list(arrays['names']), [_name(variable) for variable in variables]
    if saved != wanted:
        raise ValueError('%s holds the variables %s, but this function has %s: load it into a function of the '
                         'same model and updates' % (path, ', '.join(saved), ', '.join(wanted)))
    for i, variable in enumerate(variables):
        value, saved_value = host_value(variable.variable), arrays['value/%d' % i]
        if isinstance(value, np.ndarray) and (value.shape, value.dtype) != (saved_value.shape, saved_value.dtype):
            raise ValueError('%s holds %s with shape %s and dtype %s, but this function has shape %s and dtype %s'
                             % (path, wanted[i], saved_value.shape, saved_value.dtype, value.shape, value.dtype))


def _name(replicated):
    return str(replicated.variable.name or 'unnamed')


def _to_array(value):
    """An array without objects; the state of a numpy.random.RandomState as JSON text."""
    if isinstance(value, np.random.RandomState):
        state = value.get_state(legacy=False)
        state['state']['key'] = state['state']['key'].tolist()
        return np.array(json.dumps(state, default=int))
    return np.asarray(value)


def _from_array(array):
    if array.dtype.kind != 'U':
        return array
    random_state = np.random.RandomState()
    state = json.loads(str(array))
    state['state']['key'] = np.array(state['state']['key'], 'uint32')
    random_state.set_state(state)
    return random_state
