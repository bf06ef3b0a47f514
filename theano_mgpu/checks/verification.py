"""The comparison of a batch on one device, by plain Theano, with the same batch over contexts."""
from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import theano
from scipy import sparse

from ..devices.context_map import HOST, Context, describe
from ..errors import PREFIX, GraphError, MgpuError, named
from ..graph.graph import fetched_values, host_graph, shared_variables
from ..graph.random_streams import is_random_state
from ..graph.repeatable import unrepeatable_in
from ..graph.rewrites import substitute
from ..graph.theano_functions import plain_function
from ..utils import mpi_environment
from ..utils.progress import passing_bar
from ..utils.tables import Printed, counted, table
from ..utils.values import TOLERANCE, checksum, coarsest, largest, relative_difference


class Row(NamedTuple):
    """One line of a `VerificationReport`.

    Attributes
    ----------
    kind : str
        loss, metric, gradient, weight, running statistic or optimizer for a model; output or new value for a function.
    name : str
    size : int
        Count of numbers.
    difference : float
        The largest one, relative to the largest value on one device; for gradients, relative to the largest of all.
    """

    kind: str
    name: str
    size: int
    difference: float


class VerificationReport(Printed):
    """The result of `verify`. Print it: it is a table.

    Attributes
    ----------
    rows : list of Row
    contexts : list of Context
    tolerance : float
    arbitrary : list of str
        Names of values that are not compared, since a change of the inputs in their last digit changes them as much.
    passed : bool
        Whether no difference is above the tolerance.
    """

    def __init__(self, rows: Sequence[Row], contexts: Sequence[Context], tolerance: float,
                 arbitrary: Sequence[str] = ()) -> None:
        self.rows, self.contexts, self.tolerance, self.arbitrary = rows, contexts, tolerance, arbitrary
        self.passed = all(row.difference <= tolerance for row in rows)

    def show(self, name: str, strict: bool = False) -> None:
        """Print it to stderr under a name; with `strict`, raise a GraphError unless it passed."""
        print('%s%s: %s' % (PREFIX, name, self), file=sys.stderr)
        if strict and not self.passed:
            raise GraphError('%s does not give the same answer on several contexts (%s): see the report above'
                             % (name, describe(self.contexts)))

    def __str__(self) -> str:
        rows = [[row.kind, row.name, str(row.size), '%.1e%s' % (
            row.difference, '' if row.difference <= self.tolerance else '  <-- differs')] for row in self.rows]
        kinds = {row.kind for row in self.rows}
        computation = 'prediction' if kinds <= {'output'} else 'evaluation' if kinds <= {'loss', 'metric'} else 'step'
        lines = ['one %s on one device and %s (%s)'
                 % (computation, counted(len(self.contexts), 'context'), describe(self.contexts)),
                 table([['', '', 'numbers', 'largest relative difference'], *rows], right={2})]
        if self.arbitrary:
            lines.append('not compared, since a change of the inputs in their last digit changes it as much: %s'
                         % ', '.join(self.arbitrary))
        worst = max([row.difference for row in self.rows], default=0)
        verdict = 'same answer' if self.passed else 'NOT the same answer'
        lines.append('%s: the largest difference is %.1e, the tolerance %.1e' % (verdict, worst, self.tolerance))
        return '\n'.join(lines)


def check_alone() -> None:
    """Raise an MgpuError if several processes train together."""
    if mpi_environment.trains_together():
        raise MgpuError('verify compares one device with the contexts of one process: run it without launch or mpirun')


