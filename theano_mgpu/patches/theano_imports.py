"""What Theano 1.0.5 imports and what is imported from it."""
import contextlib
import importlib
import os
import shutil
import sys
import types
import warnings

from .. import config
from ..jobs import mpi_environment
from .import_hooks import _Gone
from .theano_cache import wait_briefly_for_compile_lock
from .theano_flags import _register_own_flags, blas_ldflags, lacks_python_headers

theano_was_first = False  # whether Theano was imported before theano_mgpu
IMPORTED = 'MGPU_IMPORTED'  # in the environment of processes that this one starts, see theano_mgpu_first.py


def disable_scan_extension():
    """Use scan's pure-Python loop: its C file is Cython 0.28's and does not build on Python 3.9+.

    Without this, a compiler's error (``tp_print``, ``longintrepr.h``) ends the first scan.
    """
    if sys.version_info >= (3, 9):
        sys.modules.setdefault('theano.scan_module.scan_perform_ext', None)


@contextlib.contextmanager
def hidden_mpi():
    """Keep Theano 1.0.5 from mpi4py while it is imported, but in a process that mpirun started.

    Theano imports mpi4py wherever it is installed, for two Ops that send and receive. Without this, each
    process starts MPI, which takes half a second and a daemon; and PyPI's mpi4py on a machine without MPI's
    library ends ``import theano`` with "RuntimeError: cannot load MPI library".
    """
    hides = 'mpi4py.MPI' not in sys.modules and (not mpi_environment.is_rank() or not _has_working_mpi())
    if hides:
        sys.modules['mpi4py.MPI'] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules['mpi4py.MPI']


def _has_working_mpi():
    try:
        importlib.import_module('mpi4py.MPI')
    except (ImportError, RuntimeError):  # said once the ranks are needed: see executors/mpi.py
        return False
    return True


def is_command_line():
    """Whether this is ``theano-mgpu``, or ``python -m theano_mgpu``, whose package is imported first."""
    program = os.path.basename(sys.argv[0])
    # Python 3.8 and 3.9 do not tell which module `-m` will run.
    return program == 'theano-mgpu' or program == '-m' and 'theano_mgpu' in getattr(sys, 'orig_argv', ['theano_mgpu'])


def import_theano():
    """Import Theano with the flags that it understands, and give it theano_mgpu's own.

    ``contexts`` is kept from it: Theano would open the devices at import, only log one that fails,
    and lose the second name of a device. ``theano_mgpu.contexts`` opens them instead, on demand.

    Where Theano was imported before, it has read its flags by itself, and `theano_was_first` is True.
    """
    global theano_was_first
    theano_was_first = 'theano' in sys.modules
    if theano_was_first:
        _register_own_flags()
        return
    given = os.environ.get('THEANO_FLAGS')
    flags = config.parse_flags(given or '')
    own = {key: flags.pop(key) for key in list(flags) if key in config.OWN_FLAGS}
    flags['contexts'] = ''
    if config.flag('blas.ldflags') is None:
        flags['blas.ldflags'] = blas_ldflags()
    if config.flag('cxx') is None and shutil.which('g++') and lacks_python_headers():
        flags['cxx'] = ''
        warnings.warn('Python.h is missing, so that Theano cannot compile: it interprets its graphs, slowly, and '
                      'has no convolutions. Debian: apt-get install python3-dev', RuntimeWarning, stacklevel=3)
    os.environ['THEANO_FLAGS'] = config.join_flags(flags)
    try:
        with hidden_mpi():
            import theano
    finally:
        if given is None:
            del os.environ['THEANO_FLAGS']
        else:
            os.environ['THEANO_FLAGS'] = given
    wait_briefly_for_compile_lock()
    theano.configparser.THEANO_FLAGS_DICT.update(own)
    _register_own_flags()


def name_what_replaced_old_gpu_code():
    """Theano 1.0.5 answers ``import theano.sandbox.cuda`` with "No module named 'nose'", or as a skipped test."""
    sys.meta_path.insert(0, _Gone('theano.sandbox.cuda', (
        "theano.sandbox.cuda is not part of Theano 1.0: theano.gpuarray replaced it. Leave the import out, and map "
        "contexts to devices: THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1', or "
        "theano_mgpu.init('dev0->cuda0;dev1->cuda1')")))


def restore_downsample():
    """Theano 0.9 renamed ``theano.tensor.signal.downsample``, which Lasagne 0.1 and scripts of its time import.

    Without this, ``import lasagne`` ends with "cannot import name 'downsample'".
    """
    from theano.tensor import signal
    from theano.tensor.signal import pool

    def max_pool_2d(input, ds, ignore_border=None, st=None, padding=(0, 0), mode='max'):
        return pool.pool_2d(input, ds, ignore_border, st, padding, mode)

    downsample = types.ModuleType(signal.__name__ + '.downsample', 'What Theano had before `pool`.')
    downsample.max_pool_2d, downsample.max_pool_2d_same_size = max_pool_2d, pool.max_pool_2d_same_size
    signal.downsample = sys.modules[downsample.__name__] = downsample
