"""The ways of a batch into a graph: arguments, slices of shared data sets, and states with a row a sample."""
from __future__ import annotations

import contextlib
from typing import Any, Mapping, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ...devices.transfers import fetch
from ...errors import GraphError, LengthError, named
from ...graph.graph import check_inputs, host_view
from ...graph.partition import partition
from ...graph.random_streams import is_random_state
from ...graph.rewrites import substitute
from ...options import Options
from ...plan import CannotCut, Program, undivided
from .arguments import Arguments, no_samples, sample_axes
from .data_set_rows import DataSet, stand_in
from .data_set_slices import Slices, along
from .free_batch_size import FreeBatchSize
from .sub_batches import batch_length


class BatchInputs:
    """The variables by which the samples of a batch enter a graph."""

    def __init__(self, inputs: Sequence[Any], options: Options, sharded: bool) -> None:
        axes = sample_axes(inputs, options.samples, options.broadcast)
        self.data = {host_view(v): DataSet(v) for v in axes if isinstance(v, SharedVariable)}
        self.arguments = Arguments(inputs, axes, options.allow_input_downcast)
        # Stand-ins for shared variables with a row a sample: data sets, and states that a step changes.
        self.rows: dict[SharedVariable, theano.Variable] = {v: each.stand_in for v, each in self.data.items()}
        self.only_length: int | None = None  # the graph has it as a number: batches may have no other
        self._options, self._sharded = options, sharded

    def find_slices(self, outputs: Sequence[theano.Variable], updates: dict[SharedVariable, theano.Variable]
                    ) -> tuple[list[theano.Variable], dict[SharedVariable, theano.Variable]]:
        """Find the slices of data sets that are the batch, and return the graph with samples along axis 0 of inputs."""
        inputs, options = self.arguments.inputs, self._options
        whole = substitute(list(outputs) + list(updates.values()), self.arguments.replacements)
        check_inputs(inputs, whole)
        self.slices = Slices(inputs, whole, updates, self._sharded)
        if options.example is not None:
            self.slices.take(along(options.length, self.slices.shapes(self.arguments.bind(options.example, {}))))
        elif any(self.arguments.split) or options.whole:
            self.slices.take({})
        self.slices.leave(self.arguments.with_samples)
        if options.strategy.data_sets_on_host:
            self.slices.take_on_host()
        for variable in self.data.keys() & updates.keys():  # states, which are the batch
            del self.data[variable]
        if not options.whole and not any(self.arguments.split) and not self.slices and not self.rows:
            raise no_samples(inputs)
        return whole[:len(outputs)], dict(zip(updates, whole[len(outputs):]))

    @property
    def given(self) -> list[theano.Variable]:
        """The values that enter a step: the arguments, slices that are taken on the host, and states of samples."""
        return self.arguments.inputs + self.slices.sent + list(self.rows.values())

    @property
    def with_samples(self) -> list[theano.Variable]:
        """The given values that have samples, along axis 0."""
        return self.arguments.with_samples + self.slices.sent + list(self.rows.values())

    def undivided(self, outputs: list[theano.Variable]) -> Program:
        """Return the Program of the graph as one replica computes it, with the whole batch."""
        return undivided(substitute(outputs, {v: self.slices.replacements[v] for v in self.slices.on_host}))

    def divide(self, outputs: list[theano.Variable], updated: list[SharedVariable]) -> Program:
        """Divide the graph, whose last outputs are new values.
        """
        inputs = self.arguments.with_samples + list(self.slices.stand_ins.values()) + list(self.rows.values())
        outputs = substitute(outputs, {**self.slices.replacements, **self.rows})
        refusals: list[CannotCut] = []
        for in_indices in (False, True):
            free = FreeBatchSize(inputs, self._options.length, in_indices)
            freed = free(outputs)
            if refusals and not free.found_in_indices:
                break
            try:
                program, rows = self._with_states(inputs, freed, updated)
                program = self.slices.expressed(program)
            except CannotCut as error:
                refusals.append(error)
            else:
                self.rows.update(rows)
                self.only_length = free.length if free.found else None
                return program
        if self._sharded or self._options.must_divide:
            raise GraphError('%s%s cannot be computed in parts: %s' % (
                'each process has samples of its own, but ' * self._sharded, self._options.name or 'a function',
                refusals[0])) from refusals[0]
        raise refusals[0]

    def _with_states(self, inputs, outputs, updated):
        """Return the Program, and the states that come in with the batch, since they have a row a sample."""
        length = self._options.length
        read, n_outputs = set(ancestors(outputs)), len(outputs) - len(updated)

        def states(program):
            """Return states whose new values have samples, and the axis; a state that nothing reads is only stored."""
            new = zip(updated, program.outputs[n_outputs:])
            return {v: output.reduction.axis for v, output in new if output.has_rows and v in read}

        def with_rows(rows):
            return partition(inputs + list(rows.values()), substitute(outputs, rows), not self._sharded)

        # Chains that go on without the batch, as in persistent contrastive divergence.
        chains = {v: stand_in(v, 'rows of ' + named(v)) for v, new in zip(updated, outputs[n_outputs:])
                  if v in read and not is_random_state(v) and set(inputs).isdisjoint(ancestors([new])) and
                  getattr(v.get_value(borrow=True), 'shape', ())[:1] == (length,)}
        if chains:
            with contextlib.suppress(CannotCut):  # they have as many rows by chance
                program = with_rows(chains)
                if states(program) == dict.fromkeys(chains, 0):
                    return program, chains
        first = program = partition(inputs, outputs, not self._sharded)
        rows = {}
        try:
            while not states(program).keys() <= rows.keys():
                rows.update((v, stand_in(v, 'rows of ' + named(v))) for v in states(program) if v not in rows)
                program = with_rows(rows)
            if states(program) != dict.fromkeys(rows, 0):
                raise CannotCut('the states of samples, %s, do not have them along axis 0' % named(rows))
        except CannotCut:
            if self._sharded:
                raise
            return first, {}  # in which every replica has all of each state
        return program, rows

    def states(self) -> dict[SharedVariable, Any]:
        """Return the values of the shared variables with a row a sample, on the host; of a data set the DataSet."""
        return {variable: self.data[variable].latest() if variable in self.data else
                fetch(variable.get_value(borrow=True)) for variable in self.rows} if self.rows else {}

    def length(self, values: Sequence[np.ndarray],
               states: Mapping[SharedVariable, Any] | None = None) -> int:
        """Return the number of samples of a batch; raise a BatchError if it is not one, or arguments do not agree."""
        if self._options.whole:
            return 1
        lengths, names = self.arguments.lengths(values), self.arguments.names_of_lengths
        if self.slices.stand_ins or states:
            sliced, states = self.slices.lengths(values), states or {}
            lengths += [*sliced.values(), *[value.shape[0] for value in states.values()]]
            if len(set(lengths)) > 1 or not lengths[0]:
                names = [*names, *[str(self.slices.stand_ins[v]) for v in sliced],
                         *['the state ' * (v not in self.data) + named(v) for v in states]]
        # A process slices nothing once it is through its part of the data; the others may go on.
        length = batch_length(lengths, names, 0 if self._sharded and self.slices else 1)
        if self.only_length is not None and self.only_length != length:
            raise LengthError('a batch of %d samples was given, but the graph has the length of its batches, %d, as a '
                              'number' % (length, self.only_length))
        return length
