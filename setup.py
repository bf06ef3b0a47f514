"""Package theano_mgpu. `make setup` installs it with everything that its tests and benchmarks need."""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
# The versions of CPython on which the tests pass; the classifiers below name each.
OLDEST, NEWEST = (3, 8), (3, 13)
if not OLDEST <= sys.version_info[:2] <= NEWEST:  # before Theano's sdist is built, whose error says nothing of Python
    sys.exit('theano_mgpu runs on CPython %d.%d to %d.%d, and this is %d.%d: make an environment of one of these with '
             '`uv venv --python %d.%d`, `python%d.%d -m venv .venv` or `conda create -n mgpu python=%d.%d`, or run '
             '`make setup` in a checkout.' % (OLDEST + NEWEST + sys.version_info[:2] + NEWEST * 3))


def read(name):
    """Return the text of a file beside this one, or '' if it is not shipped."""
    path = HERE / name
    return path.read_text(encoding='utf-8') if path.is_file() else ''


def version():
    """Read the version without importing the package: its dependencies are not installed yet."""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", read('theano_mgpu/__init__.py'), re.M)
    if not found:
        raise RuntimeError("theano_mgpu/__init__.py has no line `__version__ = '...'`")
    return found.group(1)


PTH = 'theano_mgpu.pth'
# Python runs this line at each start: cheap unless theano_mgpu started the process, and harmless after an uninstall.
PTH_LINE = ("import os; 'MGPU_IMPORTED' in os.environ and "
            r"exec('try: import theano_mgpu_first\nexcept ImportError: pass')")


class BuildPy(build_py):
    """Writes `PTH` beside the packages, so that it is installed into site-packages."""

    def run(self):
        super().run()
        # An editable wheel ignores build_lib, and packs the folder install_lib.
        folder = self.get_finalized_command('install').install_lib if self.editable_mode else self.build_lib
        self.mkpath(folder)
        Path(folder, PTH).write_text(PTH_LINE + '\n')


# Python imports this before Theano's setup.py, which asks for names that Python 3.12 removed. The last lines import the
# sitecustomize that is hidden by this one: pip has one in the environments in which it builds packages.
THEANO_STUB = """
import configparser, importlib.machinery, importlib.util, os, sys
configparser.SafeConfigParser = configparser.ConfigParser
configparser.RawConfigParser.readfp = configparser.RawConfigParser.read_file
folders = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
hidden = importlib.machinery.PathFinder.find_spec('sitecustomize', folders)
if hidden:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
"""


def theano_requirement():
    """Return the requirement of Theano 1.0.5: from Python 3.12 on a wheel, which is built once for each user."""
    if sys.version_info < (3, 12):
        return 'theano==1.0.5'
    folder = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache', 'theano_mgpu')
    wheel = folder / 'Theano-1.0.5-py3-none-any.whl'
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=str(folder)) as work:
            build_theano(Path(work))
            built, = Path(work).glob('*.whl')
            built.replace(wheel)
    return 'theano @ ' + wheel.as_uri()


def build_theano(folder):
    """Build the wheel of Theano 1.0.5 into a folder, on a Python for which its setup.py is too old."""
    (folder / 'sitecustomize.py').write_text(THEANO_STUB)
    path = os.pathsep.join([str(folder)] + [text for text in [os.environ.get('PYTHONPATH')] if text])
    command = [sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation', '--use-pep517',
               '--wheel-dir', str(folder), 'theano==1.0.5']
    done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, universal_newlines=True)
    if done.returncode:
        sys.exit('%s\ntheano-mgpu: a wheel of Theano 1.0.5 could not be built (above); Python 3.11 needs none.'
                 % done.stdout)


# Upper bounds are the last releases that accept NumPy 1.24, which Debian 12's pygpu is built for,
# and that exist for each of Python 3.8 to 3.11. Python 3.12 needs NumPy 1.26, and Python 3.13 needs NumPy 2.1.
# NumPy 2.3 has no ndarray.tostring, which theano.printing calls.
NUMPY = ['numpy>=1.17,<1.25; python_version < "3.12"', 'scipy<1.11; python_version < "3.12"',
         'numpy>=1.26,<2; python_version == "3.12"', 'scipy>=1.11,<1.12; python_version == "3.12"',
         'numpy>=2.1,<2.3; python_version >= "3.13"', 'scipy>=1.14.1,<1.16; python_version >= "3.13"']
