"""Theano and Keras-Theano on several devices: one model, several contexts, the answers unchanged."""
from .utils import command_line, second_import, rank_process, blas  # noqa: F401, I001  in this order, before NumPy
import gc as _gc
import importlib as _importlib
from . import config as _config  # noqa: F401  it registers the flags
from . import compat
from .comm import patches as _of_comm
from .compat import keras_names as _keras_names
from .devices import patches as _of_devices

__version__ = '0.2.0'

_tables = _of_comm.PATCHES, _of_devices.PATCHES  # of rooms that patch the import of Theano
_needs_theano = command_line.own_command() != 'launch'  # each of the processes that launch starts imports Theano
theano_error = None  # why Theano could not be imported; `theano-mgpu doctor` runs without it and reports this
try:
    rank_process.install()
    rank_process.hints[1:] = [_keras_names.hint]
    compat.before_theano(*_tables)
    if _needs_theano:
        compat.import_theano(*_tables)
        if command_line.own_command() is not None:  # the user has no objects yet
            _gc.freeze()  # Theano's live as long as the process: Python need not look for garbage among them
        from .auto.checkpoint import Checkpoint
        from .auto.enabling import disable, enable
        from .compat.patch import apply as _apply
        from .devices.context_map import Context
        from .devices.contexts import contexts, init, lease
        from .devices.contexts import open_named as _open_named
        from .devices.leases import run as _run
        from .errors import (
            BatchError,
            ContextError,
            DriftError,
            ExchangeError,
            GraphError,
            MgpuError,
            MgpuWarning,
            NonFiniteError,
            PredictionError,
            RankError,
            ReplicaError,
        )
        from .graph.audit import audit
        from .graph.patches import time_layers as _time_layers
        from .parallel_function import function
        from .placement import device, place
        from .predict.predictor import Predictor
        from .training import training_function
        from .utils.flags import own_flag as _own_flag
        from .utils.mpi_environment import rank, size
        from .utils.tensorboard.event_file import Summary
        from .utils.timeline import records as _records
        from .utils.timeline import start as _start_timeline
        from .utils.timeline import timeline

        _apply(_of_devices.PATCHES, _of_devices.WITH_CONTEXTS, _open_named)
        if _own_flag('mgpu.timeline') and not _records():
            _start_timeline(_own_flag('mgpu.timeline'), parent=_run())
            _time_layers()
except Exception as error:  # a NumPy too new: AttributeError; a flag: ValueError, MgpuError ...
    if not command_line.is_command_line():
        raise
    theano_error = error
second_import.keep()
if _needs_theano and theano_error is None and _run():
    _importlib.import_module('.cli.run', __name__).begin_child()  # by its name: a room above this module

__all__ = ['BatchError', 'Checkpoint', 'Context', 'ContextError', 'DriftError', 'ExchangeError', 'GraphError',
           'MgpuError', 'MgpuWarning', 'NonFiniteError', 'PredictionError', 'Predictor', 'RankError', 'ReplicaError',
           'Summary', 'audit', 'contexts', 'device', 'disable', 'enable', 'function', 'init', 'lease', 'place', 'rank',
           'size', 'timeline', 'training_function']
