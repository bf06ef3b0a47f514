"""Errors of one rank that all ranks raise: with the same class and text, or the nearest class that can be sent."""
from __future__ import annotations

import contextlib
import pickle
from typing import Iterator, NoReturn

from ..errors import MgpuError, RankError, noted
from .communicator import Communicator


def common_error(ranks: Communicator, error: BaseException, of_step: bool = False) -> BaseException:
    """Announce an error of this rank, which the others raise at their next handshake; return the one to raise.

    It is the error of the first rank that has failed, of the same class and text on each rank. An error that all ranks
    know already, and an interruption such as Ctrl-C, is returned as it is. `of_step` says that all ranks compute the
    step, so that they can compute the batch otherwise.
    """
    if isinstance(error, RankError) or getattr(error, 'known_to_all', False):
        return error
    if not isinstance(error, (Exception, SystemExit)):  # Ctrl-C: the progress of the others is unknown
        ranks.lost = 'a step was interrupted: %s' % type(error).__name__
        return error
    try:
        return ranks.announce_failure(error, of_step)
    except MgpuError:  # others do not come, or a thread has a handshake: this rank's error is the one to report
        return error


def raise_common(ranks: Communicator, error: BaseException) -> NoReturn:
    """Raise the `common_error` of all ranks; `error` is the exception that is being handled."""
    raise_error(common_error(ranks, error), error)


def raise_error(common: BaseException, error: BaseException) -> NoReturn:
    """Raise the common error of all ranks in place of the exception that is being handled."""
    if common is error:
        raise
    raise common from error


@contextlib.contextmanager
def failing_together(ranks: Communicator) -> Iterator[None]:
    """Raise the error of a ``with`` block on every rank, see `common_error`; all ranks enter the block.

    Ctrl-C ends this rank alone: between two steps, it leaves the ranks where they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_common(ranks, error)


def known_to_all(error: BaseException, of_step: bool = False) -> BaseException:
    """Return an error, marked as one that every rank raises; `of_step` as for `common_error`."""
    vars(error).update(known_to_all=True, of_step=of_step)
    return error


def packed(error: BaseException) -> tuple[str, str, list[bytes]]:
    """Return the name and text of an exception, and pickles: of it, then of its base classes with its text.

    `unpacked` takes the first readable one.
    """
    cls = type(error)
    state = {name: value for name, value in vars(error).items()
             if name == '__notes__' or not name.startswith('__')}  # the others are Theano's, and refer to the graph
    ways = [lambda: (_called, *error.__reduce__()[:2], state), lambda: (_filled, cls, error.args, state)]
    pickles = [pickled for pickled in map(_pickled, ways) if description(_read(pickled)) == description(error)][:1]
    bases = [base for base in cls.__mro__[1:] if issubclass(base, Exception) and not base.__name__[0] == '_']
    pickles += [_pickled(lambda base=base: (_called, base, (str(error),), {})) for base in bases]
    pickles.append(pickle.dumps((_called, Exception, (cls.__name__,), {})))  # the text may be the part that fails
    return (*description(error), [pickled for pickled in pickles if _read(pickled) is not None])


def description(error: BaseException) -> tuple[str, str]:
    """Return the name of an exception's class, and its text."""
    try:
        return type(error).__name__, str(error)
    except Exception:  # a class of the user's may raise anything here
        return type(error).__name__, ''


def unpacked(package: tuple[str, str, list[bytes]], origin: str) -> BaseException:
    """Return the exception that `packed` has packed on another rank, with a note about its origin."""
    name, _, pickles = package
    error = next(error for error in map(_read, pickles) if error is not None)
    if type(error).__name__ != name:
        origin += '. It raised %s, of which this process could not make a copy' % name
    error.elsewhere = True
    return noted(error, origin)


def _pickled(way):
    """Return the pickle of a way to make an exception; an empty one if there is none."""
    try:
        return pickle.dumps(way())
    except Exception:  # a class of the user's may raise anything here; its base classes stand in for it
        return b''


def _called(cls, arguments):
    return cls(*arguments)


def _filled(cls, arguments):
    error = cls.__new__(cls)
    error.args = arguments
    return error


def _read(pickled):
    """Return the exception of a pickle; None if it cannot be made."""
    try:
        make, cls, arguments, state = pickle.loads(pickled)
        error = make(cls, arguments)
        vars(error).update(state)
        return error
    except Exception:  # this process does not have the class, or it takes other arguments
        return None
