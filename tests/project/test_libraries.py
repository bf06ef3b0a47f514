"""The guide has each library that `.ci/test-libraries` runs, with its version; the page of projects each program."""
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER = runpy.run_path(str(ROOT / '.ci' / 'test-libraries'))
GUIDE = (ROOT / 'docs' / 'guide' / 'libraries.md').read_text(encoding='utf-8')
PROJECTS = (ROOT / 'docs' / 'projects.md').read_text(encoding='utf-8')
# Rows of the guide that the runner does not run: the tests of Keras have their own runner, and the last needs servers.
OTHERS = {('Keras', '0.3 to 2.3.1'), ('sklearn-theano', 'master')}


def test_the_guide_has_each_library_that_is_run():
    rows = re.findall(r'^\| ([^|]+) \| ([^|]+) \| (?:yes|no) \|', GUIDE, re.MULTILINE)
    assert len(rows) == len(set(rows)) and set(rows) == OTHERS | {each[:2] for each in RUNNER['LIBRARIES']}


@pytest.mark.parametrize('library', RUNNER['LIBRARIES'], ids=lambda each: '-'.join(each[:2]))
def test_a_library_has_its_program_and_its_packages(library):
    assert (ROOT / 'tests' / 'programs' / 'libraries' / (library.program + '.py')).exists()
    assert library.pypi or library.github
    assert set(library.github) <= set(RUNNER['GITHUB']) and set(library.shared) <= set(RUNNER['SHARED'])


def test_the_guide_has_the_commits_that_are_run():
    for repository, commit in map(str.split, RUNNER['GITHUB'].values()):
        assert 'https://github.com/%s/commit/%s' % (repository, commit) in GUIDE


def test_the_page_of_projects_has_each_program():
    programs = {path.name for path in (ROOT / 'tests' / 'programs' / 'projects').glob('*.py')} - {'show.py'}
    assert programs == set(re.findall(r'\w+\.py', ' '.join(re.findall(r'\$D/(\S+)', PROJECTS))))
    sections = re.findall(r'^### .*\n\n.*$', PROJECTS, re.MULTILINE)
    assert len(sections) >= 12 and all(re.search(r'/commit/[0-9a-f]{40}\)', each) for each in sections)
