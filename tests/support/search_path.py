"""The programs that tests start in processes of their own, and their PYTHONPATH."""
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / 'tests' / 'programs'


def search_path(*folders):
    """Return the folders, this checkout, and the PYTHONPATH of the tests, in which `.ci/quickly` has a folder."""
    return os.pathsep.join(map(str, filter(None, [*folders, ROOT, os.environ.get('PYTHONPATH')])))
