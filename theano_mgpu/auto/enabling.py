"""`mgpu.enable`: each new `theano.function` and Keras model runs over the contexts, where that is exact and faster."""
from __future__ import annotations

import functools
import importlib
from typing import Any, Callable

from ..checks.verification import check_alone
from ..compat import import_hooks, keras_versions
from ..devices.asked_contexts import chosen_contexts, resolve_contexts
from ..devices.contexts import take_cores_as_mapped
from ..devices.mesh import rows_of
from ..errors import warn
from ..utils import mpi_environment
from .enabled import Enabled
from .functions import ONE_CPU, divide_functions, has_one_cpu
from .report import Report

NOTHING_DIVIDED = ONE_CPU + (': nothing is divided. Without a map, each core is a context. To use other devices, map '
                             'contexts to them; theano-mgpu devices lists them')
FOR_MODELS = 'theano_mgpu.keras.api.enabling'  # a room above this module, imported after Keras


def enable(contexts: Any = None, strict: bool = False, verify: bool = False, always: bool = False,
           tell: Callable[[str], object] = warn, *, gpus: Any = None) -> Report:
    """Run each `theano.function`, and each Keras model that is compiled, over several contexts from now on.

    Each call computes the usual results. The first calls of a function are timed: by plain Theano on one device, as a
    whole on the first context, and divided over the contexts. It continues in the fastest way, for each length of its
    batches. A batch enters by the arguments, as a slice of shared data sets, or is a whole data set in a shared
    variable or a constant. A function whose graph is placed (see `device`) runs on its devices from the first call on.
    What contexts cannot compute stays plain Theano: graphs without a GPU version, functions that are profiled.

    The train, test and predict functions of a model divide each batch, as in a model of `theano_mgpu.keras`'s
    `multi_gpu_model`; the rest of the model is Keras's own. Models that are not compiled predict over contexts, too.
    Functions and models that were made before stay as they are. ``theano-mgpu run`` enables it for a whole script.
    `theano_mgpu.keras.enable` is this function.

    Parameters
    ----------
    contexts : int, str, list of int, str or Context, callable, or None
        How many contexts to use, or which ones, by their names or numbers; None for all. With a list for each replica,
        graphs are placed on these. A callable returns the contexts, and is called with each function and model.
    strict : bool
        Raise a GraphError for a function that has a batch and cannot be computed in parts, and for a model that cannot
        give exactly the results of one device, or that cannot run over contexts.
    verify : bool
        Compare the first batch of each function and model on one device and over the contexts, and print the report
        to stderr; with `strict` a difference is an error. Of a model, a whole training step is compared.
    always : bool
        Divide each batch that can be divided, without timing: every run of a script then gives the same rounding.
    tell : callable
        Called with each message for the user; by default it issues an MgpuWarning.
    gpus
        Another name of `contexts`, as in Keras's `multi_gpu_model`.

    Returns
    -------
    Report
        Where each function ran, and why, and the messages. Print it.

    Raises
    ------
    ContextError
        If `contexts` asks for contexts that are not mapped, or whose device cannot be opened.

    Notes
    -----
    A model is left to plain Keras, with a message, if it reads its data from a tensor or is compiled with options that
    contexts do not take. A model whose first batch fails when it is divided, and succeeds as a whole, runs on the first
    context; with `strict` the error is raised.

    The batches of a model are divided without timing in a fit with a Checkpoint, for models that are placed or computed
    in micro-batches, with mgpu.executor=serial or threads, and where processes on several hosts train together, or each
    with data or a part of the update of its own. Processes of one host compute a batch that is not divided each by
    itself, and compare their losses after 1, 2, 4, ..., 256 such batches, after each 256 further ones, and at the end
    of an epoch. If the losses differ, all go on from the state of the first one, and take its batches.

    Examples
    --------
    >>> import numpy as np
    >>> import theano_mgpu, theano, theano.tensor as T
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> report = enable(always=True)
    >>> x = T.dmatrix('x')
    >>> f = theano.function([x], x.sum(), mode='FAST_COMPILE', name='total')
    >>> f(np.ones((7, 2)))
    array(14.)
    >>> report.usages[0].samples, [context.name for context in report.usages[0].contexts]
    (7, ['dev0', 'dev1'])
    >>> disable()
    """
    given = contexts if gpus is None else gpus
    chosen = given if callable(given) else functools.partial(_resolved, given)
    if verify:
        check_alone()
    # An error now, not with the first function; a callable may open devices, and is called with the first one.
    if not callable(given) and has_one_cpu(chosen()) and given is None:
        if not (always or mpi_environment.started_by_rank()):
            tell(NOTHING_DIVIDED)
    take_cores_as_mapped(always)
    enabled = Enabled.in_force = Enabled(chosen, strict, verify, always, tell)
    divide_functions()
    _divide_models()
    return enabled.report


def _resolved(contexts):
    is_named = isinstance(contexts, str) or isinstance(contexts, (list, tuple)) and rows_of(contexts)
    return resolve_contexts(contexts) if is_named else chosen_contexts(contexts)


def disable() -> None:
    """Leave functions and models that are made from now on to plain Theano and Keras; earlier ones stay as they are."""
    Enabled.in_force = None
    take_cores_as_mapped(False)


@functools.lru_cache(None)
def _divide_models():
    import_hooks.at_import('after', 'keras', _found_keras)


def _found_keras(keras):
    """Divide the models of the Keras that was just imported, unless it is on another backend.

    The functions of a Keras without hooks are divided as functions of Theano.
    """
    backend = keras_versions.backend()
    if backend == 'theano' and keras_versions.is_hooked():
        importlib.import_module(FOR_MODELS).divide_models()
    elif backend != 'theano' and Enabled.in_force is not None:
        Enabled.in_force.tell('this script uses Keras on %s: its models are not changed' % backend)
