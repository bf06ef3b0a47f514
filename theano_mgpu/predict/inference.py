"""A graph for inference over copies of its shared variables, which computes one batch, or several that are joined."""
from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..devices.context_map import HOST
from ..errors import BatchError, GraphError
from ..graph.analysis import Gather
from ..graph.partition import chosen_branches
from ..graph.placement.propagation import own_place
from ..graph.placement.tags import placed_on
from ..graph.random_streams import is_random_state
from ..graph.rewrites import substitute
from ..graph.theano_functions import builds_graphs
from ..graph.updates import with_givens
from ..options import Options
from ..runtime.batch import Batch
from ..runtime.batches.arguments import no_samples, sample_axes
from ..runtime.building import warn_of_refusals
from ..runtime.divided_function import DividedFunction
from ..runtime.replicas.replicated import copy_on, replicated
from .groups import Group


class InferenceFunction(DividedFunction):
    """A graph for inference over copies of its shared variables, with the values of one moment.

    Random streams go on from call to call, in the copies of their states.

    Attributes
    ----------
    copies : dict of SharedVariable to SharedVariable
        The copies, by the user's variables.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable], givens: Any,
                 broadcast: Sequence[Any], **options: Any) -> None:
        if not sample_axes(inputs, broadcast=broadcast):
            raise no_samples(inputs)
        self.copies, outputs, updates = _over_copies(outputs, givens)
        self._joined = self._joined_ahead = 1  # the batches in the present call, and in the next one
        super().__init__(inputs, outputs, updates, Options(broadcast=broadcast, no_default_updates=True, sharded=False,
                                                           **options))
        warn_of_refusals(self.built, self.options)

    def take(self, variables: Sequence[SharedVariable], values: Sequence[Any]) -> None:
        """Take other values of some variables for the next call."""
        with self.lock:
            for variable, value in zip(variables, values):
                replicated(self.copies[variable]).give(value)

    def _build(self, options: Options) -> None:
        super()._build(options)
        program = self.built.program
        self._has_rows_alone = program.is_divided and not program.every_exchange and not program.updated and all(
            output.reduction == Gather(0) for output in program.outputs)
        self._reads_numbers = not set(program.numbers).isdisjoint(ancestors(program.in_stages))

    def joins(self, lengths: Sequence[int]) -> bool:
        """Return whether a call can compute batches of these lengths, each as if it were alone."""
        if len(lengths) < 2 or not self._has_rows_alone:
            return len(lengths) < 2
        if not self._reads_numbers:
            return sum(lengths) > 0
        return len(set(lengths)) == 1 and _has_whole_batches(self.built.splitter.shares, len(lengths), lengths[0])

    def compute(self, group: Group, following: Callable[[], Group | None]) -> list[Any]:
        """Return the outputs of a group; while it is computed, ``following()``, the next one, is sent to the devices.
        """
        def arguments():
            after = following()  # which may come of a call of this function
            self._joined, self._joined_ahead = len(group.lengths), len(after.lengths) if after else 1
            return after.arrays if after and not after.error else None
        with self.lock, self.look_ahead.asking(arguments, is_apart=True):
            self._joined = len(group.lengths)
            return self.hooks.run((group.arrays, {})).outputs

    def _prepare(self, args: Sequence[Any]) -> tuple[Sequence[Any], Batch] | None:
        present, self._joined = self._joined, self._joined_ahead
        try:
            return super()._prepare(args)
        finally:
            self._joined = present

    def split(self, values: Any, states: Mapping[SharedVariable, np.ndarray] = {},
              lengths: Sequence[int] | None = None) -> Batch:
        batch = super().split(values, states, lengths)
        if self._joined > 1 and self._reads_numbers:
            self._tell_apart(batch, batch.split.samples // self._joined)
        return batch

    def _tell_apart(self, batch, length):
        """Tell each replica the numbers of its own batch alone, of this length: of samples, and of its first one."""
        if any(piece.start % length or piece.stop - piece.start != length for piece in batch.split.pieces):
            raise BatchError('the shares of the devices are no whole batches')  # any more: batches are computed alone
        program, (whole, *of_shard) = batch.split.program, self.plan.program.numbers
        batch.slots[program.common[whole]] = np.array(length, 'int64')
        for variable, number in zip(of_shard, (length, 0)):
            for slot in program.of_shards[variable]:
                batch.slots[slot] = np.array(number, 'int64')


@functools.lru_cache(maxsize=64)
def _has_whole_batches(shares, number, length):
    """Return whether each replica computes one batch at once, where a number of batches of a length are joined."""
    return shares.slices([number * length]) == [[(i * length, (i + 1) * length)] for i in range(number)]


@builds_graphs
def _over_copies(outputs, givens):
    """Return copies of the shared variables of a graph, by variable, and the outputs and updates over the copies."""
    with placed_on(None):
        outputs, _ = with_givens(outputs, {}, givens, no_default_updates=True)
        outputs, updates = with_givens(chosen_branches(outputs), {}, None)  # of streams that only training draws from
        states = [variable for variable in updates if not is_random_state(variable)]
        if states:
            raise GraphError('a call changes %s (default_update), which the next one reads, and a Predictor computes '
                             'several batches at a time: use mgpu.function, which computes one after the other'
                             % ', '.join(map(str, states)))
        whole = [*outputs, *updates.values()]
        copies = {variable: _copy_of(variable) for variable in ancestors(whole) if isinstance(variable, SharedVariable)}
        whole = substitute(whole, copies)
        return copies, whole[:len(outputs)], dict(zip(map(copies.get, updates), whole[len(outputs):]))


def _copy_of(variable):
    """Return a shared variable on the host with the value that another one has now, and with its place."""
    copy = copy_on(HOST, variable, replicated(variable).value())
    copy.tag.is_rng, copy.tag.mgpu_place = is_random_state(variable), own_place(variable)
    return copy
