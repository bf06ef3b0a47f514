"""The packages: one version everywhere, and a source distribution with every file; see also `make test-packages`."""
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import theano_mgpu

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_one_version():
    version = theano_mgpu.__version__
    released = re.search(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(), flags=re.MULTILINE).group(1)
    cited = re.search(r'^version: (\S+)', (ROOT / 'CITATION.cff').read_text(), flags=re.MULTILINE).group(1)
    assert released == cited == version


# --- Versions of Python ---------------------------------------------------------------------------

def setup_py(python, *arguments, **environment):
    """Run setup.py on a Python that says that it is another version; return the finished process."""
    code = ('import collections, runpy, setuptools.command.egg_info, sys\n'
            'Version = collections.namedtuple("Version", "major minor micro releaselevel serial")\n'
            'sys.version_info = Version(%d, %d, 0, "final", 0)\n'
            'sys.argv[0] = "setup.py"\nrunpy.run_path("setup.py", run_name="__main__")' % python)
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', code, *arguments], cwd=str(ROOT), text=True,
                          env=dict(os.environ, **environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize('python', [(3, 7), (3, 14)])
def test_an_unsupported_python_is_told_the_ways_that_work(python):
    done = setup_py(python, '--version')
    assert done.returncode == 1
    assert done.stderr.startswith('theano_mgpu runs on CPython 3.8 to 3.13, and this is %d.%d: make' % python)
    assert done.stderr.count('\n') == 1 and '`uv venv --python 3.13`' in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason='setuptools chooses its reader of TOML by the version of Python')
def test_from_python_3_12_on_theano_is_a_wheel_that_was_built_once(tmp_path):
    wheel = tmp_path / 'theano_mgpu' / 'Theano-1.0.5-py3-none-any.whl'
    wheel.parent.mkdir()
    wheel.touch()
    for python, requirement in (((3, 13), wheel.as_uri()), ((3, 12), wheel.as_uri()), ((3, 11), 'theano==1.0.5')):
        done = setup_py(python, '-q', 'egg_info', '-e', str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert requirement in (tmp_path / 'theano_mgpu.egg-info' / 'requires.txt').read_text()


def test_a_wheel_of_theano_that_cannot_be_built_is_said(tmp_path):
    """pip's own message comes first."""
    done = setup_py((3, 12), '--version', XDG_CACHE_HOME=str(tmp_path), PIP_NO_INDEX='1', PIP_FIND_LINKS='',
                    PIP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1 and 'No matching distribution' in done.stderr
    assert done.stderr.splitlines()[-1].startswith('theano-mgpu: a wheel of Theano 1.0.5 could not be built')


def test_setup_py_of_theano_finds_the_names_that_python_removed(tmp_path):
    """A sitecustomize that the environment had runs, too: pip needs its own one."""
    stub = re.search(r'^THEANO_STUB = """(.*?)"""', (ROOT / 'setup.py').read_text(), re.M | re.S).group(1)
    for name, text in (('stub', stub), ('present', 'import configparser; configparser.present = True')):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'sitecustomize.py').write_text(text)
    (tmp_path / 'setup.cfg').write_text('[versioneer]\nVCS = git\n')
    code = ('import configparser\nparser = configparser.SafeConfigParser()\nparser.readfp(open("setup.cfg"))\n'
            'print(parser.get("versioneer", "VCS"), configparser.present)')
    path = os.pathsep.join(str(tmp_path / name) for name in ('stub', 'present'))
    done = subprocess.run([sys.executable, '-c', code], cwd=str(tmp_path), text=True,
                          env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE)
    assert done.stdout == 'git True\n'


def test_make_setup_asks_for_a_python_before_anything_else(tmp_path):
    python = tmp_path / 'python3.14'
    python.write_text('#!/bin/sh\nexit 1\n')  # the answer of a version that is not supported
    python.chmod(0o755)
    (tmp_path / '.ci').mkdir()
    shutil.copy(str(ROOT / '.ci/setup'), str(tmp_path / '.ci'))
    done = subprocess.run(['bash', '.ci/setup'], cwd=str(tmp_path), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=dict(os.environ, MGPU_PYTHON=str(python)))
    assert done.returncode == 1 and not done.stdout and sorted(os.listdir(str(tmp_path))) == ['.ci', python.name]
    assert 'needs Python 3.8 to 3.13, and none of these is one: %s.' % python in done.stderr
    assert '`uv python install 3.13`' in done.stderr


def test_the_versions_of_python_are_the_same_everywhere():
    setup_text = (ROOT / 'setup.py').read_text()
    oldest, newest = ast.literal_eval(re.search('^OLDEST, NEWEST = (.*)', setup_text, re.M).group(1))
    minors = range(oldest[1], newest[1] + 1)
    classifiers = re.findall(r"Programming Language :: Python :: 3\.(\d+)'", setup_text)
    assert list(map(int, classifiers)) == list(minors)
    assert '\nfor version in %s; do\n' % ' '.join('3.%d' % minor for minor in minors) in (
        ROOT / '.ci/test-pythons').read_text()
    assert '(%d, %d) <= sys.version_info[:2] <= (%d, %d)' % (oldest + newest) in (ROOT / '.ci/setup').read_text()
    for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md'):
        assert 'CPython %d.%d to %d.%d' % (oldest + newest) in (ROOT / name).read_text(), name


# --- Files ----------------------------------------------------------------------------------------

def test_the_source_distribution_has_every_file(tmp_path):
    if not (ROOT / '.git').exists():
        pytest.skip('this is no git checkout, so that nothing lists its files')
    tracked = subprocess.run(['git', 'ls-files'], cwd=str(ROOT), check=True, stdout=subprocess.PIPE, text=True).stdout
    folder = tmp_path / 'source'  # a copy: setuptools writes beside setup.py
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, 'setup.py', '-q', 'sdist', '-d', str(tmp_path)], cwd=str(folder), check=True,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    archive, = tmp_path.glob('*.tar.gz')
    with tarfile.open(str(archive)) as tar:
        packed = {name.partition('/')[2] for name in tar.getnames()}
    assert not set(tracked.split('\n')) - {''} - packed


@pytest.mark.parametrize('name,leaves_out', [('cpu', ['iproute2']), (  # one test needs it
    'cuda', ['iproute2', 'libclblast1', 'libclblast-dev', 'pocl-opencl-icd'])])
def test_the_images_have_the_packages_of_the_set_up(name, leaves_out):
    """`make test-docker` builds them."""
    lists = re.findall(r'^\w*PACKAGES=\((.*?)^\)', (ROOT / '.ci/setup').read_text(), re.M | re.S)
    needed = set(re.sub('#.*', '', '\n'.join(lists)).split()) - set(leaves_out)
    text = (ROOT / 'docker' / (name + '.Dockerfile')).read_text()
    installed = re.search(r'--no-install-recommends((?:\s|\\|[\w+.-])*)&&', text).group(1).replace('\\', '')
    assert set(installed.split()) == needed
    extras = re.search(r'/tmp/theano_mgpu\[(.*?)\]', text).group(1).replace('$CUDA', 'cuda12').split(',')
    assert all("'%s': " % extra in (ROOT / 'setup.py').read_text() for extra in extras)
    setuptools, = re.findall(r'"(setuptools>.*?)"', (ROOT / 'pyproject.toml').read_text())
    assert "'%s'" % setuptools in text
