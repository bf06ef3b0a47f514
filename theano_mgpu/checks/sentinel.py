"""The sentinel of the flag ``mgpu.check``: replicas and ranks that drift apart are an error, and so is a NaN.

Where a value is infinite or NaN, a step is computed again, op by op, until an op is found that has made it.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Mapping, NamedTuple, Sequence

import numpy as np
import theano
from theano.gof.graph import Constant
from theano.gof.link import PerformLinker
from theano.scalar import Composite
from theano.tensor.elemwise import Elemwise

from ..comm.activities import AGREE, CHECK
from ..comm.communicator import Communicator
from ..devices.context_map import Context, describe
from ..devices.launcher import Shard
from ..devices.transfers import fetch
from ..errors import DriftError, NonFiniteError, in_one_line, named
from ..graph.traces import layer_of, line_of, nearest_layer
from ..utils.values import checksum, differing_bits, elements, shortened, sides
from .ranks import gathered

SENT = 1 << 24  # bytes of the largest array that ranks send each other to say where it differs
EMPTY = 'AllocEmpty', 'GpuAllocEmpty'  # ops whose results have no values yet
NAMES = 2  # variables near an op that a message names


class Sentinel:
    """The checks of the steps of one Built function, most of them at every k-th step."""

    def __init__(self, built: Any, name: str | None, every: int) -> None:
        self._built, self._name, self._every = built, name or 'a function', every
        self._ranks, self._plan = built.executable.communicator, built.executable.plan
        self._data_sets = [*built.inputs.data, *built.inputs.slices.data_sets()]

    def compare(self, step: int) -> None:
        """Compare values that have to be the same on each context and rank; raise a DriftError if copies differ."""
        if step % self._every:
            return
        # Each rank alone has the state of a sharded update.
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
            named(variable.variable), ' and '.join(others), ' and '.join(usual),
            'at step %d' % step if self._every == 1 else 'between steps %d and %d' % (step - self._every, step),
            self._name)
        if len(arrays) == len(checksums):
            text += ': ' + differing_bits(arrays[others[0]], arrays[usual[0]])
        wrong = '%s is probably wrong' % others[0] if is_known else 'Which of them is wrong is not known'
        return ('%s. %s. Start again from a checkpoint before that step. If it happens again, test the memory of this '
                'device or host, and leave it out' % (text, wrong))

    def check(self, step: int, result: Any, again: Callable[[Callable[..., Any]], Any]) -> None:
        """Check the loss of a step, and its new values if it is one of the k-th, before they are committed.

        If one is infinite or not a number, every rank raises a NonFiniteError: ``again(inspected)`` returns the
        StepAgain of the step.
        """
        subject = self._subject(step, result) if self._built.updated else None
        if not self._ranks.handshake((AGREE,), [subject is not None]).any():
            return
        result.new_values.roll_back()
        subject = '%s in step %d of %s' % (subject or 'a value of another rank is not finite', step, self._name)
        run = again(functools.partial(inspected, subject, self._ranks))
        try:
            run.start()
            run.end()
            self._ranks.handshake((AGREE,))  # raises the error of a rank that has found the op
        finally:
            run.undo()
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
                return 'the new value of %s is not finite' % named(variable.variable)
        return None


def not_finite(value: Any) -> np.ndarray | None:
    """Return which elements of an array, here or on a device, are infinite or NaN; None if there are none."""
    if getattr(getattr(value, 'dtype', None), 'kind', '') not in ('f', 'c'):
        return None
    mask = ~np.isfinite(np.asarray(fetch(value)))
    return mask if mask.any() else None


def place_of(ranks: Communicator, context: Context | None) -> str:
    """Return the rank of this process, with its host if there are several, and a context or, for None, the host."""
    rank = 'rank %d' % ranks.rank if ranks.on_one_host else ranks.name(ranks.rank)
    return (rank + ', ' if ranks.size > 1 else '') + (describe([context]) if context else 'the host')


class NotFinite(NamedTuple):
    """A variable with values that are not finite: which elements are not, the op that made it, and how, in words.

    The op is None for a value that was given; the words then are NaN, infinity, or both.
    """

    variable: theano.Variable
    mask: np.ndarray
    node: Any
    how: str


def op_by_op(function: Any, arguments: Sequence[Any]) -> tuple[list[Any], NotFinite | None]:
    """Call a compiled Theano function op by op.

    Return its results, and the first variable that is not finite, among those that a result is not finite by; None if
    all are.
    """
    graph, linker = function.maker.fgraph, function.maker.linker
    nodes, found = graph.toposort(), {}
    storage = {v: [v.data if isinstance(v, Constant) else None] for v in graph.variables}
    computed = {v: [v.owner is None] for v in graph.variables}
    in_python = isinstance(linker, PerformLinker) or not getattr(linker, 'c_thunks', True)

    def note(variable, node, explain):
        mask = not_finite(storage[variable][0])
        if mask is not None:
            is_first = node is None or not any(v in found for v in node.inputs)
            found[variable] = NotFinite(variable, mask, node, explain(mask) if is_first else '')

    given = [*arguments, *(container.storage[0] for container in function.input_storage[len(arguments):])]
    for variable, value in zip(graph.inputs, given):
        storage[variable][0] = value
        note(variable, None, functools.partial(content_of, value))
    last = {v: node for node in nodes for v in node.inputs}  # the op that reads a variable last
    for node in nodes:
        destroyed = {i for places in getattr(node.op, 'destroy_map', {}).values() for i in places}
        before = [np.array(fetch(storage[v][0])) if i in destroyed and isinstance(node.op, Elemwise) else
                  storage[v][0] for i, v in enumerate(node.inputs)]
        # None: in C, where the op has C code.
        node.op.make_thunk(node, storage, computed, [], 'py' if in_python else None)()
        for variable in node.outputs if type(node.op).__name__ not in EMPTY else ():
            note(variable, node, functools.partial(explained, node, before))
        for variable in node.inputs:
            if last[variable] is node and variable.owner and variable not in graph.outputs:
                storage[variable][0] = None
    return [storage[v][0] for v in graph.outputs], found.get(origin_of(graph.outputs, found))


def origin_of(outputs: Sequence[theano.Variable], found: Any) -> theano.Variable | None:
    """Return the variable from which an output is not finite, given a collection of all such variables; None if none.
    """
    origin, variables = None, outputs
    while True:
        variable = next((each for each in variables if each in found), None)
        if variable is None:
            return origin
        origin, variables = variable, variable.owner.inputs if variable.owner else ()


def content_of(value: Any, mask: np.ndarray) -> str:
    """Return in words which of infinity and NaN a given value has.

    Examples
    --------
    >>> value = np.array([1, np.nan, -np.inf])
    >>> content_of(value, ~np.isfinite(value))
    'NaN and infinity'
    """
    wrong = np.asarray(fetch(value))[mask]
    return ' and '.join(['NaN'] * bool(np.isnan(wrong).any()) + ['infinity'] * bool(np.isinf(wrong).any()))


def explained(node: Any, inputs: Sequence[Any], mask: np.ndarray) -> str:
    """Return in words what an op has made of finite inputs, such as ``log(0.0) = -inf``, where a mask says so."""
    if not isinstance(node.op, Elemwise):
        return '%s made it of finite values' % named(node.op)
    element = tuple(np.argwhere(mask)[0])
    numbers = [np.broadcast_to(np.asarray(fetch(each)), mask.shape)[element] for each in inputs]
    with np.errstate(all='ignore'):
        op, numbers, result = _scalar_step(node.op.scalar_op, numbers)
    return '%s(%s) = %s' % (type(op).__name__, ', '.join(map(str, numbers)), result)


def _scalar_step(op, numbers):
    """Return the scalar op within an elementwise op from which its result is not finite, its inputs, and the result."""
    if not isinstance(op, Composite):
        return op, numbers, _result(op, numbers)
    values, found = dict(zip(op.fgraph.inputs, numbers)), {}
    for node in op.fgraph.toposort():
        given = [v.data if isinstance(v, Constant) else values[v] for v in node.inputs]
        values[node.outputs[0]] = result = _result(node.op, given)
        if result is None or not np.isfinite(result):
            found[node.outputs[0]] = node.op, given, result
    return found.get(origin_of(op.fgraph.outputs, found), (op, numbers, 'not finite'))


def _result(op, numbers):
    """Return the result of a scalar op; None where Python raises an error, as for a division by zero."""
    try:
        return np.asarray(op.impl(*numbers))[()]
    except (ArithmeticError, ValueError, TypeError):  # the last one for an input that has no result either
        return None


def inspected(subject: str, ranks: Communicator, work: Any, function: Any, arguments: Sequence[Any],
              shard: Shard | None, with_samples: Collection[Any]) -> list[Any]:
    """Compute a part on one context op by op, and return its results; raise a NonFiniteError if one is not finite.

    The subject is the value that was not finite, in words, with its step. `work` is the PartOnContext of the function.
    """
    place = place_of(ranks, work.context)
    try:
        results, found = op_by_op(function, arguments)
    except Exception as error:  # of any class: ops raise their own, as in a branch that the step has not taken
        raise NonFiniteError('%s. The op was not found, since computing the step op by op has failed on %s: %s. No '
                             'value was changed' % (subject, place, in_one_line(error))) from error
    if found is None:
        return results
    if found.node is not None:
        where = samples_of(found.mask, shard, [container.storage[0] for container in
                                               function.input_storage[len(arguments):]])
        cause = '%s%s, on %s%s%s' % (found.how, where, place, _near(found.node), line_of(found.node))
        advice = 'Look for a division by zero, or a log of zero or of a negative number, in the model, and for such ' \
            'numbers in the data; lower the learning rate, or clip the gradients'
    else:
        position = function.maker.fgraph.inputs.index(found.variable)
        given = work.part.given[position] if position < len(arguments) else None
        has_samples = given in with_samples and shard is not None
        where = samples_of(found.mask, shard) if has_samples else \
            ' (%s)' % elements(found.mask) if found.mask.ndim else ''
        cause = '%s had %s already%s, on %s' % (
            named(found.variable if given is None else given), found.how, where, place)
        advice = 'Look for such numbers in the data' if has_samples else \
            'Set it to finite values, or go on from a checkpoint'
    raise NonFiniteError('%s: %s. No value was changed. %s%s' % (
        subject, cause, advice, '. Samples are numbered from 0' * where.startswith(' in sample')))


def samples_of(mask: np.ndarray, shard: Shard | None, variables: Sequence[Any] = ()) -> str:
    """Return in words the samples whose rows of an array are not finite; all of the shard if it has no rows of samples.

    An array of the shape of one of the `variables`, such as a gradient, may have no samples.
    """
    if shard is None:
        return ''
    start, stop = shard.span
    shapes = [sorted(getattr(value, 'shape', ())) for value in variables]
    if mask.shape[:1] != (stop - start,) or sorted(mask.shape) in shapes:
        return ' in samples %d to %d of the batch' % (start, stop - 1)
    samples = start + np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))
    return ' in sample%s %s' % ('s' * (len(samples) > 1), shortened(samples, ' of the batch'))


def _near(node):
    """Return the layer of an op, and the names of the variables that are nearest to it, as a part of a message."""
    pending, names = list(node.inputs), []
    for variable in pending:  # which grows meanwhile
        if variable.name:
            names.append(named(variable))
        elif variable.owner is not None:
            pending += [v for v in variable.owner.inputs if v not in pending]
    names, layer = list(dict.fromkeys(names))[:NAMES], layer_of(node.outputs[0])
    nearest = nearest_layer(node.outputs) if layer is None else None
    if nearest is not None:
        names.insert(0, 'layer %s' % nearest)
    return (', in layer %s' % layer if layer else '') + (', near %s' % ' and '.join(names) if names else '')