BLAS = ['threadpoolctl>=3.5,<4']  # tells the kernels of the BLAS, and sets its threads; 3.5 is the last for Python 3.8
# Any Keras of Theano's time; the last one if none is installed.
KERAS = ['Keras>=0.3,<=2.3.1', 'tqdm<5',  # tqdm: the bar of a prediction
         'h5py<3.12; python_version < "3.13"', 'h5py>=3.12,<3.15; python_version >= "3.13"']
TENSORBOARD = ['tensorboardX>=2.6.2,<2.7']  # writes TensorBoard's files, without TensorFlow
BENCH = ['tqdm<5',
         'scikit-learn<1.4; python_version < "3.13"', 'scikit-learn>=1.5.2,<1.8; python_version >= "3.13"',
         'matplotlib<3.9; python_version < "3.13"', 'matplotlib>=3.9.2,<3.11; python_version >= "3.13"']
# The last releases of Sphinx, of its theme and of its parser of Markdown that run on Python 3.8.
DOCS = ['sphinx>=7.1,<7.2', 'myst-parser>=3,<4', 'furo>=2024.8.6,<2025']
TEST = ['pytest==8.3.5', 'pytest-timeout==2.4.0', 'pytest-xdist==3.6.1',
        'coverage>=7.13,<8; python_version >= "3.10"',  # for make cover: older ones do not see forks
        'ruff==0.17.5', 'mypy==1.14.1',
        'hypothesis>=6.80,<6.114',  # chooses random cases; the last releases for Python 3.8
        'numpydoc>=1.6,<1.8',  # checks docstrings
        'nvidia-ml-py<14',     # its test simulates a machine without NVML
        'PyYAML<7', 'jsonschema<5',  # they check examples/mpijob.yaml
        'tensorboard>=2.14,<2.21']   # reads what Summary has written

setup(
    name='theano_mgpu',
    version=version(),
    description='Data and model parallelism over several devices for Theano, and for Keras on Theano',
    long_description=read('README.md'),
    long_description_content_type='text/markdown',
    author='theano_mgpu contributors',
    license='BSD-3-Clause',
    license_files=['LICENSE'],
    python_requires='>=%d.%d,<%d.%d' % (OLDEST + (NEWEST[0], NEWEST[1] + 1)),
    packages=find_packages(include=['theano_mgpu*']),
    package_data={'': ['py.typed', '*.txt', '*.c', '*.cpp', '*.h', 'cuda_headers/*.h']},
    py_modules=['theano_mgpu_first'],
    cmdclass={'build_py': BuildPy},
    install_requires=[theano_requirement(), *NUMPY, *BLAS],
    extras_require={
        'keras': KERAS,
        'mpi': ['mpi4py<5'],
        'nvidia': ['nvidia-ml-py'],
        # In addition to NVIDIA's driver, which is not on PyPI. NVRTC must not be newer than the driver: docs/cuda.md.
        'cuda12': ['nvidia-cuda-nvrtc-cu12>=12.0,<13', 'nvidia-cublas-cu12>=12.0,<13',
                   'nvidia-nccl-cu12>=2.18,<3', 'nvidia-ml-py'],
        'cuda13': ['nvidia-cuda-nvrtc>=13.0,<14', 'nvidia-cublas>=13.0,<14', 'nvidia-nccl-cu13>=2.27,<3',
                   'nvidia-ml-py'],
        # In addition to the above: 700 MB.
        'cudnn12': ['nvidia-cudnn-cu12>=8.9,<10'],
        'cudnn13': ['nvidia-cudnn-cu13>=9.12,<10'],
        'tensorboard': TENSORBOARD,
        'bench': BENCH,
        'docs': DOCS + KERAS,
        'test': TEST + BENCH + KERAS + DOCS + TENSORBOARD,
    },
    entry_points={'console_scripts': ['theano-mgpu = theano_mgpu.cli:main']},
    zip_safe=False,
    classifiers=[
        'Development Status :: 4 - Beta',
        'Environment :: GPU',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        'Programming Language :: Python :: 3.8',
        'Programming Language :: Python :: 3.9',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Programming Language :: Python :: Implementation :: CPython',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Topic :: System :: Distributed Computing',
    ],
)
