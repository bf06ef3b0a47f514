"""A guard: ``python -m theano_mgpu`` imports no modules of the current folder, which Python puts first on sys.path."""
import sys  # nothing else: a module that is imported here may be a file of the current folder


def leave_out_current_folder() -> None:
    """Replace the current folder on sys.path, in ``python -m theano_mgpu`` only; ``run -m`` puts it back."""
    words = getattr(sys, 'orig_argv', [])
    if sys.argv[:1] == ['-m'] and ('-m', 'theano_mgpu') in zip(words, words[1:]) \
            and not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = __file__  # no folder: nothing is found there


leave_out_current_folder()
