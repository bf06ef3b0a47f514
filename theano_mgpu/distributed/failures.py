"""An error of one rank as the other ranks raise it: the same class and text, or its nearest class that can be sent."""
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
    stand_ins.append(pickle.dumps((_called, Exception, (type(error).__name__,), {})))  # its text may be what fails
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
    """Return a pickle of an exception, or of what makes it without its `__init__`, which may not take its `args`."""
    kept = {name: value for name, value in vars(error).items()
            if name == '__notes__' or not name.startswith('__')}  # the others are Theano's, and refer to the graph
    for make in (_called, _filled):
        try:
            how = error.__reduce__()[:2] if make is _called else (type(error), error.args)
            pickled = pickle.dumps((make, *how, kept))
            if description(_read(pickled)) == description(error):
                return pickled
        except Exception:  # a class of the user's may raise anything here; its base classes stand in for it
            continue
    return None


def _called(cls, arguments):
    return cls(*arguments)


def _filled(cls, arguments):
    error = cls.__new__(cls)
    error.args = arguments
    return error


def _of_class(base, error):
    try:
        pickled = pickle.dumps((_called, base, (str(error),), {}))
        return pickled if _read(pickled) is not None else None
    except Exception:  # as above
        return None


def _read(pickled):
    try:
        make, cls, arguments, kept = pickle.loads(pickled)
        error = make(cls, arguments)
        vars(error).update(kept)
        return error
    except Exception:  # this process does not have the class, or it takes other arguments
        return None
