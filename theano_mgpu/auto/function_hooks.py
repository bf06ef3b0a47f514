"""The hooks that surround each call of a function, of Theano or over contexts: the ledger, counts, and checkpoints."""
from __future__ import annotations

import time
from typing import Any

from theano.compile.function_module import Function

from ..checks.ledger import ledger
from ..comm.communicator import Communicator
from ..comm.rank_errors import failing_together
from ..devices import leases
from ..errors import named
from ..graph.updates import pairs
from ..runtime.call_hooks import CallHooks
from ..runtime.divided_function import DividedFunction
from .definition import Definition
from .dispatched import dispatched_of
from .found import longest


def hooks_of(function: Any) -> CallHooks:
    """Return the hooks around each call of a function, of Theano or over contexts; a TypeError for another object."""
    if isinstance(function, DividedFunction):
        return function.hooks
    if not isinstance(function, Function):
        raise TypeError('%s is no function of theano.function, mgpu.function or training_function' % named(function))
    return dispatched_of(function).hooks


def source_of(function: Any) -> Any:
    """Return the outputs and updates of a function, before it was optimised: one of Theano, or over contexts."""
    return function.built.source if isinstance(function, DividedFunction) else Definition(function)


def record(function: Function, arguments: dict[str, Any], name: str, ranks: Communicator) -> None:
    """Have the calls of a new function write to the ledger, if there is one, and if they update shared variables."""
    with failing_together(ranks):  # a function that is not divided may be made on some ranks only
        book = ledger(Communicator())
    given = [variable for variable, _ in pairs(arguments['updates'])]
    updated = list(dict.fromkeys([*given, *source_of(function).updates]))
    if book is not None and updated:
        hooks_of(function).record(book.account(name, updated, ranks, together=False))


def count_calls(function: Function) -> None:
    """Have each call of a function count as a batch of this process."""
    def count(call, proceed):
        began, computed = time.perf_counter(), proceed(call)
        leases.count(longest(call), time.perf_counter() - began)
        return computed
    hooks_of(function).surround([count])
