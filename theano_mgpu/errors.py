"""The errors of theano_mgpu: each names the mistake, the value given, the values that exist, and the next step.

`named` is for the texts: it returns the name by which the user finds a variable, an op or a function.
"""
from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from typing import Any, TypeVar

__all__ = ['BatchError', 'ContextError', 'DriftError', 'ExchangeError', 'GraphError', 'MgpuError', 'MgpuWarning',
           'NonFiniteError', 'PredictionError', 'RankError', 'ReplicaError']  # for users

AnyException = TypeVar('AnyException', bound=BaseException)
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

NOT_DIVISIBLE = 'this batch cannot be divided: '  # begins the message of a check that fails in a step
PREFIX = 'theano-mgpu: '  # of a line for the user on stderr, from a command or from a script


class MgpuError(Exception):
    """Base of every error that theano_mgpu raises on purpose.

    A command ends with exit code 2 where the user's input cannot be used, and with 1 where something failed that should
    have worked: the errors that are RuntimeErrors or ArithmeticErrors, or that such an error has caused.
    """


class MgpuWarning(UserWarning):
    """Something cannot be exactly as on one device; the message names it."""


def warn(text: str) -> None:
    """Issue an MgpuWarning at the line of the user's code that led here, not at one of this package or of Keras."""
    warnings.warn(text, MgpuWarning, stacklevel=1)  # see compat.warned_lines


def noted(error: AnyException, text: str) -> AnyException:
    """Return an exception with a note: after its text in a traceback or, before Python 3.11, at the end of its text.

    >>> str(noted(ValueError('bad'), 'of replica 1')).split()[0]
    'bad'
    """
    if hasattr(error, 'add_note'):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = ('%s\n%s' % (error.args[0], text),) + error.args[1:]
    return error


def in_one_line(error: BaseException) -> str:
    """Return the class of an exception, the first line of its text, and its notes, for a message.

    >>> in_one_line(ValueError('bad shape\\nand pages more'))
    'ValueError: bad shape'
    """
    notes = ''.join(' (%s)' % note for note in getattr(error, '__notes__', ()))
    return '%s: %s%s' % (type(error).__name__, str(error).partition('\n')[0], notes)


def named(thing: Any) -> str:
    """Return a variable, an op, a function or a list of such as text for a message, never with an address in memory.

    A variable or a function has its name; a variable without one, the line that made it.

    >>> named([named, 'x', object()])
    '[named, x, object]'
    """
    if isinstance(thing, (list, tuple)):
        return '[%s]' % ', '.join(map(named, thing))
    is_function = hasattr(thing, 'maker')  # of Theano, which names it after its line
    name = getattr(thing, 'name', None) if is_function or hasattr(thing, 'tag') else None
    if name:
        return name if is_function else name.lstrip('/')  # Keras begins the names of inputs with a slash
    line = user_line(thing)
    return 'the variable of "%s"' % line if line else \
        re.sub(r'<(?:function )?(?:[\w<>]+\.)*(\S+?)(?: object)? at 0x[0-9a-f]+>', r'\1', str(thing))


def user_line(variable: Any) -> str:
    """Return the line in which the user made a variable, as text; '' if it is not known."""
    file, line, _, text = user_frame(variable) or ('', 0, '', '')
    return file and '%s, line %s%s' % (file, line, ': %s' % text if text else '')


def user_frame(variable: Any) -> tuple[str, int, str, str | None] | None:
    """Return the frame of the user's code that made a variable; None where this package or a library made it."""
    return next((frame for frame in frames_of(variable) if not frame[0].startswith(PACKAGE)), None)


def frames_of(variable: Any) -> list[Any]:
    """Return the frames that made a variable: of each of its traces the innermost that is not in Theano or Keras."""
    libraries = folders('theano', 'keras')
    outside = [[frame for frame in trace if not frame[0].startswith(libraries)] for trace in traces_of(variable)]
    return [frames[-1] for frames in outside if frames]


