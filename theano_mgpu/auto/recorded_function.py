"""A `theano.function` of `enable` whose steps are written to the ledger."""
from __future__ import annotations

from typing import Any, Callable

from ..comm.alone import Alone
from ..comm.communicator import Communicator
from ..comm.failures import failing_together
from ..graph.updates import pairs
from ..runtime.state.ledger import Account, ledger


class RecordedFunction:
    """A callable in place of a `theano.function` with updates: it writes the new values to the ledger.

    Parameters
    ----------
    function : theano.compile.function_module.Function
    divided : callable or None
        The callable that would be in place of the function: an EnabledFunction, or none for plain Theano.
    account : Account
    """

    def __init__(self, function: Any, divided: Callable[..., Any] | None, account: Account) -> None:
        self._function, self.divided, self._account = function, divided, account

    def __call__(self, args: Any, kwargs: Any) -> Any:
        self._account.begin()
        results = self._function.plain_call(*args, **kwargs) if self.divided is None else self.divided(args, kwargs)
        self._account.note()
        return results

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        """Run a copy of the function in the same way; it has lines of its own if it has updates."""
        if self.divided is not None:
            self.divided.copied(function, swap, delete_updates)  # type: ignore[attr-defined]
        if not delete_updates:
            account = self._account.of_copy(function.mgpu_name, swap or {})
            function.mgpu_divided = RecordedFunction(function, function.mgpu_divided, account)


def record(function: Any, arguments: dict[str, Any], name: str, ranks: Communicator) -> None:
    """Have the calls of a new function write to the ledger, if there is one, and if they update shared variables.

    Parameters
    ----------
    function : theano.compile.function_module.Function
        Its `mgpu_divided` may be set.
    arguments : dict
        The arguments of `theano.function`.
    name : str
    ranks : Communicator
    """
    with failing_together(ranks):  # a function that is not divided may be made on some ranks only
        book = ledger(Alone())
    given = [variable for variable, _ in pairs(arguments['updates'])]
    others = [spec.variable for spec in function.maker.inputs if spec.shared and spec.update is not None]
    updated = [*given, *(variable for variable in others if variable not in given)]
    if book is not None and updated:
        function.mgpu_divided = RecordedFunction(function, function.mgpu_divided,
                                                 book.account(name, updated, ranks, together=False))


def leave_to_plain(function: Any) -> None:
    """Have plain Theano make all calls of a function from now on; they go on in the ledger."""
    if isinstance(function.mgpu_divided, RecordedFunction):
        function.mgpu_divided.divided = None
    else:
        del function.mgpu_divided
