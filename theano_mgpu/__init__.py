"""Theano and Keras-Theano on several devices: one model, several contexts, the answers unchanged."""
from . import command_path  # noqa: F401, I001  before anything else is imported
from . import patches
from .jobs import rank_process
from .patches.theano_imports import is_command_line as _is_command_line
from .patches.theano_imports import own_command as _own_command

__version__ = '0.1.0'

_needs_theano = _own_command() != 'launch'  # each of the processes that launch starts imports Theano
theano_error = None  # why Theano could not be imported; `theano-mgpu doctor` runs without it and reports this
try:
    rank_process.install()
    patches.before_theano()
    if _needs_theano:
        patches.import_theano()
        patches.after_theano()
except Exception as error:  # a NumPy too new: AttributeError; a flag: ValueError, MgpuError ...
    if not _is_command_line():
        raise
    theano_error = error
if _needs_theano and theano_error is None:
    from . import config as _config
    from .devices.context_map import Context
    from .devices.contexts import contexts, init
    from .enabling.functions import disable, enable
    from .errors import (
        BatchError,
        ContextError,
        GraphError,
        MgpuError,
        MgpuWarning,
        NonFiniteError,
        PredictionError,
        RankError,
        ReplicaError,
    )
    from .graphs.audit import audit
    from .jobs.mpi_environment import rank, size
    from .parallel_function import function
    from .placement.blocks import device, place
    from .prediction.predictor import Predictor
    from .profiling.timeline import start as _start_timeline
    from .profiling.timeline import timeline
    from .summaries.event_file import Summary
    from .training import training_function

    if _config.own_flag('mgpu.timeline'):
        _start_timeline(_config.own_flag('mgpu.timeline'))

__all__ = ['BatchError', 'Context', 'ContextError', 'GraphError', 'MgpuError', 'MgpuWarning', 'NonFiniteError',
           'PredictionError', 'Predictor', 'RankError', 'ReplicaError', 'Summary', 'audit', 'contexts', 'device',
           'disable', 'enable', 'function', 'init', 'place', 'rank', 'size', 'timeline', 'training_function']
