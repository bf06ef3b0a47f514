"""The program of this process, where it is `theano-mgpu`, or ``python -m theano_mgpu``.

That one imports no modules of the current folder, which Python puts first on sys.path.
"""
import os
import sys  # and no others: a module that is imported here may be a file of the current folder


def is_command_line() -> bool:
    """Return whether this program is ``theano-mgpu``, which runs even where Theano cannot be imported."""
    # Python 3.8 and 3.9 do not show which module `-m` will run.
    return own_command() is not None or sys.argv[0] == '-m' and not hasattr(sys, 'orig_argv')


def own_command() -> 'str | None':
    """Return the command, such as 'launch', of ``theano-mgpu`` or ``python -m theano_mgpu``.

    Returns
    -------
    str or None
        None in other programs, and where Python 3.8 and 3.9 do not show which module `-m` will run.
    """
    is_ours = _is_run_by_module() or os.path.basename(sys.argv[0]) == 'theano-mgpu'
    return ' '.join(sys.argv[1:2]) if is_ours else None


def called() -> str:
    """Return how the user can call ``theano-mgpu``: by its path, where PATH does not have its folder."""
    from shutil import which
    is_found = os.path.basename(sys.argv[0]) != 'theano-mgpu' or which('theano-mgpu') == os.path.abspath(sys.argv[0])
    return 'theano-mgpu' if is_found else sys.argv[0]


def _is_run_by_module():
    words = getattr(sys, 'orig_argv', [])
    return sys.argv[:1] == ['-m'] and ('-m', 'theano_mgpu') in zip(words, words[1:])


def leave_out_current_folder() -> None:
    """Replace the current folder on sys.path, in ``python -m theano_mgpu`` only; ``run -m`` puts it back."""
    if _is_run_by_module() and not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = __file__  # no folder: nothing is found there


leave_out_current_folder()
