"""Errors of one rank that all ranks raise: with the same class and text, or the nearest class that can be sent."""
import contextlib
import pickle
from typing import Iterator, List, NoReturn, Tuple

from ..errors import MgpuError, RankError, noted
from .communicator import Communicator


def common_error(ranks: Communicator, error: BaseException, of_step: bool = False) -> BaseException:
    """Have every rank raise one error, since this rank has met one: the others raise it at their next handshake.

    Parameters
    ----------
    ranks : Communicator
    error : BaseException
    of_step : bool
        Whether the error is one of a step that all ranks compute, so that they can compute the batch otherwise.

    Returns
    -------
    BaseException
        The exception to raise: that of the first rank that has failed, of the same class and text on each rank. An
        error that all ranks know already, and an interruption such as Ctrl-C, is returned as it is.
    """
    if isinstance(error, RankError) or getattr(error, 'known_to_all', False):
        return error
    if not isinstance(error, (Exception, SystemExit)):  # Ctrl-C: the progress of the others is unknown
        ranks.lose('a step was interrupted: %s' % type(error).__name__)
        return error
    try:
        return ranks.announce_failure(error, of_step)
    except MgpuError:  # others do not come, or a thread has a handshake: this rank's error is the one to report
        return error


def raise_common(ranks: Communicator, error: BaseException, of_step: bool = False) -> NoReturn:
    """Raise the `common_error` of all ranks; `error` is the exception that is being handled."""
    common = common_error(ranks, error, of_step)
    if common is error:
        raise
    raise common from error


@contextlib.contextmanager
def failing_together(ranks: Communicator) -> Iterator[None]:
    """Have every rank raise the error of a ``with`` block, see `common_error`; all ranks enter the block.

    Ctrl-C is one of this rank alone: between two steps, it leaves the ranks where they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_common(ranks, error)


def known_to_all(error: BaseException, of_step: bool = False) -> BaseException:
    """Return an error, marked as one that every rank raises; `of_step` as for `common_error`."""
    error.known_to_all, error.of_step = True, of_step
    return error


def packed(error: BaseException) -> Tuple[str, str, List[bytes]]:
    """Return an exception as bytes: pickles of it, then of its base classes with its text, the nearest class first.

    Parameters
    ----------
    error : Exception or SystemExit

    Returns
    -------
    tuple of (str, str, list of bytes)
        Its name and text, see `description`, and pickles. `unpacked` takes the first readable one.
    """
    bases = [base for base in type(error).__mro__[1:] if issubclass(base, Exception) and not base.__name__[0] == '_']
    stand_ins = [_of_itself(error)] + [_of_class(base, error) for base in bases]
    stand_ins.append(pickle.dumps((_called, Exception, (type(error).__name__,), {})))  # its text may be what fails
    return description(error) + ([each for each in stand_ins if each is not None],)


def description(error: BaseException) -> Tuple[str, str]:
    """Return the name of an exception's class, and its text."""
    try:
        return type(error).__name__, str(error)
    except Exception:  # a class of the user's may raise anything here
        return type(error).__name__, ''


def unpacked(package: Tuple[str, str, List[bytes]], origin: str) -> BaseException:
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
