"""The sentinel of the flag ``mgpu.check``: replicas and ranks that drift apart are an error, and so is a NaN."""
from __future__ import annotations

import functools
from typing import Any, Callable, Mapping

import numpy as np

from ..comm.activities import AGREE, CHECK
from ..devices.transfers import fetch
from ..errors import DriftError, NonFiniteError
from ..utils.values import checksum, differing_bits, sides
from .inspection import inspected, not_finite, place_of
from .ranks import gathered

SENT = 1 << 24  # bytes of the largest array that ranks send each other to say where it differs


class Sentinel:
    """The checks of the steps of one Built function, most of them at every k-th step."""

    def __init__(self, built: Any, name: str | None, every: int) -> None:
        self._built, self._name, self._every = built, name or 'a function', every
        self._ranks, self._plan = built.executable.communicator, built.executable.plan
        self._data_sets = built.inputs.slices.data_sets()

    def compare(self, step: int) -> None:
        """Compare values that have to be the same on each context and rank; raise a DriftError if copies differ."""
        if step % self._every:
            return
        # Each rank alone has the state of a divided update.
        variables = [each for each in self._built.alike if not each.divided and each.variable not in self._data_sets and
                     (self._ranks.size > 1 or len(each.current()) > 1)]
        # Checksums take a fifth of the time of digests, and tell any two values apart that differ in one place.
        copies = [{name: checksum(value) for name, value in self._values(each).items()} for each in variables]
        ours = [checksum([list(each.values())[:1] for each in copies]),
                any(len(set(each.values())) > 1 for each in copies)]
        firsts, differ = self._ranks.handshake((CHECK, self._built.number, step), ours).T
        if differ.any() or (firsts != firsts[0]).any():
            for variable, checksums in zip(variables, gathered(self._ranks, copies)):
                if len(set(checksums.values())) > 1:
                    raise DriftError(self._drift(variable, checksums, step))

    def _values(self, variable: Any) -> dict[str, Any]:
        """Return the values of the copies of a variable on this rank, by the names of their places."""
        return {place_of(self._ranks, context): copy.container.storage[0]
                for copy, context in variable.current().items()}

    def _drift(self, variable: Any, checksums: Mapping[str, int], step: int) -> str:
        """Return the text of a DriftError; every rank has to make the call."""
        arrays, = gathered(self._ranks, [{
            name: np.array(fetch(value)) for name, value in self._values(variable).items()
            if hasattr(value, 'dtype') and value.size * value.dtype.itemsize <= SENT}])
        usual, others, is_known = sides(checksums)
        text = '%s has another value on %s than on %s, %s of %s' % (
            variable.variable, ' and '.join(others), ' and '.join(usual),
            'at step %d' % step if self._every == 1 else 'between steps %d and %d' % (step - self._every, step),
            self._name)
        if len(arrays) == len(checksums):
            text += ': ' + differing_bits(arrays[others[0]], arrays[usual[0]])
        wrong = '%s is probably wrong' % others[0] if is_known else 'Which of them is wrong is not known'
        return ('%s. %s. Start again from a checkpoint before that step. If it happens again, test the memory of this '
                'device or host, and leave it out' % (text, wrong))

    def check(self, step: int, result: Any, again: Callable[[Callable[..., Any]], None]) -> None:
        """Check the loss of a step, and its new values if it is one of the k-th, before they are committed.

        If one is infinite or not a number, ``again(compute)`` runs the step once more, and every rank raises a
        NonFiniteError; ``compute`` is `inspected` for it.
        """
        subject = self._subject(step, result) if self._built.updated else None
        if not self._ranks.handshake((AGREE,), [subject is not None]).any():
            return
        result.new_values.roll_back()
        subject = '%s in step %d of %s' % (subject or 'a value of another rank is not finite', step, self._name)
        again(functools.partial(inspected, subject, self._ranks))
        raise NonFiniteError('%s. Computed once more, op by op, all values were finite: a device may be faulty, or the '
                             'sum over the replicas overflows. No value was changed' % subject)

    def _subject(self, step: int, result: Any) -> str | None:
        """Return the value that is not finite, in words."""
        for i, (output, value) in enumerate(zip(self._plan.results, result.outputs)):
            if not output.has_rows and not_finite(value) is not None:
                name = 'the loss' if self._plan.params and not i else output.variable.name or 'output %d' % i
                return '%s is %s' % (name, 'not finite' if np.ndim(value) else value)
        for variable in self._built.updated if step % self._every == 0 else ():
            copies = [variable.variable, *variable.copies.values()]
            new = next((copy for copy in copies if result.new_values.has_replaced(copy)), None)
            if new is not None and not_finite(new.container.storage[0]) is not None:
                return 'the new value of %s is not finite' % variable.variable
        return None
