"""Files of checkpoints: of an earlier version of the package, and with other content than they were written with."""
import os
import shutil

from theano_mgpu.runtime.state import replay, state_file

FOLDER = os.path.join(os.path.dirname(__file__), 'earlier_files')


def earlier_file(name, folder):
    """Copy a file that an earlier version has written to a folder; return the path of the copy."""
    return shutil.copy(os.path.join(FOLDER, name), str(folder))


def rewrite(path, arrays, without=()):
    """Write a file anew with some other arrays, and without some."""
    arrays = {**state_file.read(path), **arrays}
    with open(path, 'w+b') as file:
        state_file.write(file, {name: array for name, array in arrays.items() if name not in ('format', *without)})


def begin_again():
    """Forget the checkpoints of this process, as after a crash."""
    replay._runs.clear()
