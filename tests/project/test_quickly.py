""".ci/quickly, which compiles the headers of Theano for tests."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

QUICKLY = Path(__file__).parents[2] / '.ci' / 'quickly'
# It takes its time to make a header or a library, and notes their names.
COMPILER = '''#!%s
import os, sys, time
words = sys.argv[1:]
if 'c++-header' not in words and '-shared' not in words:
    os.execv(%r, ['g++', *words])
with open(words[-1], 'w') as file:
    print('half', file=file, flush=True)
    time.sleep(1)
    print('whole', file=file)
with open(%r, 'a') as file:
    print(words[-1], file=file)
'''


@pytest.mark.needs_compiler
def test_two_at_the_same_time_in_one_checkout(tmp_path):
    """One renamed the files that the other one was about to rename, and wrote the flags that the other one used."""
    log, program = tmp_path / 'log', tmp_path / 'bin' / 'g++'
    program.parent.mkdir()
    program.write_text(COMPILER % (sys.executable, shutil.which('g++'), str(log)))
    program.chmod(0o755)
    environment = dict(os.environ, PATH='%s:%s' % (program.parent, os.environ['PATH']), THEANO_FLAGS='',
                       PYTHONPATH=str(QUICKLY.parents[1]))
    command = [sys.executable, str(QUICKLY), 'sh', '-c', 'cat "${THEANORC%%:*}"; cat build/theano_headers/*.hpp.gch/*']
    both = [subprocess.Popen(command, cwd=tmp_path, env=dict(environment, TEST_CXXFLAGS=level), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for level in ('-O0', '-O0', '-O1')]
    for level, process in zip(('-O0', '-O0', '-O1'), both):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert 'cxxflags = %s ' % level in out and '.hpp -Wl' in out
        assert out.count('half') == out.count('whole') >= 3
    made = log.read_text().split()
    folder = tmp_path / 'build' / 'theano_headers'
    kept = [*folder.glob('*.gch/*'), *folder.glob('*.so')]
    assert len(made) == len(kept) and not any(os.path.exists(name) for name in made)
