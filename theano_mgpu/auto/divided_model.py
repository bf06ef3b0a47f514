"""The DividedModel of a Keras model: its contexts and its functions over them, beside the model itself.

A model that has a DividedModel runs over contexts; any other model is plain Keras.
"""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

import theano

from ..comm.mpi import choose_ranks
from ..devices.context_map import Context, describe
from ..devices.processes import may_fork
from ..errors import in_one_line, warn
from ..graph.placement.propagation import is_placed
from ..options import Flags
from ..runtime.call_hooks import Computed
from .enabled import Enabled
from .fallback import FAILED
from .report import Report, Usage

CANNOT_DIVIDE = 'cannot be computed in parts: '  # why a model is not divided; the reason of the analysis follows
ON_CPU = ('are on the CPU, and no processes can be forked for them, since a GPU is open: models run whole. To use '
          'several cores, start processes (theano-mgpu launch). To divide all the same, pass always=True (theano-mgpu '
          'run --always)')
VERIFIED_BY = {'predict': {'predict', 'test', 'train'}, 'test': {'test', 'train'}, 'train': {'train'}}

_models: weakref.WeakSet[Any] = weakref.WeakSet()  # the models that have had a DividedModel


class DividedModel:
    """The contexts of a model, and its functions over them.

    Attributes
    ----------
    enabled : Enabled or None
        The `enable` that has found the model. It tells the user how the model differs from one device.
    verify : callable
        ``verify(function, inputs, contexts)`` returns the VerificationReport of a first batch.
    continued : list of SharedVariable or None
        The states of the optimizer with which the next train function continues.
    why : str
        Why it does not run over several contexts; '' if it does.
    functions : dict of str to ModelFunction
        By kind: 'train', 'test', 'predict'. The model's own attributes may be functions of the user's that call these.
    """

    def __init__(self, name: str, contexts: list[Context], enabled: Enabled | None = None,
                 verify: Callable[..., Any] | None = None, before: DividedModel | None = None) -> None:
        self.name, self.contexts, self.enabled, self.verify = name, contexts, enabled, verify
        self.strict = enabled is not None and enabled.strict
        self.continued: list[Any] | None = None
        self.functions: dict[str, Any] = {}
        self._report: Report | None = before._report if before else None
        self._usages: dict[str, Usage] = before._usages if before else {}  # by kind
        self.why = ''
        self._refusals: set[str] = set()  # reasons that the user knows
        self._verified: set[str] = set()
        if enabled is not None and len(contexts) == 1 and choose_ranks(None).size == 1:
            self.explain('there is one context')

    @property
    def on_devices(self) -> bool:
        """Return whether any of the contexts is on a device other than the CPU."""
        return any(context.kind != 'cpu' for context in self.contexts)

    def count_in(self, report: Report) -> None:
        """Count the batches of functions that are made from now on in a report."""
        if report is not self._report:
            self._report, self._usages = report, {}

    def usage(self, kind: str) -> Usage:
        """Return the Usage of the function of a kind, in the report if there is one."""
        if kind not in self._usages:
            name = '%s %s' % (self.name, kind)
            self._usages[kind] = Usage(name) if self._report is None else self._report.usage(name)
        if self.why:
            self._usages[kind].explain(self.why)
        return self._usages[kind]

    def notify(self, text: str) -> None:
        """Tell the user how the model differs from one device, by a sentence without its subject, the model's name."""
        if self.enabled is None:
            warn('%s %s' % (self.name, text))
        else:
            self.enabled.notify(self.name, text)

    def explain(self, why: str) -> None:
        """Add to the summary why the model does not run over several contexts; the first reason stays."""
        self.why = self.why or why
        for usage in self._usages.values():
            usage.explain(why)

    def cannot_divide(self, function: Any) -> None:
        """Tell the user that functions run on one context, because they cannot be computed in parts; once a reason."""
        if function.refused not in self._refusals:
            self._refusals.add(function.refused)
            why = CANNOT_DIVIDE + function.refused
            self.explain(why)
            self.notify('runs whole on %s, since it %s' % (describe(function.contexts), why))

    def use_one_replica(self, contexts: list[Context], error: Exception) -> None:
        """Use the contexts of one replica for later functions, since a batch is not divisible."""
        several, self.contexts = self.contexts, contexts
        self.explain(FAILED % in_one_line(error))
        self.notify('runs on %s (%s): its batch succeeds as a whole, and with %d contexts %s'
                    % ('one context' if len(contexts) == 1 else 'one replica', describe(contexts), len(several),
                       FAILED % in_one_line(error)))

    def make_functions_again(self, states: list[Any] | None) -> None:
        """Forget the functions; the next train function continues with states of the optimizer, if there are any."""
        self.functions.clear()
        self.continued = states or self.continued

    def compare(self) -> None:
        """Compare the results that each process has computed by itself, before all compute a batch together."""
        for function in self.functions.values():
            function.compare()

    def leaves_all(self, function: Any) -> bool:
        """Return whether all batches of a ModelFunction are left to plain Keras, since dividing them gains nothing."""
        if choose_ranks(None).size > 1 or self.on_devices or not self.may_leave(function) or \
                len(self.contexts) > 1 and may_fork():
            return False
        assert self.enabled is not None
        if len(self.contexts) > 1:
            self.explain('contexts on the CPU gain nothing in one process, and none can be forked')
            self.enabled.notify('the contexts', ON_CPU)
        return True

    def hooks(self, function: Any) -> list[Callable[..., Computed]]:
        """Return the hooks that surround the batches of a ModelFunction: a verification, and a count."""
        hooks: list[Callable[..., Computed]] = []
        if self.enabled is not None and self.enabled.verifies:
            hooks.append(functools.partial(self._verify, function))
        return [*hooks, self.usage(function.kind).count]

    def may_leave(self, function: Any) -> bool:
        """Return whether plain Keras may compute a batch.

        No, where something else was asked for, or where it could leave processes with different weights: hosts may
        round differently.
        """
        ranks, flags = choose_ranks(None), Flags.now()
        stays_alike = ranks.size == 1 or (ranks.on_one_host and flags.data != 'sharded' and
                                          flags.update_on != 'sharded' and
                                          theano.config.device == 'cpu')  # GPUs may round differently each time
        return self.enabled is not None and stays_alike and not (
            self.enabled.always or is_placed(function.graph) or flags.in_rounds or
            flags.executor in ('serial', 'threads'))

    def _verify(self, function, inputs, proceed):
        """Show a verification report before the first batch of a kind, unless the report of another kind covers it."""
        if self._verified.isdisjoint(VERIFIED_BY[function.kind]):
            self._verified.add(function.kind)
            self.enabled.show_report(self.name, functools.partial(self.verify, function, inputs, self.contexts))
        return proceed(inputs)


def of_user(model: Any) -> Any:
    """Return the model that the user has: before Keras 2.2, a Sequential has a Model whose functions compute it."""
    sequential = model.__dict__.get('callback_model')
    return sequential if vars(sequential or model).get('model') is model else model


def divided_model_of(model: Any) -> Any:
    """Return the DividedModel of a model; None for plain Keras."""
    return of_user(model).__dict__.get('_mgpu_divided_model')


def set_divided_model(model: Any, divided: DividedModel | None) -> None:
    """Set the DividedModel of a model for its next functions; None for plain Keras."""
    model = of_user(model)
    _models.add(model)
    model.__dict__['_mgpu_divided_model'] = divided  # not by setattr: Keras keeps track of a model's attributes


def models_over_contexts() -> list[Any]:
    """List the models of this process that run over contexts."""
    return [model for model in _models if divided_model_of(model) is not None]
