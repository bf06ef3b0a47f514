"""Theano and Keras-Theano on several devices: one model, several contexts, the answers unchanged."""
from .utils import command_line, second_import, rank_process, blas  # noqa: F401, I001  in this order, before NumPy
import importlib as _importlib
import typing as _typing
from . import config as _config  # noqa: F401  it registers the flags
from . import compat
from .comm import patches as _of_comm
from .compat import keras_names as _keras_names
from .devices import leases as _leases
from .devices import patches as _of_devices

if _typing.TYPE_CHECKING:
    from .public import *  # noqa: F403

__version__ = '0.3.0'

theano_error = None  # why Theano could not be imported; `theano-mgpu doctor` runs without it and reports this
_keeps_errors = command_line.is_command_line()  # which sys.argv does not show later


def import_theano():
    """Import Theano, and the functions and classes of `public` into this module; return `theano_error`.

    ``import theano_mgpu`` calls it; of the commands, those that need Theano do so, since it takes most of a second. An
    error is raised, or kept in a process of the command line.
    """
    if theano_error is None and '__all__' not in globals():
        try:
            public = _importlib.import_module('.public', __name__)
            globals().update({name: getattr(public, name) for name in ['__all__', *public.__all__]})
        except Exception as error:  # a NumPy too new: AttributeError; a flag: ValueError, MgpuError ...
            _keep(error)
        second_import.keep()
    return theano_error


def _keep(error):
    global theano_error
    if not _keeps_errors:
        raise
    theano_error = error


try:
    rank_process.install()
    rank_process.hints[1:] = [_keras_names.hint]
    compat.before_theano(_of_comm.PATCHES, _of_devices.PATCHES)  # they serve child processes, too
except Exception as error:
    _keep(error)
if _of_devices.COMMAND is None and import_theano() is None and _leases.run():
    _importlib.import_module('.cli.run', __name__).begin_child()  # by its name: a room above this module
