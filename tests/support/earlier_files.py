"""Files that an earlier version of the package has written."""
import os
import shutil

FOLDER = os.path.join(os.path.dirname(__file__), 'earlier_files')


def earlier_file(name, folder):
    """Copy a file to a folder; return the path of the copy."""
    return shutil.copy(os.path.join(FOLDER, name), str(folder))
