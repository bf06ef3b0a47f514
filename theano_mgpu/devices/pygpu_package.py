"""The way to install pygpu on this system; docs/guide/install.md has all ways."""
from __future__ import annotations

import os
import sys

PAGE = 'docs/guide/install.md, "%s"'
OF_DISTRIBUTION = ('apt-get install python3-pygpu libgpuarray-dev, and a virtual environment that sees it: '
                   '/usr/bin/python3 -m venv --system-site-packages .venv (%s)')


def _system(path: str) -> tuple[str, str]:
    """Return the name and the version of the distribution, as in ('debian', '12'); empty texts if there are none."""
    try:
        with open(path) as file:
            facts = dict(line.strip().partition('=')[::2] for line in file)
    except (OSError, UnicodeDecodeError):
        return '', ''
    return facts.get('ID', '').strip('"\''), facts.get('VERSION_ID', '').strip('"\'')


def how_to_install(path: str = '/etc/os-release') -> str:
    """Return the way to install pygpu 0.7.6 here, as text; the file describes the distribution."""
    if os.environ.get('CONDA_PREFIX'):
        text = 'conda install -c conda-forge pygpu=0.7.6 (%s)' % (PAGE % 'conda')
        return text if sys.version_info < (3, 11) else text + '; conda-forge has it for Python 3.8 to 3.10'
    system, version = _system(path)
    if (system, version) == ('debian', '12'):
        return OF_DISTRIBUTION % (PAGE % 'Debian 12')
    if (system, version) == ('ubuntu', '22.04'):
        return OF_DISTRIBUTION % (PAGE % 'Ubuntu 22.04')
    return '%s has no package of it: use an image of Debian 12 by Docker or podman (%s), or conda' % (
        ' '.join(filter(None, [system.capitalize(), version])) or 'this system', PAGE % 'An image')
