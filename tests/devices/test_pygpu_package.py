"""The error about a missing pygpu names the way to install it on this system, and the section of the page."""
import sys
from pathlib import Path

from theano_mgpu.devices import pygpu_package

import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / 'docs' / 'guide' / 'install.md'


@pytest.mark.parametrize('release, way, section', [
    ('ID=debian\nVERSION_ID="12"\n', 'apt-get install python3-pygpu', 'Debian 12'),
    ('ID=ubuntu\nVERSION_ID="22.04"\n', 'apt-get install python3-pygpu', 'Ubuntu 22.04'),
    ('ID=debian\nVERSION_ID="13"\n', 'Debian 13 has no package of it: use an image', 'An image'),
    ('ID=fedora\nVERSION_ID=41\n', 'Fedora 41 has no package', 'An image'),
    ('ID=arch\n', 'Arch has no package', 'An image'), ('', 'this system has no package', 'An image'),
    (None, 'this system has no package', 'An image')])
def test_each_system_has_its_way(release, way, section, tmp_path, monkeypatch):
    monkeypatch.delenv('CONDA_PREFIX', raising=False)
    path = tmp_path / 'os-release'
    if release is not None:
        path.write_text(release)
    text = pygpu_package.how_to_install(str(path))
    assert text.startswith(way) and '"%s"' % section in text and '\n## %s\n' % section in PAGE.read_text()


@pytest.mark.parametrize('version, has_it', [((3, 10), True), ((3, 11), False)])
def test_in_conda_it_is_condas(version, has_it, monkeypatch):
    monkeypatch.setenv('CONDA_PREFIX', '/opt/conda')
    monkeypatch.setattr(sys, 'version_info', version)
    text = pygpu_package.how_to_install()
    assert text.startswith('conda install -c conda-forge pygpu=0.7.6')
    assert ('for Python 3.8 to 3.10' in text) is not has_it and '\n## conda\n' in PAGE.read_text()
