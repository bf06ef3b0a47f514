"""The comparison of a batch on one device, by plain Theano, with the same batch over contexts."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import theano
from scipy import sparse

from ...compat.theano_functions import plain_function
from ...devices.context_map import Context
from ...graph.graph import host_graph, on_host, shared_variables, substitute
from ...graph.random_streams import is_random_state
from ...utils.checksums import checksum
from ...utils.progress import passing_bar
from .report import TOLERANCE, Row, VerificationReport, largest, relative_difference

ROUNDING = 'a change of the inputs in their last digit changes it as much'


class Verification:
    """A comparison of the results of a function over contexts with the results of plain Theano on the host.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    new_values : dict of SharedVariable to theano.Variable
    mode
        As for `theano.function`.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 new_values: Mapping[Any, theano.Variable], mode: Any) -> None:
        graph = host_graph([*outputs, *new_values.values()])
        views = [variable for variable in shared_variables(graph) if hasattr(variable.tag, 'stands_for')]
        graph = substitute(graph, {view: on_host(view.tag.stands_for) for view in views})  # values on a device, fetched
        self._names = [('output', output.name or 'number %d' % i) for i, output in enumerate(outputs)]
        self._names += [('new value', str(variable)) for variable in new_values]
        self._shared = shared_variables(graph)
        self._tolerance = _tolerance(list(inputs) + self._shared + graph)
        # New values are further outputs: the call changes nothing.
        self._plain = plain_function(inputs, graph, mode=theano.compile.get_mode(mode).excluding('gpuarray_opt'),
                                      no_default_updates=True, on_unused_input='ignore', allow_input_downcast=True)

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
        tolerance = tolerance or self._tolerance
        one, many = on_both_sides('verify', lambda: self._plain(*values), compute)
        rows = self._rows(one, many)
        arbitrary = []
        if any(row.difference > tolerance for row in rows):
            nudged = [self._rows(one, self._nudged(values, seed)) for seed in range(3)]
            arbitrary = [row for row, *others in zip(rows, *nudged)
                         if tolerance < row.difference < 10 * max(other.difference for other in others)]
        return VerificationReport([row for row in rows if row not in arbitrary], contexts, tolerance,
                                  [row.name for row in arbitrary], ROUNDING)

    def _rows(self, one, many):
        return rows_of(self._names, list(map(_numbers, one)), map(_numbers, many))

    def _nudged(self, values, seed):
        """Return the results of one device when inputs and shared variables differ in their last digit."""
        before = [(variable, variable.get_value()) for variable in self._shared if not is_random_state(variable)]
        random = np.random.RandomState(seed)
        try:
            for variable, value in before:
                variable.set_value(_nudge(value, random))
            return self._plain(*[_nudge(value, random) for value in values])
        finally:
            for variable, value in before:
                variable.set_value(value)


def on_both_sides(title: str, on_one_device: Callable[[], Any], over_contexts: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the results of a computation on one device, and over contexts; both run under a progress bar."""
    with passing_bar(2, 'sides', title) as bar:
        one = on_one_device()
        bar.update(1)
        return one, over_contexts()


def rows_of(names: Sequence[tuple[str, str]], one: Sequence[Any], many: Iterable[Any]) -> list[Row]:
    """Return the rows of a VerificationReport.

    A gradient that is zero in theory, as for a bias before a batch normalisation, is pure rounding. So differences of
    gradients are relative to the largest gradient of all.

    Parameters
    ----------
    names : list of (str, str)
        The kind and the name of each value.
    one : list of ndarray
    many : iterable of ndarray
        The values of one device, and of several contexts.
    """
    gradient = max([largest(value) for (kind, _), value in zip(names, one) if kind == 'gradient'], default=0)
    return [Row(kind, name, np.size(value), relative_difference(other, value, gradient if kind == 'gradient' else 0))
            for (kind, name), value, other in zip(names, one, many)]


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


def _tolerance(variables):
    dtypes = {getattr(variable.type, 'dtype', None) for variable in variables}
    return max([TOLERANCE[dtype] for dtype in dtypes.intersection(TOLERANCE)], default=TOLERANCE['float64'])
