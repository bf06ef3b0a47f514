"""Theano and Keras-Theano on several devices: one model, several contexts, the answers unchanged."""
from .utils import command_path, second_import, blas  # noqa: F401, I001  in this order, before NumPy is imported
from . import compat
from .utils import rank_process
from .compat.theano_imports import is_command_line as _is_command_line
from .compat.theano_imports import own_command as _own_command

__version__ = '0.1.0'

_needs_theano = _own_command() != 'launch'  # each of the processes that launch starts imports Theano
theano_error = None  # why Theano could not be imported; `theano-mgpu doctor` runs without it and reports this
try:
    rank_process.install()
    compat.before_theano()
    if _needs_theano:
        from .devices.cuda_libraries import find_cudnn as _find_cudnn
        compat.apply(compat.WITH_CUDNN, _find_cudnn)
        compat.import_theano()
        compat.after_theano()
except Exception as error:  # a NumPy too new: AttributeError; a flag: ValueError, MgpuError ...
    if not _is_command_line():
        raise
    theano_error = error
if _needs_theano and theano_error is None:
    from . import config as _config
    from .auto.checkpoint import Checkpoint
    from .auto.functions import disable, enable
    from .comm.mpi import end_together as _end_together
    from .devices.context_map import Context
    from .devices.contexts import contexts, init
    from .devices.contexts import open_named as _open_named
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
    from .parallel_function import function
    from .placement import device, place
    from .predict.predictor import Predictor
    from .training import training_function
    from .utils.mpi_environment import rank, size
    from .utils.tensorboard.event_file import Summary
    from .utils.timeline import records as _records
    from .utils.timeline import start as _start_timeline
    from .utils.timeline import timeline

    compat.apply(compat.WITH_CONTEXTS, _open_named)
    _end_together()
    if _config.own_flag('mgpu.timeline') and not _records():
        try:
            _start_timeline(_config.own_flag('mgpu.timeline'))
        except MgpuError as error:
            if not _is_command_line():
                raise
            theano_error = error
second_import.keep()

__all__ = ['BatchError', 'Checkpoint', 'Context', 'ContextError', 'DriftError', 'ExchangeError', 'GraphError',
           'MgpuError', 'MgpuWarning', 'NonFiniteError', 'PredictionError', 'Predictor', 'RankError', 'ReplicaError',
           'Summary', 'audit', 'contexts', 'device', 'disable', 'enable', 'function', 'init', 'place', 'rank', 'size',
           'timeline', 'training_function']
