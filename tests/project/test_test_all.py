""".ci/test-all, which runs all suites and writes the table of docs/tests.md."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / '.ci' / 'test-all'
TABLE = """\
# Tests

| target | what it checks | needs | minutes | last passed: date, commit, counts |
|---|---|---|---|---|
| `make test` | all | `make setup` | 16 | never |
| `make test-slow` | the long ones | `make setup` | 139 | 2026-11-01, 1234567: 5 passed |
| `make test-keras FOLDER=...` | Keras's own | a checkout | 58 | never |
"""
MAKE = """\
#!/bin/sh
echo "==== 3 passed, 1 skipped, 2 warnings in 1.00s (0:00:01) ===="
[ "$1" = test ]
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a repository with the script, its table, and a make whose `test` passes and whose `test-slow` fails."""
    for folder in ('.ci', 'docs'):
        (tmp_path / folder).mkdir()
    shutil.copy(str(SCRIPT), str(tmp_path / '.ci' / 'test-all'))
    (tmp_path / 'docs' / 'tests.md').write_text(TABLE)
    (tmp_path / 'make').write_text(MAKE)
    (tmp_path / 'make').chmod(0o755)
    (tmp_path / '.gitignore').write_text('build\n')
    for words in (['init', '-q'], ['add', '-A'], ['-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '-qm', 'all']):
        subprocess.run(['git', *words], cwd=tmp_path, check=True)
    return tmp_path


def run(checkout, *words):
    done = subprocess.run([sys.executable, '.ci/test-all', *words], cwd=checkout, capture_output=True, text=True,
                          env=dict(os.environ, MAKE=str(checkout / 'make')))
    return done, (checkout / 'docs' / 'tests.md').read_text()


def test_what_has_passed_is_written_and_what_has_failed_stays(checkout):
    done, table = run(checkout)
    commit = subprocess.run(['git', 'rev-parse', '--short=8', 'HEAD'], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('failed: test-slow. '), done.stderr
    assert 'make test-keras: it needs FOLDER=...' in done.stdout
    rows = table.splitlines()
    assert rows[4].startswith('| `make test` | all | `make setup` | 1 | 20') and rows[4].endswith(
        ', %s: 3 passed, 1 skipped |' % commit.stdout.strip())
    assert rows[:4] + rows[5:] == TABLE.splitlines()[:4] + TABLE.splitlines()[5:]


def test_a_table_names_the_commit_that_was_tested(checkout):
    (checkout / 'make').write_text(MAKE + '\n')
    done, table = run(checkout, '--only', 'test')
    assert done.returncode == 2 and 'not committed' in done.stderr and table == TABLE


def test_a_suite_that_there_is_not_is_named_with_those_there_are(checkout):
    done, _ = run(checkout, '--only', 'test-all')
    assert done.returncode == 2 and 'test-all: no suite of' in done.stderr and 'test-slow' in done.stderr
    assert 'test-slow              minutes: 139' in run(checkout, '--list')[0].stdout