def traces_of(variable: Any) -> list[Any]:
    """Return the traces of a variable, the last one first: an optimised variable may have several."""
    trace = getattr(getattr(variable, 'tag', None), 'trace', None) or []
    return [each for each in reversed(trace) if each] if all(isinstance(each, list) for each in trace) else [trace]


def folders(*packages: str) -> tuple[str, ...]:
    """Return the paths of the folders of imported packages, a tuple of str that end with a separator."""
    files = [getattr(sys.modules.get(package), '__file__', None) for package in packages]
    return tuple(os.path.join(os.path.dirname(file), '') for file in files if file)


class MissingError(MgpuError, RuntimeError):
    """Something that is needed is not installed, or does not work on this machine."""


class ContextError(MgpuError, ValueError):
    """A context is malformed, unknown, not mapped, or its device could not be opened."""


class GraphError(MgpuError, ValueError):
    """A Theano graph cannot be run over several contexts, or not with these options."""


class BatchError(MgpuError, ValueError):
    """The arguments of a call cannot be split into sub-batches."""


class LengthError(BatchError):
    """The arguments of a call do not have samples as the function takes them: in one number, along known axes."""


class NonFiniteError(MgpuError, ArithmeticError):
    """The loss or a gradient is infinite or not a number; no parameter was changed."""


class DriftError(MgpuError, RuntimeError):
    """Copies of a value that have to be the same differ: a device or a host has computed, or kept, other bits."""


class RankError(MgpuError, RuntimeError):
    """The processes of a job do not agree, or one of them did not come."""


class RankBatchError(RankError, BatchError):
    """The processes of a job were given batches that do not go together; each raises it."""


class PredictionError(MgpuError, RuntimeError):
    """A batch failed while others went on; the original exception is its ``__cause__``.

    Attributes
    ----------
    index : int
        The number of the batch, from 0.
    context : theano_mgpu.Context or None
        The context that it ran on; None if it never got to one.
    """

    def __init__(self, message: str, index: int = 0, context: Any = None, cause: str = ''):
        super().__init__(message)
        self.index, self.context = index, context
        self.__cause__ = RankError(cause) if cause else None

    def __reduce__(self):  # the cause may be of any class: another process gets its traceback
        text = ''.join(traceback.format_exception(type(self), self, self.__traceback__))
        return PredictionError, (str(self), self.index, self.context, text)


class ReplicaError(MgpuError, RuntimeError):
    """A device failed, or had too little memory; the original exception is its ``__cause__``.

    An error of the graph, such as a failed `Assert` or a wrong shape, is raised as Theano raises it.

    Attributes
    ----------
    replica : int
        Index of the replica that failed.
    context : theano_mgpu.Context
        The context that it runs on.
    samples : tuple of int or None
        First and one-past-last sample of the batch that it worked on; None in the update, which
        works on no samples.
    out_of_memory : bool
        Whether the device had too little memory.
    """

    def __init__(self, message: str, replica: int = 0, context: Any = None, samples: tuple[int, int] | None = None,
                 out_of_memory: bool = False):
        super().__init__(message)  # pickle passes the message alone
        self.replica, self.context, self.samples, self.out_of_memory = replica, context, samples, out_of_memory


class ExchangeError(MgpuError, RuntimeError):
    """The devices could not exchange values: NCCL gave an error, or a device or a process did not answer.

    Attributes
    ----------
    context : theano_mgpu.Context or None
        The context whose device was lost, if one was.
    """

    def __init__(self, message: str, context: Any = None):  # pickle passes the message alone
        super().__init__(message)
        self.context = context


def exit_code_of(error: BaseException) -> int:
    """Return 1 for the MgpuError of a failure, or 2 for an error of the user's input.

    >>> exit_code_of(MissingError('mpirun is not on PATH')), exit_code_of(MgpuError('there is no script x.py'))
    (1, 2)
    """
    return 1 if any(isinstance(each, (RuntimeError, ArithmeticError)) for each in (error, error.__cause__)) else 2
