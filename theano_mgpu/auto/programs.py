"""The programs of a `theano.function` of `enable`: one for each way to take its arguments as a batch."""
from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import io_toposort

from ..errors import GraphError
from ..graph.graph import n_axes
from ..graph.theano_functions import builds_graphs
from ..parallel_function import ParallelFunction
from ..plan import CannotCut
from ..runtime.batches.arguments import axes_for_samples
from ..runtime.batches.data_set_slices import Slices, along
from ..runtime.batches.free_batch_size import written_lengths
from ..runtime.building import NotWanted
from .data_sets import BatchWay, DataSets, fits, fits_at_once, has_data, is_apart, is_of_parameters, may_be_apart
from .definition import Refusal

REFUSALS = 6  # ways to take the batch that are analysed
MOST_AXES = 4    # axes of an argument along which samples are sought: of (factors, time, samples) the third one
PATTERNS = 1000  # patterns of lengths that are told apart
EACH = 64        # calls of which each may bring other slices; after them, calls 128, 256, 512, … may


class BatchFinder:
    """The knowledge of which arguments of a function have samples; `outputs` include new values of shared variables.

    The `slices` are inputs that slice a batch from shared data sets.
    """

    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updated: Collection[Any]) -> None:
        self._inputs = inputs
        self.slices = Slices(inputs, outputs, updated)
        self._graph, self._updated = outputs, updated
        self._shapes: list[Any] = []  # of the first call

    def __bool__(self) -> bool:
        """Return whether the function can have a batch at all."""
        return bool(self.slices) or any(map(axes_for_samples, self._inputs))

    def ways(self, values: Sequence[Any]) -> Iterator[BatchWay]:
        """Yield ways to take arguments as a batch: the likely ones, the likeliest one first, and then others.

        Each is exact if the graph can be divided that way; they differ in cost.
        """
        shapes = [getattr(value, 'shape', ())[:axes_for_samples(variable)]
                  for variable, value in zip(self._inputs, values)]
        self._shapes = self._shapes or shapes
        sliced = self.slices.shapes(values)
        likely = sorted({next(iter(lengths.values())) for lengths in sliced.values()}, reverse=True)
        others = [length for lengths in sliced.values() for length in lengths.values()]
        if not any(length > 1 for length in likely):  # no batch, but such as a row of a table
            likely, others = _likeliest(shapes, self._shapes)
        seen = []
        for length in [*likely, *others]:
            slices = along(length, sliced)
            for most_axes, preferred in itertools.product((MOST_AXES, 2), (0, 1)):
                axes = [next((axis for axis in [preferred, 1 - preferred, *range(2, most_axes)]
                              if shape[axis:axis + 1] == (length,)), None) for shape in shapes]
                number = length if length in self._numbers else None  # None: the program is for any length
                key = tuple(axes), tuple(map(slices.get, sliced)), number
                if length > 1 and key not in seen:
                    seen.append(key)
                    yield BatchWay({v: axis for v, axis in zip(self._inputs, axes) if axis is not None}, length, key,
                                   is_likely=length in likely)

    @functools.cached_property
    def _numbers(self):
        """The lengths that the graph may have as numbers, or that states have."""
        states = (v.container.unwatched.shape[0] for v in self._updated if axes_for_samples(v))
        return written_lengths(self._graph).union(states)


def _lengths(value):
    """Return the lengths of an argument that are known at once."""
    shape = getattr(value, 'shape', None)
    if shape is not None:
        return shape[:2]
    return len(value) if isinstance(value, (list, tuple)) else None


def _likeliest(shapes, before):
    """Return the lengths that most arguments have along one of their first two axes, first axes first; and features.

    Lengths of the first axes of other matrices come after them: the length that most arguments share may be a number of
    features, as in ``dot(x, w) + b``, where x alone has samples. Where most share a length of 1, there may be one
    sample, unless the other length was another one `before`. Where all sequences of a batch have as many time steps as
    their targets, most arguments share this number: a length of second axes that several share comes after it.
    """
    sizes = dict.fromkeys(itertools.chain(*[shape[:1] for shape in shapes], *[shape[1:2] for shape in shapes]))
    shared = {size: sum(size in shape[:2] for shape in shapes) for size in sizes}
    likely = [size for size in sizes if shared[size] == max(shared.values())]
    matrices = [shape for shape, other in zip(shapes, before)
                if len(shape) > 1 and (max(likely) > 1 or shape[0] != other[0])]
    likely = [size for size in dict.fromkeys(likely + [shape[0] for shape in matrices])
              if not _is_of_features(size, shapes)]
    second = [shape[1] for shape in shapes if len(shape) > 1]
    return likely, [*[shape[1] for shape in matrices if shape[0] > 1 and _is_of_features(shape[1], shapes)],
                    *[size for size in dict.fromkeys(second) if second.count(size) > 1 and size not in likely]]


