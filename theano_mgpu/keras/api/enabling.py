"""Keras models under `enable`: each that is compiled runs over several contexts."""
from __future__ import annotations

import functools
import weakref

from ...auto.divided_model import DividedModel, divided_model_of, of_user, set_divided_model
from ...auto.enabled import Enabled
from ...compat import keras_versions
from ..hooks import patches
from ..hooks.methods import LOOPS, switch_methods_once
from ..models import KINDS, check_compile
from .given_model import check_built, name_of
from .multi_gpu import multi_gpu_model
from .verification import verify_batch


@functools.lru_cache(None)
def divide_models() -> None:
    """Have each model that is compiled, or that predicts, divided while an `enable` is in force."""
    switch_methods_once()
    # A model that is not built yet is compiled by its first batch, within the loop. A class of the user's need not call
    # Model's __init__, so that attributes may be missing, and may have a __getattr__ that knows any name.
    patches.switch_keras_methods(LOOPS, applies=lambda model: Enabled.in_force and not _is_built(model))
    patches.switch_keras_methods({'compile': _compile}, applies=lambda model: 'template' not in vars(model))
    patches.switch_keras_methods({'_make_%s_function' % kind: _make_function for kind in KINDS},
                                 applies=lambda model: Enabled.in_force)
    patches.replace_multi_gpu_model(multi_gpu_model, applies=lambda: Enabled.in_force)


def _compile(original, self, *args, **kwargs):
    before = divided_model_of(self)
    set_divided_model(self, None)
    original(self, *args, **kwargs)
    if Enabled.in_force and _is_built(self):
        _attach(Enabled.in_force, self, before)


def _is_built(model):
    return getattr(model, 'built', True)


def _make_function(original, self):
    if 'template' in vars(self):
        divided_model_of(self).count_in(Enabled.in_force.report)
    elif not keras_versions.is_compiled(self) and not divided_model_of(self):
        _attach(Enabled.in_force, self)
    original(self)


def _attach(enabled, model, before=None):
    """Run a model over the contexts; `before` is its DividedModel from an earlier `compile`, if any."""
    name = name_of(of_user(model))
    try:
        check_built(model, 'enable')
        check_compile(model)
    except ValueError as error:
        why = 'left to plain Keras: %s' % error
        if not any((usage.name, usage.why) == (name, why) for usage in enabled.report.usages):
            enabled.report.usage(name).run_on([], why)
        enabled.notify(name, 'is left to plain Keras; its functions run like any other of Theano: %s' % error)
        return
    contexts = enabled.contexts()
    contexts = sum(contexts, []) if isinstance(contexts[0], list) else contexts
    divided = DividedModel(name, contexts, enabled, functools.partial(_verified, weakref.ref(of_user(model))),
                           before if before and before.enabled else None)
    divided.count_in(enabled.report)
    set_divided_model(model, divided)


def _verified(model, function, inputs, contexts):
    """Return the VerificationReport of a batch of a model, given by a weak reference."""
    return verify_batch(keras_versions.inner(model()), function.kind, function.arguments['params'], function.updates,
                        inputs, contexts)
