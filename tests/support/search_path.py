"""The PYTHONPATH of processes that tests start."""
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def search_path(*folders):
    """Return the folders, this checkout, and the PYTHONPATH of the tests, in which `.ci/quickly` has a folder."""
    return os.pathsep.join(map(str, filter(None, [*folders, ROOT, os.environ.get('PYTHONPATH')])))
