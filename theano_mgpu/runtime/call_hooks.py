"""The hooks that surround each call of a function, from the caller on, until the call is computed.

A hook is a callable ``hook(call, proceed)`` that returns a Computed. So does ``proceed(call)``, which goes on with the
next hook. After the last one, ``compute(call)`` computes the call.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ..checks.ledger import Account
from ..devices.context_map import Context


class Computed(NamedTuple):
    """The results of a call: what it returns, the samples of the batch on all ranks, and the contexts where it ran.

    The `step` is the DividedFunction that ran it over contexts; None for plain Theano.
    """

    outputs: Any
    samples: int = 0
    contexts: Sequence[Context] = ()
    step: Optional[Any] = None


class CallHooks:
    """The list of hooks of a function: the outer ones, the account of a ledger, the inner ones, at last `compute`.

    ``run(call)`` takes a call through them, and returns the Computed.
    """

    def __init__(self, compute: Callable[[Any], Computed], inner: Sequence[Callable[..., Computed]] = (),
                 outer: Sequence[Callable[..., Computed]] = (), account: Account | None = None) -> None:
        self.compute, self.inner, self.outer, self.account = compute, list(inner), list(outer), account
        self._chain()

    @property
    def are_any(self) -> bool:
        """Return whether any hook surrounds a call."""
        return bool(self.outer or self.inner or self.account)

    def surround(self, outer: Sequence[Callable[..., Computed]]) -> None:
        """Set the first hooks."""
        self.outer = list(outer)
        self._chain()

    def record(self, account: Account | None) -> None:
        """Write the calls to an account of a ledger from now on, in place of the one before."""
        self.account = account
        self._chain()

    def _chain(self):
        recording = [] if self.account is None else [functools.partial(record, self.account)]
        self.run = functools.reduce(lambda proceed, hook: functools.partial(hook, proceed=proceed),
                                    reversed([*self.outer, *recording, *self.inner]), self.compute)


def record(account: Account, call: Any, proceed: Callable[..., Computed]) -> Computed:
    """Write a call to the ledger: a hook, once the first argument is bound."""
    account.begin()
    computed = proceed(call)
    account.note()
    return computed
