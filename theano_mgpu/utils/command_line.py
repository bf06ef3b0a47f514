"""The program of this process, where it is `theano-mgpu`."""
from __future__ import annotations

import os
import sys


def is_command_line() -> bool:
    """Return whether this program is ``theano-mgpu``, which runs even where Theano cannot be imported."""
    # Python 3.8 and 3.9 do not show which module `-m` will run.
    return own_command() is not None or sys.argv[0] == '-m' and not hasattr(sys, 'orig_argv')


def own_command() -> str | None:
    """Return the command, such as 'launch', of ``theano-mgpu`` or ``python -m theano_mgpu``.

    Returns
    -------
    str or None
        None in other programs, and where Python 3.8 and 3.9 do not show which module `-m` will run.
    """
    words = getattr(sys, 'orig_argv', [])
    by_module = sys.argv[0] == '-m' and ('-m', 'theano_mgpu') in zip(words, words[1:])
    return ' '.join(sys.argv[1:2]) if by_module or os.path.basename(sys.argv[0]) == 'theano-mgpu' else None
