"""The steps that surround each call of a function, from the caller on, until the last one computes it.

A step is a callable ``step(call, proceed)`` that returns a Computed. So does ``proceed(call)``, which goes on with the
next step. The last step, ``compute(call)``, computes the call.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from ..devices.context_map import Context
from .state.ledger import Account


class Computed(NamedTuple):
    """The results of a call.

    Attributes
    ----------
    outputs : object
        What the call returns.
    samples : int
        How many the batch has on all ranks.
    contexts : list of Context
        Where the batch ran.
    step : DividedFunction or None
        The function that ran the batch over contexts; None for plain Theano.
    """

    outputs: Any
    samples: int = 0
    contexts: Sequence[Context] = ()
    step: Optional[Any] = None


class Steps:
    """The list of steps of a function; it takes a call through them.

    Parameters
    ----------
    compute : callable
        The last step.
    steps : list of callable
        Those before it.
    """

    def __init__(self, compute: Callable[[Any], Computed], steps: Sequence[Callable[..., Computed]] = ()) -> None:
        self._compute = compute
        self.set(steps)

    def __call__(self, call: Any) -> Computed:
        return self._run(call)

    def set(self, steps: Sequence[Callable[..., Computed]]) -> None:
        """Set the steps before the last one."""
        self.before: List[Callable[..., Computed]] = list(steps)
        self._run = functools.reduce(lambda proceed, step: functools.partial(step, proceed=proceed), reversed(steps),
                                     self._compute)


def record(account: Account, call: Any, proceed: Callable[..., Computed]) -> Computed:
    """Write a call to the ledger: a step, once the first argument is bound."""
    account.begin()
    computed = proceed(call)
    account.note()
    return computed
