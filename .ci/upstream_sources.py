"""Kerases of other years, their sources, and packages, as the tests and examples of Keras and Theano need them."""
import glob
import os
import shutil
import subprocess
import sys
import tempfile

PACKAGES = os.path.abspath('build/upstream_packages')
IMPORTED = ['pynose==1.5.5', 'parameterized==0.9.0', 'flaky==3.8.1',
            'pandas==2.0.3' if sys.version_info < (3, 12) else 'pandas==2.3.3',  # the latter is for NumPy 2, too
            'python-dateutil', 'pytz', 'tzdata', 'six']
KERASES = os.path.join(sys.prefix, 'kerases')
INSTALLED = '2.3.1'
REPOSITORY = 'https://github.com/keras-team/keras'


def kerases():
    """Return the versions of Keras that `.ci/setup` has installed besides the package's own."""
    return sorted(os.listdir(KERASES)) if os.path.isdir(KERASES) else []


def install_packages():
    """Install the packages that the tests import, outside of this environment."""
    if not os.path.isdir(PACKAGES):
        print('installing %s into %s' % (', '.join(IMPORTED), PACKAGES))
        pip = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target']
        subprocess.run(pip + [PACKAGES + '.part', *IMPORTED], check=True)
        os.rename(PACKAGES + '.part', PACKAGES)


def add_options(parser, versions):
    """Add the options of a command that reads the sources of some versions."""
    parser.add_argument('--versions', nargs='+', choices=versions, default=versions, metavar='VERSION',
                        help='some of %s (default: all)' % ', '.join(versions))
    parser.add_argument('--sources', default='build/keras_sources', metavar='FOLDER', help=(
        'a folder that has a checkout, or an unpacked sdist, of each VERSION in FOLDER/VERSION; a missing one is '
        'downloaded into it (default: %(default)s)'))
    parser.add_argument('--repository', default=REPOSITORY, metavar='URL', help=(
        'where to clone a version of which the sdist has no tests; a folder does, too (default: %(default)s)'))


def sources(version, args):
    """Return the folder of the sources of a version, and download them if they are not there: the sdist or a clone."""
    folder = os.path.join(args.sources, version)
    if not os.path.isdir(folder):
        print('downloading the sources of Keras %s into %s' % (version, folder), flush=True)
        try:
            _download(version, folder, args.repository)
        except subprocess.CalledProcessError as error:
            sys.exit('%s has failed (above). Put a checkout of Keras %s into %s, or name a folder of checkouts with '
                     '--sources, or a clone with --repository' % (' '.join(error.cmd), version, folder))
    return folder


def _download(version, folder, repository):
    with tempfile.TemporaryDirectory() as part:
        subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--no-build-isolation',
                        '--no-binary', ':all:', '--dest', part, 'Keras==' + version], check=True)
        archive, = glob.glob(os.path.join(part, '*.tar.gz'))
        shutil.unpack_archive(archive, part)
        unpacked = os.path.join(part, 'Keras-' + version)
        if not os.path.isdir(os.path.join(unpacked, 'tests')):  # the sdist of 1.2.2 has none
            unpacked = os.path.join(part, 'clone')
            subprocess.run(['git', '-c', 'advice.detachedHead=false', 'clone', '-q', '--depth', '1',
                            '--branch', version, repository, unpacked], check=True)
        shutil.move(unpacked, folder)
