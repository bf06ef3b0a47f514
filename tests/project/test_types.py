"""mypy finds nothing wrong. As a test it runs next to other tests; before them, it would leave the other cores idle."""
import subprocess
import sys
from pathlib import Path


def test_annotations_are_right():
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run([sys.executable, '-m', 'mypy'], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
