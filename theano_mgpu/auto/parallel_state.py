"""The ParallelState of a Keras model: its contexts and its functions over them, beside the model itself.

A model that has a ParallelState runs over contexts; any other model is plain Keras. `methods` has what differs.
"""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

from ..devices.context_map import Context, describe
from ..errors import in_one_line, warn
from ..runtime.steps import Computed
from .fallback import FAILED
from .steps import count

CANNOT_DIVIDE = 'cannot be computed in parts: '  # why a model is not divided; the reason of the analysis follows

_models: weakref.WeakSet[Any] = weakref.WeakSet()  # the models that have had a ParallelState


class ParallelState:
    """The contexts of a model, and its functions over them.

    Parameters
    ----------
    name : str
        Of the model.
    contexts : list of Context
    tell : callable
        ``tell(name, text)`` tells the user how the model differs from one device; by default it warns.
    strict : bool
        Whether a difference from one device is an error.
    usage : Usage, optional
        Counts the batches of functions that are made for the model.

    Attributes
    ----------
    continued : list of SharedVariable or None
        The states of the optimizer with which the next train function continues.
    functions : dict of str to ModelFunction
        The functions of the package for the model, by kind: 'train', 'test', 'predict'. The model's own attributes may
        be functions of the user's that call these.
    """

    def __init__(self, name: str, contexts: list[Context], tell: Callable[[str, str], None] | None = None,
                 strict: bool = False, usage: Any = None) -> None:
        self.name, self.contexts, self.strict = name, contexts, strict
        self._tell = tell or (lambda name, text: warn('%s %s' % (name, text)))
        self.continued: list[Any] | None = None
        self.usage = usage
        self.functions: dict[str, Any] = {}
        self._refusals: set[str] = set()  # reasons that the user knows

    def notify(self, text: str) -> None:
        """Tell the user how the model differs from one device, by a sentence without its subject, the model's name."""
        self._tell(self.name, text)

    def explain(self, why: str) -> None:
        """Add to the summary why the model does not run over several contexts; the first reason stays."""
        if self.usage is not None:
            self.usage.why = self.usage.why or why

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

    def leaves_all(self) -> bool:
        """Return whether all batches are left to plain Keras, since dividing them gains nothing."""
        return False

    def steps(self, kind: str, function: Any = None) -> list[Callable[..., Computed]]:
        """Return the steps of a function that is made for the model, but for the last one, which computes a batch.

        Parameters
        ----------
        kind : {'train', 'test', 'predict'}
        function : ModelFunction, optional
            The function, unless its last step is plain Keras itself.
        """
        return [] if self.usage is None else [functools.partial(count, self.usage, kind)]


def of_user(model: Any) -> Any:
    """Return the model that the user has: before Keras 2.2, a Sequential has a Model whose functions compute it."""
    sequential = model.__dict__.get('callback_model')
    return sequential if vars(sequential or model).get('model') is model else model


def parallel_state_of(model: Any) -> Any:
    """Return the ParallelState of a model; None for plain Keras."""
    return of_user(model).__dict__.get('_mgpu_parallel_state')


def set_parallel_state(model: Any, state: ParallelState | None) -> None:
    """Set the ParallelState of a model for its next functions; None for plain Keras."""
    model = of_user(model)
    _models.add(model)
    model.__dict__['_mgpu_parallel_state'] = state  # not by setattr: Keras keeps track of a model's attributes


def models_over_contexts() -> list[Any]:
    """List the models of this process that run over contexts."""
    return [model for model in _models if parallel_state_of(model) is not None]
