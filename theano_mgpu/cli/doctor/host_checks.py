"""Checks of `theano-mgpu doctor` on the host; each returns a Finding, and may raise an exception.

A finding is a failure only if something that is needed is broken; for anything that the configured contexts do not use
it is at most a warning. Theano is imported by the checks, not here: it may be broken itself.
"""
from __future__ import annotations

import configparser
import re
import sys
import tempfile
from typing import Any, NamedTuple

import theano_mgpu

from ...comm import mpi_library
from ...compat import keras_names, keras_versions
from ...devices.context_map import Context, describe
from ...devices.contexts import configured
from ...errors import MgpuError, ReplicaError
from ...utils import blas
from ...utils.flag_text import source_of
from ...utils.installed import installed
from ...utils.values import wrong
from ..output import quietly

OK, WARN, FAIL, SKIP = 'ok', 'warn', 'fail', 'skip'

PIP = 'python -m pip install '
# The oldest and the newest version that run Theano with the patches, and what pip is asked for, by the oldest Python;
# see setup.py.
NUMPY = {(3, 8): ((1, 17), (1, 24), 'numpy>=1.17,<1.25'), (3, 12): ((1, 26), (1, 26), 'numpy>=1.26,<2'),
         (3, 13): ((2, 1), (2, 2), 'numpy>=2.1,<2.3')}
LONGEST = 400  # characters of an exception's text; a linker may print thousands

# A module like Theano's own: headers of Python and NumPy, and C++.
PROBE = """
#include <Python.h>
#include <numpy/arrayobject.h>
template <typename T> static T twice(T value) { return 2 * value; }
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(twice(21)); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "mgpu_probe", NULL, -1, methods};
PyMODINIT_FUNC PyInit_mgpu_probe(void) { return PyModule_Create(&module); }
"""


class Finding(NamedTuple):
    """The result of a check: one of the statuses above, a text, and a remedy unless all is well."""

    status: str
    text: str
    remedy: str = ''


class Setup:
    """The configuration, read without opening a device.

    There are no contexts if the context map is malformed (`map_error`). `theano_error` tells why Theano could not be
    imported.
    """

    def __init__(self) -> None:
        self.theano_error: Exception | None = theano_mgpu.import_theano()
        self.contexts: list[Context] = []
        self.map_error: Exception | None = None
        try:
            self.contexts = configured()
        except Exception as error:  # ContextError; configparser's for a broken .theanorc
            self.map_error = error

    def needs(self, *kinds: str) -> bool:
        """Return whether a context of one of these kinds is configured."""
        return any(context.kind in kinds for context in self.contexts)


def broken(needed: bool, text: str, remedy: str) -> Finding:
    """Return a failure if the broken thing is needed, else a warning."""
    return Finding(FAIL if needed else WARN, text, remedy)


