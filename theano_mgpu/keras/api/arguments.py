"""The arguments that several functions of the Keras add-on take: a built model, and a choice of contexts."""
from __future__ import annotations

from typing import Any

import numpy as np

from ...compat import keras_versions
from ...devices import leases
from ...devices.choice import resolve_contexts
from ...devices.context_map import Context, describe
from ...devices.contexts import contexts as active_contexts
from ...devices.contexts import host_contexts
from ...devices.mesh import rows_of
from ...errors import ContextError
from ...utils import mpi_environment


def chosen_contexts(gpus: Any) -> list[Context]:
    """Return the contexts that `gpus` of `multi_gpu_model` stands for; a ContextError lists the existing ones."""
    if callable(gpus):
        return gpus()
    there = active_contexts()
    if isinstance(gpus, (int, np.integer)) and not isinstance(gpus, bool):
        if gpus < 1:
            raise ContextError('gpus=%d: a model needs at least one context; there are %d: %s'
                               % (gpus, len(there), describe(there)))
        n_processes = mpi_environment.size() if mpi_environment.trains_together() else 1
        if leases.is_child() or leases.named() or len(there) < gpus <= len(there) * n_processes:
            return there[:gpus]  # other processes have the others, or the user wants no more
        if gpus > len(there):
            raise ContextError('To call `multi_gpu_model` with `gpus=%d`, as many contexts must be mapped; there are '
                               '%d: %s. Reduce `gpus`, or map more: call theano_mgpu.init(%d) before, or set, e.g., '
                               'THEANO_FLAGS="contexts=%s"'
                               % (gpus, len(there), describe(there), gpus, _longer_map(there, gpus)))
        return there[:gpus]
    if gpus is not None and (not isinstance(gpus, (list, tuple)) or rows_of(gpus)):
        raise ContextError('gpus=%r is neither a number of contexts, nor a list of their numbers or names, nor None '
                           'for all; there are: %s' % (gpus, describe(there)))
    names = dict(enumerate(context.name for context in host_contexts()))
    return resolve_contexts(gpus and [gpu if isinstance(gpu, bool) else names.get(gpu, gpu) for gpu in gpus])


def _longer_map(there, n):
    device = {'cuda': 'dev{0}->cuda{0}', 'opencl': 'dev{0}->opencl0:{0}', 'cpu': 'dev{0}->cpu'}[there[-1].kind]
    return ';'.join([describe(there)] + [device.format(i) for i in range(len(there), n)])


def check_built(model: Any, user: str) -> None:
    """Raise a ValueError unless a model has inputs that can be fed; `user` is the function or class that needs it."""
    if not hasattr(model, 'layers') or not hasattr(model, 'fit'):
        raise ValueError('%s takes a keras.Model or keras.Sequential, not %r' % (user, model))
    if not getattr(model, 'inputs', None) or not getattr(model, 'outputs', None):
        raise ValueError('the model %s is not built yet, so its inputs are unknown: give its first layer an '
                         'input_shape, or call model.build(input_shape), before %s' % (name_of(model), user))
    if len(keras_versions.feed_inputs(model)) < len(model.inputs):
        raise ValueError('the model %s reads its data from a tensor (Input(tensor=...)), which cannot be split into '
                         'sub-batches: use Input(shape=...), and pass arrays to fit' % name_of(model))


def name_of(model: Any) -> str:
    """Return the name of a model, or of its class: a class of the user's need not call the `__init__` of Keras's."""
    return getattr(model, 'name', None) or type(model).__name__
