"""A `theano.function` with steps that surround each call: the ledger, and checkpoints."""
from __future__ import annotations

import time
from typing import Any, Callable

from theano.compile.function_module import Function

from ..checks.ledger import ledger
from ..comm.communicator import Communicator
from ..comm.failures import failing_together
from ..devices import leases
from ..errors import named
from ..graph.updates import pairs
from ..runtime.divided_function import DividedFunction
from ..runtime.steps import Computed, Steps
from .definition import Definition
from .steps import length_of


class SurroundedFunction:
    """A callable in place of a `theano.function` that takes each call through a list of steps.

    The last step computes: `divided`, the callable that would be in place of the function, or without one the function
    itself.
    """

    def __init__(self, function: Function, compute: Callable[[Any], Computed] | None = None) -> None:
        self._function, self.divided = function, function.mgpu_divided
        self.steps = Steps(compute or self._compute)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        return self.steps.run((args, kwargs)).outputs

    def _compute(self, call):
        args, kwargs = call
        return Computed(self._function.plain_call(*args, **kwargs) if self.divided is None else
                        self.divided(args, kwargs))

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function in the same way; it has lines of its own if it has updates."""
        if self.divided is not None:
            self.divided.copied(function, swap, delete_updates)
        if self.steps.account is not None and not delete_updates:
            steps_of(function).record(self.steps.account.of_copy(function.mgpu_name, swap or {}))


def steps_of(function: Any) -> Steps:
    """Return the steps around each call of a function, of Theano or over contexts; a TypeError for another object."""
    if isinstance(function, DividedFunction):
        return function.steps
    if not isinstance(function, Function):
        raise TypeError('%s is no function of theano.function, mgpu.function or training_function' % named(function))
    if not isinstance(function.mgpu_divided, SurroundedFunction):
        function.mgpu_divided = SurroundedFunction(function)
    return function.mgpu_divided.steps


def source_of(function: Any) -> Any:
    """Return the outputs and updates of a function, before it was optimised: one of Theano, or over contexts."""
    return function.built.source if isinstance(function, DividedFunction) else Definition(function)


def divide_always(function: Any) -> None:
    """Have each call of a function with `steps_of` run over the contexts, if it can, whatever is faster."""
    divided = None if isinstance(function, DividedFunction) else function.mgpu_divided.divided
    if divided is not None:
        divided.divide_always()


def record(function: Function, arguments: dict[str, Any], name: str, ranks: Communicator) -> None:
    """Have the calls of a new function write to the ledger, if there is one, and if they update shared variables."""
    with failing_together(ranks):  # a function that is not divided may be made on some ranks only
        book = ledger(Communicator())
    given = [variable for variable, _ in pairs(arguments['updates'])]
    updated = list(dict.fromkeys([*given, *source_of(function).updates]))
    if book is not None and updated:
        steps_of(function).record(book.account(name, updated, ranks, together=False))


def count_calls(function: Function) -> None:
    """Have each call of a function count as a batch of this process."""
    def count(call, proceed):
        began, computed = time.perf_counter(), proceed(call)
        samples = max([0, *(length_of([each]) for each in (*call[0], *call[1].values()))])
        leases.count(samples, time.perf_counter() - began)
        return computed
    steps_of(function).surround([count])


def leave_to_plain(function: Any) -> None:
    """Have plain Theano make all calls of a function from now on; the steps that surround them stay."""
    if isinstance(function.mgpu_divided, SurroundedFunction):
        function.mgpu_divided.divided = None
    else:
        del function.mgpu_divided
