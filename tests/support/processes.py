"""Programs in processes of their own."""
import os
import subprocess
import sys

from .search_path import search_path


def python(*words, flags=None, expected=0, folder=None, input=None, **variables):
    """Run Python with words, flags of Theano, and further variables; return the CompletedProcess, with text.

    A variable that is None is left out. The exit code has to be the expected one, or for None is any.
    """
    environment = {**os.environ, 'PYTHONPATH': search_path(), **({} if flags is None else {'THEANO_FLAGS': flags}),
                   **variables}
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=600, input=input,
                          cwd=folder, env={name: value for name, value in environment.items() if value is not None})
    assert done.returncode == expected or expected is None, '%s\n%s%s' % (done.returncode, done.stdout, done.stderr)
    return done
