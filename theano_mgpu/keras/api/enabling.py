"""`enable` and `disable`: every Keras model of the process over several contexts."""
from __future__ import annotations

import functools
import re
import weakref
from typing import Any, Callable

import theano
from keras.models import Model

from ...auto.chooser import LengthChooser
from ...auto.enabled import Enabled
from ...auto.model_report import Report, Usage
from ...auto.parallel_state import ParallelState, of_user, parallel_state_of, set_parallel_state
from ...auto.steps import Choice, on_devices
from ...comm.choice import choose_ranks
from ...compat import keras_versions
from ...devices.context_map import Context
from ...errors import GraphError, warn
from ...graph.placement.propagation import is_placed
from ...options import Options
from ...runtime.steps import Computed
from ..hooks import patches
from ..hooks.methods import LOOPS, switch_methods_once
from ..models import KINDS, check_compile
from .arguments import check_built, chosen_contexts
from .multi_gpu import multi_gpu_model
from .verification import check_alone, verify_batch

ON_CPU = ('are on the CPU, where dividing a batch gains nothing, since Python computes one part at a '
          'time: models run whole. To use several cores, start processes (theano-mgpu launch). To divide all the '
          'same, pass always=True (theano-mgpu run --always)')

VERIFIED_BY = {'predict': {'predict', 'test', 'train'}, 'test': {'test', 'train'}, 'train': {'train'}}


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
    gpus : int, list of int or str, or None
        How many contexts to use, or which ones, as for `multi_gpu_model`; None for all.
    strict : bool
        Raise a GraphError where there is else one warning: for a model that cannot give exactly the results of one
        device, or that cannot run over contexts; and at once for flags with which results differ from one device.
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
    GraphError
        With `strict`, for a flag with which results differ from one device.

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
    chosen_contexts(gpus)
    _patch_keras_once()
    enabled.begin()
    return report


def disable() -> None:
    """Leave models that are compiled from now on to plain Keras; those that were compiled before stay as they are."""
    EnabledModels.end()


@functools.lru_cache(None)
def _patch_keras_once():
    switch_methods_once()
    # A model that is not built yet is compiled by its first batch, within the loop.
    patches.switch_keras_methods(LOOPS, applies=lambda model: EnabledModels.in_force and not model.built)
    patches.switch_keras_methods({'compile': _compile}, applies=lambda model: not hasattr(model, 'template'))
    patches.switch_keras_methods({'_make_%s_function' % kind: _make_function for kind in KINDS},
                                      applies=lambda model: EnabledModels.in_force)
    patches.replace_multi_gpu_model(multi_gpu_model, applies=lambda: EnabledModels.in_force)


def _compile(original):
    @functools.wraps(original)
    def compile(self, *args, **kwargs):
        before = parallel_state_of(self)
        set_parallel_state(self, None)
        original(self, *args, **kwargs)
        if EnabledModels.in_force and self.built:
            EnabledModels.in_force.attach(self, before)
    return compile


def _make_function(original):
    @functools.wraps(original)
    def make(self):
        state, report = parallel_state_of(self), EnabledModels.in_force.report
        if hasattr(self, 'template'):
            state.usage = state.usage if state.usage in report.usages else report.usage(self.name)
        elif not keras_versions.is_compiled(self) and not state:
            EnabledModels.in_force.attach(self)
        original(self)
    return make


class EnabledModels(Enabled):
    """The Keras models that `enable` has found, and the arguments of `enable`.

    Parameters
    ----------
    gpus
        As for `enable`.
    report : Report
    *arguments
        Further arguments of an Enabled.
    """

    report: Report

    def __init__(self, gpus: Any, report: Report, *arguments: Any) -> None:
        super().__init__(report, *arguments)
        self.gpus = gpus
        self._told: set[tuple[str, str]] = set()

    def attach(self, model: Model, before: ParallelState | None = None) -> None:
        """Run a model over the contexts; `before` is its state from an earlier `compile`, if any."""
        name = of_user(model).name
        try:
            check_built(model, 'enable')
            check_compile(model)
        except ValueError as error:
            if not any(usage.is_left and usage.name == name for usage in self.report.usages):
                left = self.report.usage(name)
                left.why, left.is_left = 'left to plain Keras: %s' % error, True
            self.notify(name, 'is left to plain Keras, on the host or the device of the flag "device": %s' % error)
            return
        usage = before.usage if isinstance(before, EnabledState) else self.report.usage(name)
        set_parallel_state(model, EnabledState(self, model, usage, chosen_contexts(self.gpus)))

    def notify(self, name: str, text: str) -> None:
        """Tell the user about a model once, and note it in the report, whatever the numbers in the text.

        With `strict`, raise a GraphError.
        """
        whole, key = '%s %s' % (name, text), (name, re.sub(r'\d', '', text))
        if self.strict:
            raise GraphError(whole)
        if key not in self._told:
            self._told.add(key)
            self.report.notes.append(whole)
            self.tell(whole)


class EnabledState(ParallelState):
    """The ParallelState of a model that `enable` has found."""

    def __init__(self, enabled: EnabledModels, model: Model, usage: Usage, contexts: list[Context]) -> None:
        super().__init__(of_user(model).name, contexts, enabled.notify, enabled.strict, usage)
        self.enabled = enabled
        self._model = weakref.ref(of_user(model))
        if len(contexts) == 1 and choose_ranks(None).size == 1:
            self.explain('there is one context')
        self._verified: set[str] = set()

    def leaves_all(self) -> bool:
        ranks = choose_ranks(None)
        if ranks.size > 1 or on_devices(self.contexts) or not self._may_leave_batches(ranks):
            return False
        if len(self.contexts) > 1:
            self.explain('contexts on the CPU gain nothing in one process')
            self.enabled.notify('the contexts', ON_CPU)
        return True

    def steps(self, kind: str, function: Any = None) -> list[Callable[..., Computed]]:
        steps = super().steps(kind)
        if self.enabled.verifies:
            steps.insert(0, functools.partial(self._verify, kind))
        ranks = choose_ranks(None)
        if function is not None and self._may_leave_batches(ranks):
            chooser = LengthChooser(ranks, functools.partial(self.usage.whole_below.__setitem__, kind),
                                    times_long=ranks.size == 1 and len(self.contexts) > 1)
            steps.append(Choice(chooser, function, self.contexts))
        return steps

    def _may_leave_batches(self, ranks):
        """Return whether plain Keras may compute a batch.

        No, where something else was asked for, or where it could leave processes with different weights: hosts may
        round differently.
        """
        model = keras_versions.inner(self._model())
        outputs = [model.total_loss] if keras_versions.is_compiled(model) else model.outputs
        flags = theano.config.mgpu
        stays_alike = ranks.size == 1 or (ranks.on_one_host and flags.data != 'sharded' and
                                          flags.update_on != 'sharded' and
                                          theano.config.device == 'cpu')  # GPUs may round differently each time
        return stays_alike and not (self.enabled.always or is_placed(outputs) or Options().in_rounds or
                                    flags.executor in ('serial', 'threads'))

    def _verify(self, kind, inputs, proceed):
        """Show a verification report before the first batch of a kind, unless the report of another kind covers it."""
        if self._verified.isdisjoint(VERIFIED_BY[kind]):
            self._verified.add(kind)
            function = self.functions[kind]
            self.enabled.show_report(self.name, lambda: verify_batch(
                keras_versions.inner(self._model()), kind, function.arguments['params'], function.updates, inputs,
                self.contexts))
        return proceed(inputs)
