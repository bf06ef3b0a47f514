"""Calls that have failed over the contexts: plain Theano, or plain Keras, computes them whole.

An error of plain Theano is the error that one device gives. Without one, the error over the contexts came of dividing.
"""
from __future__ import annotations

import signal
import traceback
from typing import Any, Callable

from ..comm.activities import AGREE
from ..comm.communicator import Communicator
from ..comm.rank_errors import failing_together
from ..errors import DriftError, NonFiniteError, RankError, noted

FAILED = 'it failed over the contexts: %s'  # why plain Theano or Keras has computed a call


def is_for_plain(error: Any) -> bool:
    """Return whether plain Theano can explain an error over the contexts.

    It comes from this call, not from another rank's work meanwhile, and is none of the ranks, of a check, or of a
    handler of a signal, such as a limit of time.
    """
    is_of_call = not getattr(error, 'known_to_all', False) or error.of_step
    return is_of_call and not _is_of_handler(error) and not isinstance(error, (RankError, DriftError, NonFiniteError))


def _is_of_handler(error):
    """Return whether the script's handler of a signal has raised an error."""
    handlers = [getattr(each, 'func', each) for each in map(signal.getsignal, signal.valid_signals())]
    codes = {getattr(getattr(each, '__func__', each), '__code__', None) for each in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def by_plain(compute: Callable[[], Any], failure: BaseException, ranks: Communicator) -> Any:
    """Compute a call that has failed over the contexts, and that has changed nothing: return what ``compute()`` does.

    The error of `compute` gets the notes of the failure, such as the name of the replica. If one rank has failed, all
    have.
    """
    with failing_together(ranks):
        try:
            results = compute()
        except Exception as error:
            for note in getattr(failure, '__notes__', ()):
                noted(error, note)
            raise
        ranks.handshake((AGREE,))
    return results
