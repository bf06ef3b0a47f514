"""Comparisons of a function over contexts with one device."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

from ...errors import MgpuError
from ...graph.repeatable import unrepeatable_in
from .comparison import Verification, unchanged
from .report import VerificationReport


def verified(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tolerance: float | None = None
             ) -> VerificationReport:
    """Return the report of a call of a DividedFunction; see its `verify`."""
    if function.sharded:
        raise MgpuError('verify compares with one device, which has the whole batch: here each process has samples '
                        'of its own. Verify in one process, without mpirun')
    outputs, updates = function.built.definition
    names = [('output', output.name or 'number %d' % i) for i, output in enumerate(outputs)]
    names += [('new value', str(variable)) for variable in updates]

    def compute():
        with unchanged(each.variable for each in function.updated):
            return function.locked_step((args, kwargs)) + [each.value() for each in function.updated]
    with function.lock:
        verification = Verification(function.arguments.inputs, names, [*outputs, *updates.values()],
                                    function.options.mode)
        return verification.report(function.arguments.bind(args, kwargs), compute, function.contexts, tolerance)


def is_divided_for(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether several contexts compute a call that one device could compute."""
    if function.sharded or len(function.mesh.places) > 1:
        return not function.sharded and not unrepeatable_in(function.built.definition.whole)
    length = function.inputs.length(function.arguments.bind(args, kwargs))
    return len(sum(function.built.splitter.rounds(length), [])) > 1