def _is_of_features(size, shapes):
    """Return whether only one matrix has rows of this length, which is then most likely a number of features."""
    return [shape[1] for shape in shapes if len(shape) == 2].count(size) == 1 and \
        not any(size in shape[:1] or len(shape) > 2 and size in shape[:2] for shape in shapes)


class Programs:
    """The ParallelFunctions of a graph, and the one that computes the usual batch: the `step` that was chosen last.

    A choice by the first calls does not hold for ever. Where a batch is along other axes than before, or where there is
    a batch for the first time, another program is made for it. ``make(inputs, outputs, updates, **options)`` does so.

    Where no arguments can be divided, the batch are the rows of `DataSets`, if `seeks_data`. These come before
    arguments of less memory, such as a vector of parameters, whose parts would meet before the data are read.
    """

    @builds_graphs
    def __init__(self, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                 updates: Mapping[SharedVariable, theano.Variable], make: Callable[..., ParallelFunction],
                 seeks_data: bool = True) -> None:
        self._graph, self._make = (inputs, outputs, updates), make
        self._finder = BatchFinder(inputs, [*outputs, *updates.values()], updates)
        self.data = DataSets(inputs, [*outputs, *updates.values()] if seeks_data else [], updates)
        self.guesses = not self._finder  # its data sets alone may be its batch, which only looks like one
        self._steps: dict[Any, ParallelFunction] = {}  # by the key of a BatchWay
        self._refused: set[Any] = set()
        self._unwanted: set[Any] = set()  # keys of ways in which replicas exchange too early, and of data sets
        self._costs: dict[Any, tuple[int, ...]] = {}  # of likely ways: what replicas do not divide
        # No data set was tried yet.
        self._is_new = seeks_data and (has_data([*outputs, *updates.values()]) or bool(self.data.chains))
        self._patterns: set[Any] = set()  # of lengths of calls
        self._calls = 0
        self.step: ParallelFunction | None = None

    @property
    def may_divide(self) -> bool:
        """Return whether a later call may have a batch that is divided."""
        return self._is_new or bool(self._finder) and len(self._refused) < REFUSALS

    def is_news(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call may show a batch that no call before has shown, by the lengths of its arguments.

        The lengths of slices take longer to find out than a small function takes. So they are news of the first calls,
        and then of ever fewer ones.
        """
        if self.step is None and self._finder.slices:
            self._calls += 1
            if self._calls <= EACH or self._calls & (self._calls - 1) == 0:
                return True
        pattern = tuple([_lengths(arg) for arg in args]), tuple([(name, _lengths(kwargs[name])) for name in kwargs])
        if pattern in self._patterns or len(self._patterns) > PATTERNS:
            return False
        self._patterns.add(pattern)
        return True

    def choose(self, values: Sequence[Any]) -> bool:
        """Choose the step of the likeliest batch of a call; keep the present one if there is no other.

        Return whether another step was chosen. Raise a Refusal if there is a batch that cannot be divided, and this was
        not known.
        """
        if self.step is not None:
            ways = list(self._finder.ways(values))
            own = [way.length for way in ways if self._steps.get(way.key) is self.step]
            if not own or own[0] == ways[0].length:
                return False
        return self.change(values)

    def change(self, values: Sequence[Any]) -> bool:
        """Choose the step of a batch that the present one cannot compute, see `choose`."""
        return self._take(self._step_for(values))

    def choose_made(self, values: Sequence[Any]) -> bool:
        """Choose a step that was made for a batch such as this one; return whether it is another one."""
        return self._take(next((self._steps[way.key] for way in self._finder.ways(values) if way.key in self._steps),
                               None))

    def _take(self, step):
        """Take a step, if there is one; return whether it is another one than before."""
        before, self.step = self.step, step or self.step
        return self.step is not before

    def whole(self, **options: Any) -> ParallelFunction:
        """Make the ParallelFunction that divides no batch."""
        return self._make(*self._graph, samples={}, whole=True, **options)

    def forget_refusals(self) -> None:
        """Forget the refused ways, so that they are analysed, and refused, again."""
        self._refused.clear()
        self._unwanted.clear()
        self._patterns.clear()

    def _step_for(self, values):
        """Return the ParallelFunction for a batch such as this one; None without one, or for a known refusal."""
        refusal, by = None, ''
        for way, wanted in self._tries(values):
            known = self._unwanted if way.n_bytes else self._refused
            if way.key in known or (way.key, wanted) in self._unwanted or \
                    not way.n_bytes and len(self._refused) >= REFUSALS:
                continue
            try:
                if way.key not in self._steps:
                    self._steps[way.key] = self._made(way, values, wanted)
                return self._steps[way.key]
            except NotWanted:
                self._unwanted.add((way.key, wanted))
            except GraphError as error:
                if refusal is None or way.n_bytes and not by:
                    refusal, by = error, ' by ' + str(way) if way.n_bytes else ''
                known.add(way.key)
        if refusal is None:
            return None
        if isinstance(refusal.__cause__, CannotCut):  # the text says all that the errors before this one do
            raise Refusal('it cannot be computed in parts%s: %s' % (by, refusal.__cause__)) from None
        raise Refusal(str(refusal)) from refusal

    def _tries(self, values):
        """Yield ways to take a batch, each with a predicate for its program or None, the best one first."""
        # Once data sets were divided, they are: an update that comes later makes no batch of parameters.
        ways = [] if self.step is not None and self.step.inputs.data else list(self._finder.ways(values))
        likely, others = [[way for way in ways if way.is_likely is each] for each in (True, False)]
        data = self.data.ways(values)
        self._is_new = False
        if not data or data[0].n_bytes <= sum(getattr(value, 'nbytes', 0) for value in values):
            longest = sorted(likely, key=lambda way: -way.length)
            yield from itertools.product([*longest, *others], [self._is_divided] if len(ways) > 1 else [None])
            ways = sorted(likely, key=lambda way: self._costs.get(way.key, ()))  # a refused way has none
            yield from itertools.product([*ways, *data[:1]], [None])
        else:
            yield from itertools.product(likely, [is_apart])
            yield from itertools.product(data, [fits_at_once])
            made = self.data.ways(values, of_expressions=True)
            yield from itertools.product(made, [fits_at_once])
            yield from itertools.product([way for way in likely if not is_of_parameters(way)], [None])
            yield from itertools.product([*data, *made], [fits])
            yield from itertools.product(likely, [may_be_apart])
            yield from itertools.product(others, [self._is_divided])
        yield from self.data.tries_of_chains()

    def _is_divided(self, sets, way, program):
        """Return whether replicas divide all costly ops, in one stage, and outputs are made of no arrays after that.

        In a way that is not likely, fewer costly ops have to stay whole than in each of the likely ones.
        """
        late = [output.variable for output in program.outputs[:len(self._graph[1])] if output.reduction is None]
        arrays = [v for node in io_toposort([], late) for v in node.outputs if n_axes(v)]
        if way.is_likely:
            self._costs[way.key] = program.n_whole, len(program.stages), len(arrays)
        fewest = [1] if way.is_likely else [n_whole for n_whole, *_ in self._costs.values()]
        return program.is_divided and len(program.stages) < 2 and not arrays and \
            all(program.n_whole < n for n in fewest)

    def _made(self, way, values, wanted):
        inputs, outputs, updates = self._graph
        graph, samples = self.data.graph(way) if way.n_bytes else ([*outputs, *updates.values()], way.axes)
        return self._make(inputs, graph[:len(outputs)], dict(zip(updates, graph[len(outputs):])), samples=samples,
                          length=way.length, example=values, must_divide=True,
                          wanted=wanted and functools.partial(wanted, self.data, way))
