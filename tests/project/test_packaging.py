"""The packages: one version everywhere, and a source distribution with every file; see also `make test-packages`."""
import re
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
    needed = re.search(r'^DEBIAN_PACKAGES=\(\n(.*?)^\)', (ROOT / '.ci/setup').read_text(), re.M | re.S).group(1)
    needed = set(re.sub('#.*', '', needed).split()) - set(leaves_out)
    text = (ROOT / 'docker' / (name + '.Dockerfile')).read_text()
    installed = re.search(r'--no-install-recommends((?:\s|\\|[\w+.-])*)&&', text).group(1).replace('\\', '')
    assert set(installed.split()) == needed
    extras = re.search(r'/tmp/theano_mgpu\[(.*?)\]', text).group(1).replace('$CUDA', 'cuda12').split(',')
    assert all("'%s': " % extra in (ROOT / 'setup.py').read_text() for extra in extras)
    setuptools, = re.findall(r'"(setuptools>.*?)"', (ROOT / 'pyproject.toml').read_text())
    assert "'%s'" % setuptools in text