def verified(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}, tolerance: float | None = None,
             names: Sequence[tuple[str, str]] | None = None, states: Sequence[Any] = ()) -> VerificationReport:
    """Return the report of a call of a DividedFunction; see its `verify`. Nothing is changed.

    Parameters
    ----------
    names : list of (str, str), optional
        The kind and the name of each output, and of each state, see `Row`; by default of the outputs and new values.
    states : list of SharedVariable
        The variables whose values after the call are compared, if there are names.
    """
    if function.sharded:
        raise MgpuError('verify compares with one device, which has the whole batch: here each process has samples '
                        'of its own. Verify in one process, without launch or mpirun')
    outputs, updates = function.built.definition
    changed = [each.variable for each in function.updated]
    new = dict(zip(changed, updates.values()))
    if names is None:
        names = [('output', output.name or 'number %d' % i) for i, output in enumerate(outputs)]
        names, states = names + [('new value', named(variable)) for variable in updates], changed
    with function.lock:
        values = function.arguments.bind(args, kwargs)
        with passing_bar(2, 'sides', 'verify') as bar:
            one = OneDevice(function.arguments.inputs, [*outputs, *(new.get(each, each) for each in states)],
                            function.options.mode)
            reference = one.results(*values)
            bar.update(1)
            with unchanged(changed), function.dividing():
                many = function.locked_step((args, kwargs)) + [variable.get_value() for variable in states]
        return _report(names, one, values, reference, many, [each for each in function.contexts if each != HOST],
                       tolerance or TOLERANCE[one.dtype])


def is_divided_for(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether several contexts compute a call that one device could compute."""
    if function.sharded or len(function.mesh.places) > 1:
        return not function.sharded and not unrepeatable_in(function.built.definition.whole)
    length = function.inputs.length(function.arguments.bind(args, kwargs), function.inputs.states())
    return len(sum(function.built.splitter.shares.rounds(length), [])) > 1


class OneDevice:
    """The results of a graph by plain Theano on the host: a function of that name; `dtype` is the coarsest one in it.

    New values are further results, so that nothing is changed.
    """

    def __init__(self, inputs: Sequence[theano.Variable], results: Sequence[theano.Variable], mode: Any) -> None:
        graph = host_graph(results)
        graph = substitute(graph, fetched_values(graph))
        self._shared = shared_variables(graph)
        self.dtype = coarsest(getattr(each.type, 'dtype', None) for each in [*inputs, *self._shared, *graph])
        self.results = plain_function(inputs, graph, mode=theano.compile.get_mode(mode).excluding('gpuarray_opt'),
                                      no_default_updates=True, on_unused_input='ignore', allow_input_downcast=True)

    def nudged(self, values: Sequence[Any], seed: int) -> list[Any]:
        """Return the results when inputs and shared variables differ in their last digit."""
        random = np.random.RandomState(seed)
        variables = [variable for variable in self._shared if not is_random_state(variable)]
        with unchanged(variables):
            for variable in variables:
                variable.set_value(_nudge(variable.get_value(), random))
            return self.results(*[_nudge(value, random) for value in values])


def _report(names, one, values, reference, many, contexts, tolerance):
    """Return the report; values that rounding alone changes as much are not compared."""
    rows, arbitrary = _rows(names, reference, many), []
    if any(row.difference > tolerance for row in rows):
        nudged = zip(*[_rows(names, reference, one.nudged(values, seed)) for seed in range(3)])
        changes = [max(other.difference for other in others) for others in nudged]
        arbitrary = [row for row, change in zip(rows, changes) if tolerance < row.difference < 10 * change and
                     change > 10 * np.finfo(one.dtype).eps]  # more than rounding, however small the tolerance
    return VerificationReport([row for row in rows if row not in arbitrary], contexts, tolerance,
                              [row.name for row in arbitrary])


def _rows(names, one, many):
    """Return the rows of a report on the values of one device, and of several contexts.

    A gradient that is zero in theory, as for a bias before a batch normalisation, is pure rounding. So differences
    of gradients are relative to the largest gradient of all.
    """
    one, many = list(map(_numbers, one)), map(_numbers, many)
    least = max([largest(value) for (kind, _), value in zip(names, one) if kind == 'gradient'], default=0)
    return [Row(kind, name, np.size(value), relative_difference(other, value, least if kind == 'gradient' else 0))
            for (kind, name), value, other in zip(names, one, many)]


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
