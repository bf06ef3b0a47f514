"""The division of a graph among replicas, with states that come in with the batch, and lengths that are numbers."""
from __future__ import annotations

from typing import NamedTuple, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..graphs.graph import host_type, is_sparse, substitute
from ..options import Flags
from ..plan import CannotCut, Program, partition
from ..replicas.random_streams import is_random_state
from .data_sets import Slices
from .free_batch_size import FreeBatchSize


class Division(NamedTuple):
    """The division of a graph.

    Attributes
    ----------
    program : Program
    rows : dict of SharedVariable to theano.Variable
        States with a row a sample, and the variable that stands for each in the graph.
    length : int or None
        The one length that batches may have; None for any.
    """

    program: Program
    rows: dict[SharedVariable, theano.Variable]
    length: int | None


def divided(inputs: list[theano.Variable], slices: Slices, outputs: Sequence[theano.Variable],
            updated: Sequence[SharedVariable], length: int | None, sharded: bool, flags: Flags) -> Division:
    """Divide a graph.

    Parameters
    ----------
    inputs : list of theano.Variable
        The inputs with samples along axis 0.
    slices : Slices
    outputs : list of theano.Variable
        The last of them are new values.
    updated : list of SharedVariable
        The variables that they are new values of.
    length : int or None
        Samples of a batch, if they are known. Where the graph has that number, as in ``x.reshape((20, 1, 28, 28))``,
        it is replaced.
    sharded : bool
        Whether each process has samples of its own: then no replica can have all of a state of samples.
    flags : Flags
        `batch_statistics` and `random` count.

    Returns
    -------
    Division

    Raises
    ------
    CannotCut
        If the graph cannot be computed exactly from shards.
    """
    inputs = inputs + list(slices.stand_ins.values())
    outputs = substitute(outputs, slices.replacements)
    refusals: list[CannotCut] = []
    for in_indices in (False, True):
        free = FreeBatchSize(inputs, length, in_indices)
        freed = free(outputs)
        if refusals and not free.found_in_indices:
            break
        try:
            program, rows = _with_states(inputs, freed, updated, length, sharded, flags)
            return Division(slices.expressed(program), rows, free.length if free.found else None)
        except CannotCut as error:
            refusals.append(error)
    raise refusals[0]


def _with_states(inputs, outputs, updated, length, sharded, flags):
    """Return the Program, and the states that come in with the batch, since they have a row a sample."""
    options = flags.batch_statistics, flags.random
    read, n_outputs = set(ancestors(outputs)), len(outputs) - len(updated)

    def states(program):
        """Return states whose new values have samples, and the axis; a state that nothing reads is only stored."""
        new = zip(updated, program.outputs[n_outputs:])
        return {v: output.reduction.axis for v, output in new if output.has_rows and v in read}

    def with_rows(rows):
        return partition(inputs + list(rows.values()), substitute(outputs, rows), *options)

    # Chains that go on without the batch, such as that of persistent contrastive divergence.
    chains = {v: _stand_in(v) for v, new in zip(updated, outputs[n_outputs:])
              if v in read and not is_random_state(v) and length is not None and _rows_of(v) == length and
              set(inputs).isdisjoint(ancestors([new]))}
    if chains:
        try:
            program = with_rows(chains)
            if states(program) == dict.fromkeys(chains, 0):
                return program, chains
        except CannotCut:
            pass  # they have as many rows by chance
    first = program = partition(inputs, outputs, *options)
    rows = {}
    try:
        while not states(program).keys() <= rows.keys():
            rows.update((v, _stand_in(v)) for v in states(program) if v not in rows)
            program = with_rows(rows)
        if states(program) != dict.fromkeys(rows, 0):
            raise CannotCut('the states of samples, %s, do not have them along axis 0' % ', '.join(map(str, rows)))
    except CannotCut:
        if sharded:
            raise
        return first, {}  # in which every replica has all of each state
    return program, rows


def _stand_in(state):
    type_ = state.type if is_sparse(state) else host_type(state)
    return type_('rows of %s' % state)


def _rows_of(variable):
    """Return the length of a shared variable along axis 0; None for a value without axes."""
    shape = getattr(variable.get_value(borrow=True), 'shape', ())
    return shape[0] if shape else None