def version_tuple(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    Examples
    --------
    >>> version_tuple('1.24.2'), version_tuple('2.0rc1')
    ((1, 24), (2, 0))
    """
    return tuple(int(number) for number in re.findall(r'\d+', text)[:2])


def check_python(setup: Setup) -> Finding:
    """Tell the version of Python; pip installs the package on those alone that Theano 1.0.5 works with."""
    return Finding(OK, '%d.%d.%d' % sys.version_info[:3])


def check_numpy(setup: Setup) -> Finding:
    """Check that Theano 1.0.5 works with this NumPy."""
    import numpy
    oldest, newest, requirement = NUMPY[max(python for python in NUMPY if python <= sys.version_info)]
    if not oldest <= version_tuple(numpy.__version__) <= newest:
        works = '%d.%d' % oldest + (' to %d.%d' % newest if newest != oldest else '')
        return Finding(FAIL, '%s; Theano 1.0.5 works with %s' % (numpy.__version__, works), PIP + "'%s'" % requirement)
    return Finding(OK, numpy.__version__)


def theano_remedy() -> str:
    """Return the way to install Theano 1.0.5."""
    if sys.version_info < (3, 12):
        return PIP + 'theano==1.0.5'
    return PIP + "--force-reinstall '.[keras]' in a checkout of theano_mgpu, which builds Theano for this Python"


def check_theano(setup: Setup) -> Finding:
    """Check that Theano 1.0.5 can be imported."""
    if setup.theano_error is not None:
        text = first_line(setup.theano_error)
        return Finding(FAIL, 'cannot be imported: ' + text, 'Fix this flag' if 'flag mgpu.' in text else
                       'See Python, NumPy and mpi4py here, and THEANO_FLAGS and .theanorc; or else: '
                       + theano_remedy())
    import theano
    if theano.__version__ != '1.0.5':
        return Finding(FAIL, theano.__version__ + '; theano_mgpu works with 1.0.5 only', theano_remedy())
    return Finding(OK, '%s, floatX=%s' % (theano.__version__, theano.config.floatX))


def check_compiler(setup: Setup) -> Finding:
    """Check that the compiler builds a module, which loads and runs."""
    import theano
    from theano.gof.cmodule import GCC_compiler
    gpu = setup.needs('cuda', 'opencl')
    remedy = 'Debian: apt-get install g++ python3-dev. Another compiler: THEANO_FLAGS=cxx=/path/to/g++'
    if not theano.config.cxx:
        return broken(gpu, 'none: %s' % ('Theano needs one to use a GPU' if gpu else
                                         'Theano interprets its graphs, which is slow'), remedy)
    try:
        with quietly(), tempfile.TemporaryDirectory(prefix='theano-mgpu-') as folder:
            # Not theano.function, which would load an earlier module from Theano's cache.
            probe = GCC_compiler.compile_str('mgpu_probe', PROBE, location=folder,
                                             preargs=GCC_compiler.compile_args())
        answer = probe.answer()
    except Exception as error:
        # Without a compiler Theano interprets; with a broken one nothing runs, not even on a CPU.
        return Finding(FAIL, '%s cannot build a module: %s' % (theano.config.cxx, first_line(error)), remedy)
    if answer != 42:
        return Finding(FAIL, '%s builds a module that computes 2 * 21 = %r' % (theano.config.cxx, answer), remedy)
    return Finding(OK, '%s: a small module builds, loads and runs' % theano.config.cxx)


def check_blas(setup: Setup) -> Finding:
    """Check that gemm through BLAS agrees with NumPy, and whether its kernels fit the processor."""
    import theano
    import theano.tensor as T
    if not theano.config.cxx:
        return Finding(SKIP, 'needs the compiler')
    flags = theano.config.blas.ldflags
    remedy = 'See compiler above. Debian: apt-get install libopenblas-dev. Another: THEANO_FLAGS=blas.ldflags=-lNAME'
    if not flags:
        return Finding(WARN, "none (blas.ldflags is empty): the CPU's gemm goes through NumPy, which is slow", remedy)
    a, b = random_matrices()
    x, y = T.fmatrices('x', 'y')
    try:
        with quietly():
            result = theano.function([x, y], T.dot(x, y), mode=theano.Mode('cvm', 'fast_run'))(a, b)
    except Exception as error:
        return Finding(FAIL, 'blas.ldflags=%s does not work: %s' % (flags, first_line(error)), remedy)
    fault = wrong(result, a.dot(b), 1e-4, 1e-4)
    if fault:
        return Finding(FAIL, 'blas.ldflags=%s: gemm %s' % (flags, fault), remedy)
    text = "%s: gemm agrees with NumPy's; %s; kernels: %s" % (flags, ' and '.join(blas.loaded().values()), blas.reason)
    if blas.outdated():
        return Finding(WARN, text + ', slow on this processor',
                       'Unset %s, or install an OpenBLAS that knows this processor' % blas.VARIABLE)
    return Finding(OK, text)


def check_map(setup: Setup) -> Finding:
    """Check the context map."""
    error = setup.map_error
    if error is None:
        return Finding(OK, '%s, %s' % (describe(setup.contexts), source_of_map()))
    unreadable = isinstance(error.__cause__, configparser.Error)
    remedy = ('Fix this file; `theano-mgpu config` prints a valid one' if unreadable else
              'Fix the flag `contexts` in THEANO_FLAGS or .theanorc' if isinstance(error, MgpuError) else
              "This machine's devices cannot be listed: see pygpu below")
    return Finding(FAIL, first_line(error).partition('. Fix')[0], remedy)


def source_of_map() -> str:
    """Return the source of the context map, as text."""
    place = source_of('contexts')
    return 'from ' + place if place else 'the default for this machine, as THEANO_FLAGS and .theanorc map no contexts'


def check_keras(setup: Setup) -> Finding:
    """Check that Keras runs on Theano, and say what its version lacks."""
    remedy = PIP + "Keras==2.3.1 h5py, and KERAS_BACKEND=theano"
    version = installed('keras')
    if version is None:
        return Finding(SKIP, 'not installed; optional; ' + keras_names.TESTED)
    try:
        with quietly():
            backend = keras_versions.backend()
            is_hooked = keras_versions.is_hooked()
    except Exception as error:
        return Finding(WARN, '%s cannot be imported: %s' % (version, first_line(error)), remedy)
    if backend != 'theano':
        return Finding(WARN, '%s runs on %s, not on Theano' % (version, backend),
                       'export KERAS_BACKEND=theano, or "backend": "theano" in ~/.keras/keras.json')
    lacking = '; "theano-mgpu run" and mgpu.enable() divide its models; theano_mgpu.keras is for Keras 1.0 and later'
    return Finding(OK, '%s, on Theano; %s%s' % (version, keras_names.TESTED, lacking * (not is_hooked)))


def check_mpi(setup: Setup) -> Finding:
    """Check that mpi4py can be imported."""
    if installed('mpi4py') is None:
        return Finding(SKIP, 'not installed; optional, for several processes')
    probe = mpi_library.probe()  # in a process of its own: outside mpirun some implementations abort
    if probe.returncode:
        # Theano imports mpi4py if it is installed, and handles only an ImportError.
        messages = re.findall(r'^\w*Error: .*', probe.stderr, re.M) or probe.stderr.strip().splitlines()[-1:]
        return broken(setup.theano_error is not None, 'cannot be imported: ' + ' '.join(messages[-1:]),
                      'Debian: apt-get install openmpi-bin libopenmpi-dev. Or remove it: '
                      'python -m pip uninstall mpi4py')
    version, _, library = probe.stdout.partition('\n')
    return Finding(OK, '%s, %s' % (version, library.partition('\n')[0]))


def random_matrices() -> list[Any]:
    """Return two float32 arrays of shape (64, 64) with values in [-0.5, 0.5); the same ones each time."""
    import numpy as np
    rng = np.random.RandomState(0)
    return [(rng.rand(64, 64) - 0.5).astype('float32') for _ in range(2)]


def first_line(error: Any) -> str:
    """Return the first line of an exception's message: Theano's are pages long.

    Examples
    --------
    >>> first_line(RuntimeError('while compiling the node', 17, '\\n', 'ld: cannot find -lnope\\nmore'))
    'while compiling the node: ld: cannot find -lnope'
    >>> first_line(ValueError(b'Device ID out of range'))
    'Device ID out of range'
    """
    if isinstance(error, ReplicaError):
        error = error.__cause__ or error
    if isinstance(error, (OSError, configparser.Error)):
        return ' '.join(str(error).split())  # their message has more than the arguments
    texts = [arg.decode('utf8', 'replace') if isinstance(arg, bytes) else arg for arg in error.args]
    lines = [text.strip().partition('\n')[0].rstrip(': ') for text in texts if isinstance(text, str) and text.strip()]
    # Our own errors recommend the doctor, which is running already.
    line = re.sub(r'; run "theano-mgpu doctor"[^.]*', '', ': '.join(lines))
    return line if len(line) <= LONGEST else line[:LONGEST - 4] + ' ...'
