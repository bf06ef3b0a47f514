"""Theano and Keras-Theano on several devices: one model, several contexts, the answers unchanged."""
from . import compat

__version__ = '0.1.0'

compat.install()
theano_was_imported = compat.import_theano()
compat.mend_theano()

from . import contexts as _contexts  # noqa: E402  (Theano must be importable first)

_contexts.install()

from .context_map import Context  # noqa: E402
from .contexts import contexts, init  # noqa: E402
from .errors import BatchError, ContextError, GraphError, MgpuError, NonFiniteError, ReplicaError  # noqa: E402

from .audit import audit  # noqa: E402
from .function import function  # noqa: E402
from .training import training_function  # noqa: E402

__all__ = ['BatchError', 'Context', 'ContextError', 'GraphError', 'MgpuError', 'NonFiniteError', 'ReplicaError',
           'audit', 'contexts', 'function', 'init', 'training_function']
