"""`enable` and `disable`: every Keras model of the process over several contexts."""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

from keras.models import Model

from ...auto.enabled import Enabled
from ...auto.model_report import Report
from ...auto.parallel_state import ParallelState, of_user, parallel_state_of, set_parallel_state
from ...compat import keras_versions
from ...errors import warn
from ..hooks import patches
from ..hooks.methods import LOOPS, switch_methods_once
from ..models import KINDS, check_compile
from .arguments import check_built, chosen_contexts, name_of
from .multi_gpu import multi_gpu_model
from .verification import check_alone, verify_batch


def enable(gpus: Any = None, strict: bool = False, verify: bool = False, always: bool = False,
           tell: Callable[[str], None] = warn) -> Report:
    """Run every Keras model that is compiled from now on over several contexts.

    Its train, test and predict functions then divide each batch, as in a model of `multi_gpu_model`. The rest of the
    model is Keras's own, so that a script needs no change. Batches that one device computes faster are left to it:
    short ones to plain Keras, longer ones to the first context. The first batches of each length measure which.
    Where one process has contexts on the CPU, all are left to plain Keras.
    Models that are not compiled predict over contexts, too. Models that were compiled before stay as they are.
    ``theano-mgpu run`` enables it for a whole script.

    Parameters
    ----------
    gpus : int, list of int or str, callable, or None
        How many contexts to use, or which ones, as for `multi_gpu_model`; None for all. A callable returns them, and is
        called with each model.
    strict : bool
        Raise a GraphError where there is else one warning: for a model that cannot give exactly the results of one
        device, or that cannot run over contexts.
    verify : bool
        On the first batch of each model, compare one step on one device with one on the contexts (see `verify`), and
        print the verification report to stderr. For a model that predicts first, the outputs are compared.
    always : bool
        Divide each batch that can be divided, without measuring: every run of a script then gives the same rounding.
    tell : callable
        Called with each message for the user; by default it issues an MgpuWarning.

    Returns
    -------
    Report
        The work of the models so far, and the messages about them. Print it.

    Raises
    ------
    ContextError
        If `gpus` asks for contexts that do not exist.

    Notes
    -----
    A model is left to plain Keras, with a warning, if it reads its data from a tensor or is compiled with options that
    contexts do not take. A model whose first batch fails when it is divided, and succeeds as a whole, runs on the first
    context; with `strict` the error is raised.

    Batches are divided without measuring in a fit with a Checkpoint, for models that are placed or computed in
    micro-batches, with mgpu.executor=serial or threads, and where processes on several hosts train together, or each
    with data or a part of the update of its own. Processes of one host compute a batch that is not
    divided each by itself, and compare their losses after 1, 2, 4, ..., 256 such batches, after each 256 further ones,
    and at the end of an epoch. If the losses differ, all go on from the state of the first one, and take its batches.

    Examples
    --------
    >>> import theano_mgpu, keras, numpy as np
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> report = enable(always=True)  # contexts on the CPU gain nothing
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,))])
    >>> model.compile('sgd', 'mse')
    >>> history = model.fit(np.ones((20, 4)), np.ones((20, 3)), batch_size=8, verbose=0)
    >>> report.usages[-1].samples, [context.name for context in report.usages[-1].contexts]
    ({'train': 20}, ['dev0', 'dev1'])
    >>> disable()
    """
    if verify:
        check_alone()
    report = Report()
    enabled = EnabledModels(gpus, report, strict, verify, always, tell)
    if not callable(gpus):
        chosen_contexts(gpus)  # an error now
    _patch_keras_once()
    EnabledModels.in_force = enabled
    return report


def disable() -> None:
    """Leave models that are compiled from now on to plain Keras; those that were compiled before stay as they are."""
    EnabledModels.in_force = None


@functools.lru_cache(None)
def _patch_keras_once():
    switch_methods_once()
    # A model that is not built yet is compiled by its first batch, within the loop. A class of the user's need not call
    # Model's __init__, so that attributes may be missing, and may have a __getattr__ that knows any name.
    patches.switch_keras_methods(LOOPS, applies=lambda model: EnabledModels.in_force and not _is_built(model))
    patches.switch_keras_methods({'compile': _compile}, applies=lambda model: 'template' not in vars(model))
    patches.switch_keras_methods({'_make_%s_function' % kind: _make_function for kind in KINDS},
                                 applies=lambda model: EnabledModels.in_force)
    patches.replace_multi_gpu_model(multi_gpu_model, applies=lambda: EnabledModels.in_force)


def _compile(original, self, *args, **kwargs):
    before = parallel_state_of(self)
    set_parallel_state(self, None)
    original(self, *args, **kwargs)
    if EnabledModels.in_force and _is_built(self):
        EnabledModels.in_force.attach(self, before)


def _is_built(model):
    return getattr(model, 'built', True)


def _make_function(original, self):
    state, report = parallel_state_of(self), EnabledModels.in_force.report
    if 'template' in vars(self):
        state.usage = state.usage if state.usage in report.usages else report.usage(self.name)
    elif not keras_versions.is_compiled(self) and not state:
        EnabledModels.in_force.attach(self)
    original(self)


class EnabledModels(Enabled):
    """The Keras models that `enable` has found, and the arguments of `enable`."""

    in_force: EnabledModels | None = None  # the one that takes part in the making of models at present

    def __init__(self, gpus: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gpus = gpus

    def attach(self, model: Model, before: ParallelState | None = None) -> None:
        """Run a model over the contexts; `before` is its state from an earlier `compile`, if any."""
        name = name_of(of_user(model))
        try:
            check_built(model, 'enable')
            check_compile(model)
        except ValueError as error:
            if not any(usage.is_left and usage.name == name for usage in self.report.usages):
                left = self.report.usage(name)
                left.why, left.is_left = 'left to plain Keras: %s' % error, True
            self.notify(name, 'is left to plain Keras, on the host or the device of the flag "device": %s' % error)
            return
        usage = before.usage if before and before.enabled else self.report.usage(name)
        set_parallel_state(model, ParallelState(name, chosen_contexts(self.gpus), usage, self,
                                                functools.partial(_verified, weakref.ref(of_user(model)))))


def _verified(model, function, inputs, contexts):
    """Return the VerificationReport of a batch of a model, given by a weak reference."""
    return verify_batch(keras_versions.inner(model()), function.kind, function.arguments['params'], function.updates,
                        inputs, contexts)
