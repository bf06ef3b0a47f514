"""Divide a graph among replicas: which states come in with the batch, and what has its length as a number."""
from collections import namedtuple

from theano.gof.graph import ancestors

from ..graphs.graph import host_type, is_sparse, substitute
from ..options import Flags
from ..plan import CannotCut, partition
from ..replicas.random_streams import is_random_state
from .any_length import AnyLength

DEFAULTS = Flags()

Division = namedtuple('Division', 'program rows length')
Division.__doc__ = """How a graph is divided: its Program; the shared variables with a row a sample, and what stands for
each in the graph; the one length that batches may have, or None for any."""


def divided(inputs, slices, outputs, updated, length=None, sharded=False, flags=DEFAULTS):
    """Divide a graph.

    Parameters
    ----------
    inputs : list of theano.Variable
        Those with samples along axis 0.
    slices : Slices
    outputs : list of theano.Variable
        The last of them are new values.
    updated : list of SharedVariable
        What they are new values of.
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
    outputs, refusal = substitute(outputs, slices.replacements), None
    for in_indices in (False, True):
        free = AnyLength(inputs, length, in_indices)
        found = free(outputs)
        if refusal and not free.found_in_indices:
            break
        try:
            program, rows = _with_states(inputs, found, updated, length, sharded, flags)
            return Division(slices.expressed(program), rows, free.length if free.found else None)
        except CannotCut as error:
            refusal = refusal or error
    raise refusal


def _with_states(inputs, outputs, updated, length, sharded, flags):
    """The Program, and the states that come in with the batch, since they have a row a sample."""
    options = flags.batch_statistics, flags.random
    read, n_outputs = set(ancestors(outputs)), len(outputs) - len(updated)

    def states(program):
        """States whose new values have samples along an axis; one that nothing reads is only stored."""
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
    found, rows = states(program), {}
    try:
        while not found.keys() <= rows.keys():
            rows.update((v, _stand_in(v)) for v in found if v not in rows)
            program = with_rows(rows)
            found = states(program)
        if found != dict.fromkeys(rows, 0):
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
    """The length of a shared variable along axis 0; None for what has no axis."""
    shape = getattr(variable.get_value(borrow=True), 'shape', ())
    return shape[0] if shape else None
