"""An error of one rank as the other ranks raise it: the same class and text, or its nearest class that can be sent."""
import copy
import pickle

from ..errors import noted


def packed(error):
    """Return an exception as bytes: pickles of it, then of its base classes with its text, the nearest class first.

    Parameters
    ----------
    error : Exception or SystemExit

    Returns
    -------
    tuple of (str, str, list of bytes)
        Its name and text, see `description`, and what `unpacked` takes the first readable one of.
    """
    bases = [base for base in type(error).__mro__[1:] if issubclass(base, Exception) and not base.__name__[0] == '_']
    stand_ins = [_of_itself(error)] + [_of_class(base, error) for base in bases]
    stand_ins.append(pickle.dumps(Exception(type(error).__name__)))  # its text may be what fails
    return description(error) + ([each for each in stand_ins if each is not None],)


def description(error):
    """Return the name of an exception's class, and its text."""
    try:
        return type(error).__name__, str(error)
    except Exception:  # a class of the user's may raise anything here
        return type(error).__name__, ''


def unpacked(package, origin):
    """Return the exception that `packed` has packed on another rank.

    Parameters
    ----------
    package : tuple of (str, str, list of bytes)
    origin : str
        A sentence for the note that the exception is given: where it was raised.
    """
    name, _, pickles = package
    error = next(error for error in map(_read, pickles) if error is not None)
    if type(error).__name__ != name:
        origin += '. It raised %s, of which this process could not make a copy' % name
    error.elsewhere = True
    return noted(error, origin)


def _of_itself(error):
    try:
        made = copy.copy(error)
        for attribute in list(vars(made)):  # Theano's, which refer to the graph
            if attribute.startswith('__') and attribute != '__notes__':
                del vars(made)[attribute]
        return _readable(made)
    except Exception:  # a class of the user's may raise anything here; its base classes stand in for it
        return None


def _of_class(base, error):
    try:
        return _readable(base(str(error)))
    except Exception:  # as above
        return None


def _readable(error):
    """Return a pickle that makes an exception of the same class."""
    pickled = pickle.dumps(error)
    return pickled if type(pickle.loads(pickled)) is type(error) else None


def _read(pickled):
    try:
        return pickle.loads(pickled)
    except Exception:  # this process does not have the class
        return None
