"""The comparison of a batch on one device, by plain Theano, with the same batch over contexts."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import theano
from scipy import sparse

from ...devices.context_map import Context
from ...errors import MgpuError
from ...graph.graph import host_graph, on_host, shared_variables, substitute
from ...graph.random_streams import is_random_state
from ...graph.repeatable import unrepeatable_in
from ...utils.checksums import checksum
from ...utils.progress import passing_bar
from ..theano_functions import plain_function
from .report import TOLERANCE, Row, VerificationReport, largest, relative_difference


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
    return len(sum(function.built.splitter.shares.rounds(length), [])) > 1


class Verification:
    """A comparison of the results of a function over contexts with the results of plain Theano on the host.

    Parameters
    ----------
    inputs : list of theano.Variable
    names : list of (str, str)
        The kind and the name of each result, see `Row`.
    results : list of theano.Variable
        Outputs, and new values of shared variables.
    mode, givens
        As for `theano.function`.
    """

    def __init__(self, inputs: Sequence[theano.Variable], names: Sequence[tuple[str, str]],
                 results: Sequence[theano.Variable], mode: Any = None, givens: Any = None) -> None:
        graph = host_graph(results)
        views = [variable for variable in shared_variables(graph) if hasattr(variable.tag, 'stands_for')]
        graph = substitute(graph, {view: on_host(view.tag.stands_for) for view in views})  # values on a device, fetched
        self._names, self._shared = names, shared_variables(graph)
        self._dtype = _coarsest([*inputs, *self._shared, *graph])
        # New values are further outputs: the call changes nothing.
        self._plain = plain_function(inputs, graph, mode=theano.compile.get_mode(mode).excluding('gpuarray_opt'),
                                     givens=givens, no_default_updates=True, on_unused_input='ignore',
                                     allow_input_downcast=True)

    def report(self, values: Sequence[Any], compute: Callable[[], Any], contexts: Sequence[Context],
               tolerance: float | None = None) -> VerificationReport:
        """Return the VerificationReport of a batch.

        Parameters
        ----------
        values : list of ndarray
            The arguments.
        compute : callable
            Returns the outputs and new values of the function over contexts, without changing anything.
        contexts : list of Context
        tolerance : float, optional
            By default the tolerance of the coarsest dtype in the graph.
        """
        tolerance = tolerance or TOLERANCE[self._dtype]
        with passing_bar(2, 'sides', 'verify') as bar:
            one = self._plain(*values)
            bar.update(1)
            many = compute()
        rows = self._rows(one, many)
        arbitrary = []
        if any(row.difference > tolerance for row in rows):
            nudged = zip(*[self._rows(one, self._nudged(values, seed)) for seed in range(3)])
            changes = [max(other.difference for other in others) for others in nudged]
            arbitrary = [row for row, change in zip(rows, changes) if tolerance < row.difference < 10 * change and
                         change > 10 * np.finfo(self._dtype).eps]  # more than rounding, however small the tolerance
        return VerificationReport([row for row in rows if row not in arbitrary], contexts, tolerance,
                                  [row.name for row in arbitrary])

    def _rows(self, one, many):
        """Return the rows of a report on the values of one device, and of several contexts.

        A gradient that is zero in theory, as for a bias before a batch normalisation, is pure rounding. So differences
        of gradients are relative to the largest gradient of all.
        """
        one, many = list(map(_numbers, one)), map(_numbers, many)
        least = max([largest(value) for (kind, _), value in zip(self._names, one) if kind == 'gradient'], default=0)
        return [Row(kind, name, np.size(value), relative_difference(other, value, least if kind == 'gradient' else 0))
                for (kind, name), value, other in zip(self._names, one, many)]

    def _nudged(self, values, seed):
        """Return the results of one device when inputs and shared variables differ in their last digit."""
        random = np.random.RandomState(seed)
        variables = [variable for variable in self._shared if not is_random_state(variable)]
        with unchanged(variables):
            for variable in variables:
                variable.set_value(_nudge(variable.get_value(), random))
            return self._plain(*[_nudge(value, random) for value in values])


@contextlib.contextmanager
def unchanged(variables: Iterable[Any]) -> Iterator[None]:
    """Give shared variables the values back that they had before the ``with`` block."""
    before = [(variable, variable.get_value()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.set_value(value)


def _nudge(value, random):
    """Return an array with its numbers changed in the last digit, except whole ones, such as labels and masks."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != 'f':
        return value
    other = np.nextafter(value, random.choice([-np.inf, np.inf], value.shape).astype(value.dtype))
    return np.where(value == np.round(value), value, other)


def _numbers(value):
    if isinstance(value, np.random.RandomState):
        _, words, *place = value.get_state()
        return np.append(words, place)
    if sparse.issparse(value):
        return value.toarray()
    return value if isinstance(value, (np.ndarray, np.number)) else np.array(checksum(value))


def _coarsest(variables):
    """Return the real dtype of variables that rounds most."""
    dtypes = {getattr(variable.type, 'dtype', None) for variable in variables}
    return max(dtypes.intersection(TOLERANCE), key=TOLERANCE.__getitem__, default='float64')
