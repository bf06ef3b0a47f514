"""README's examples run as they stand."""
import os
import re
import subprocess
import sys

import pytest

README = os.path.join(os.path.dirname(__file__), '..', 'README.md')


def examples():
    with open(README, encoding='utf-8') as f:
        return re.findall(r'```python\n(.*?)```', f.read(), flags=re.DOTALL)


@pytest.mark.parametrize('first', [0, 1])
def test_examples_run(first, tmp_path):
    """One after the other in one interpreter: all of them, and those that leave the contexts to the machine."""
    chosen = examples()[first:]
    assert len(chosen) >= 2
    done = subprocess.run([sys.executable, '-c', '\n'.join(chosen)], capture_output=True, text=True,
                          cwd=str(tmp_path), env=dict(os.environ, THEANO_FLAGS='floatX=float32'))
    assert done.returncode == 0, done.stderr
    assert 'same answer: the largest difference is' in done.stdout
    assert ('dev0 cpu cpu' in done.stdout) == (first == 0) and '(7, 2)' in done.stdout
    assert [round(float(value), 2) for value in re.findall(r'\[+ *([\d.]+) *\]', done.stdout)] == [1, 1, 1]
