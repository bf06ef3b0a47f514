"""One step over sub-batches: scatter, run, fetch, and the states that a graph moves on."""
import threading

import numpy as np
import theano

from . import graph
from .collectives import HostBuffers, all_reduce
from .errors import BatchError, GraphError
from .parallel_graph import ParallelGraph, Transaction, choose_executor, run_replicas
from .rng import is_random_state
from .scatter_gather import REDUCTIONS, batch_length, fetch, gather, micro_batch_rounds
from .timeline import Timings


class Forward:
    """The part of a step that `mgpu.function` and `mgpu.training_function` share.

    Scatter, run, fetch, and the states (random streams, running averages) that the graph moves on.

    Parameters
    ----------
    reduced : int
        The first so many outputs are averaged or added into buffers that are reused from step to
        step (gradients); the others are gathered or reduced afresh.
    """

    def __init__(self, inputs, outputs, reductions, broadcast, givens, contexts, executor, mode, name,
                 micro_batches=1, reduced=0):
        self.inputs = [check_input(variable) for variable in inputs]
        whole = broadcast_set(broadcast, self.inputs)
        self.split = [variable not in whole and getattr(variable.type, 'ndim', 1) > 0 for variable in self.inputs]
        if not any(self.split):
            raise GraphError('no input has samples to split: %s. A batch needs one at least' % (self.inputs,))
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise GraphError('micro_batches is a number of slices, at least 1, not %r' % (micro_batches,))
        outputs, states = with_givens(outputs, givens)
        check_states(states)
        self.output_names = [str(output) for output in outputs]
        self.reductions = [check_reduction(how, output) for how, output in zip(reductions, outputs)]
        self.graph = ParallelGraph(self.inputs, outputs, states, contexts, mode=mode, name=name)
        self.contexts = contexts
        self.executor = choose_executor(executor, self.graph.compiled)
        self.timings = Timings()
        self.micro_batches = micro_batches
        self.reduced = reduced
        self.buffers = HostBuffers()
        self.lock = threading.Lock()

    def step(self, args, kwargs):
        """Begin a step: check and scatter the arguments; see `Step`."""
        return Step(self, args, kwargs)

    def arguments(self, args, kwargs):
        """Arguments in the order of the inputs, each converted to its input's type."""
        names = [str(variable) for variable in self.inputs]
        if len(args) > len(self.inputs):
            raise TypeError('%d arguments were given for the inputs %s' % (len(args), names))
        values = dict(enumerate(args))  # by position: inputs without a name share the text of their type
        for name, value in kwargs.items():
            position = names.index(name) if name in names else None
            if position is None or position in values:
                raise TypeError('%r is %s; the inputs are %s'
                                % (name, 'no input' if position is None else 'given twice', names))
            values[position] = value
        missing = [name for position, name in enumerate(names) if position not in values]
        if missing:
            raise TypeError('no value was given for %s; the inputs are %s' % (', '.join(missing), names))
        return [_converted(variable, values[position]) for position, variable in enumerate(self.inputs)]

    def scatter(self, values):
        """Rounds of sample ranges, one a replica; see `scatter_gather.micro_batch_rounds`."""
        named = [(value, str(variable)) for value, variable, split in zip(values, self.inputs, self.split) if split]
        length = batch_length(*map(list, zip(*named)))
        return length, micro_batch_rounds(length, len(self.contexts), self.micro_batches)

    def part(self, values, start, stop):
        """The arguments of one sub-batch; slices are views."""
        return [value[start:stop] if split else value for value, split in zip(values, self.split)]


class Step:
    """One call: a context manager that leaves everything as it was if its block raises.

    Attributes
    ----------
    length : int
        Samples in the batch.
    """

    def __init__(self, forward, args, kwargs):
        self.forward = forward
        self.transaction = Transaction()
        self._arguments = args, kwargs
        self._pieces = []       # (replica, (start, stop), outputs), in the order in which they ran
        self._states = []       # the new values of the states, for each piece
        self.averages = []

    def __enter__(self):
        forward = self.forward
        forward.lock.acquire()
        try:
            with forward.timings.span('scatter'):
                self.values = forward.arguments(*self._arguments)
                self.length, self.rounds = forward.scatter(self.values)
                forward.graph.refresh()
            forward.timings.calls += 1
        except BaseException:
            forward.lock.release()
            raise
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is not None:
                self.transaction.roll_back()
        finally:
            self.forward.lock.release()

    def run_all(self):
        """Run every round, and average the outputs that are reduced into buffers."""
        for number, samples in enumerate(self.rounds):
            results = self._run_round(samples)
            if self.forward.reduced:
                self._average(number, results, samples)

    def _run_round(self, samples):
        forward = self.forward
        contexts = forward.contexts[:len(samples)]
        with forward.timings.span('run'):
            tasks = [self._task(replica, span) for replica, span in enumerate(samples)]
            results = run_replicas(forward.executor, tasks, contexts, samples)
        for replica, (outputs, new_states) in enumerate(results):
            self._pieces.append((replica, samples[replica], outputs[forward.reduced:]))
            self._states.append(new_states)
            self._advance_streams(replica, new_states)
        return [outputs[:forward.reduced] for outputs, _ in results]

    def _task(self, replica, span):
        part = self.forward.part(self.values, *span)
        return lambda: self.forward.graph.run(replica, part)

    def _advance_streams(self, replica, new_states):
        """Each replica's random streams go on from piece to piece."""
        context = self.forward.contexts[replica]
        for variable, value in zip(self.forward.graph.updated, new_states):
            if is_random_state(variable.variable):
                self.transaction.replace(variable.copies[context], value)

    def _average(self, number, results, samples):
        """Fetch one round's reduced outputs and add them, weighted, to their averages."""
        forward, buffers = self.forward, self.forward.buffers
        with forward.timings.span('fetch'):
            tasks = [self._fetch_task(replica, outputs) for replica, outputs in enumerate(results)]
            fetched = run_replicas(forward.executor, tasks, forward.contexts[:len(results)], samples)
        weights = [self._weight(how=forward.reductions[0], span=span) for span in samples]
        alone = len(self.rounds) == 1 and len(samples) == 1
        with forward.timings.span('all_reduce'):
            self.averages = [
                all_reduce(parts, weights, None if alone else buffers.get(('mean', i), parts[0]), number > 0)
                for i, parts in enumerate(zip(*fetched))]

    def _fetch_task(self, replica, outputs):
        buffers = self.forward.buffers

        def task():
            return [output if isinstance(output, np.ndarray)
                    else fetch(output, buffers.get((replica, i), output)) for i, output in enumerate(outputs)]
        return task

    def _weight(self, how, span):
        return 1.0 if how == 'sum' else (span[1] - span[0]) / self.length

    def commit(self):
        """Make the states' new values current; those that are no streams are averaged."""
        forward = self.forward
        used = forward.contexts[:len(self.rounds[0])]
        weights = [self._weight('mean', span) for _, span, _ in self._pieces]
        for variable, values in zip(forward.graph.updated, zip(*self._states)):
            if is_random_state(variable.variable):
                variable.commit(used)
                continue
            merged = _merged_state([fetch(value) for value in values], weights)
            for context in forward.contexts:
                self.transaction.replace(variable.copies[context], np.array(merged))
            variable.commit(forward.contexts)
        if self._states and self._states[0]:
            forward.graph.mark_seen()

    def gathered(self):
        """The outputs that are not reduced into buffers, put together as told."""
        forward = self.forward
        pieces = sorted(self._pieces, key=lambda piece: piece[1])  # by sample: rounds interleave replicas
        spans = [span for _, span, _ in pieces]
        outputs = zip(*(outputs for _, _, outputs in pieces))
        names = forward.output_names[forward.reduced:]
        with forward.timings.span('fetch'):
            return [self._combined(parts, spans, how, name)
                    for parts, how, name in zip(outputs, forward.reductions[forward.reduced:], names)]

    def _combined(self, parts, spans, how, name):
        if how == 'gather':
            return gather(parts, [stop - start for start, stop in spans], name)
        values = [fetch(part) for part in parts]
        return _merged(values, [self._weight(how, span) for span in spans])


def _merged(values, weights):
    """Weighted sum of host arrays; in their dtype if floating, else in float64 unless all weigh 1."""
    if np.issubdtype(values[0].dtype, np.floating):
        return np.array(all_reduce(values, weights))
    total = sum(value * (int(weight) if weight == 1 else weight) for value, weight in zip(values, weights))
    return np.asarray(total)


def _merged_state(values, weights):
    """The mean of a state's new values; one that counts calls is the same on each replica."""
    return _merged(values, weights) if np.issubdtype(values[0].dtype, np.floating) else values[0]


def check_states(states):
    """Raise a GraphError for a default update that has no mean over the replicas: integers made from a batch."""
    for variable, update in states.items():
        countable = not np.issubdtype(getattr(variable.type, 'dtype', 'float32'), np.floating)
        if countable and not is_random_state(variable) and graph.free_inputs([update]):
            raise GraphError('the default update of %s (%s) depends on the batch, and integers of several sub-batches '
                             'have no mean: count in the training script instead' % (variable, variable.type))


def check_input(variable):
    """The Theano variable of an input; a GraphError for `theano.In` and others that cannot be scattered."""
    if isinstance(variable, theano.In):
        raise GraphError('theano.In(%s) is not taken: give the variable itself, and its value at each call'
                         % variable.variable)
    return variable


def broadcast_set(broadcast, inputs):
    """The set of inputs that are not split."""
    unknown = [variable for variable in broadcast if variable not in inputs]
    if unknown:
        raise GraphError('broadcast names %s, no inputs; the inputs are %s' % (unknown, inputs))
    return set(broadcast)


def check_reduction(how, output):
    """What becomes of an output; a GraphError where it cannot be done or was not told."""
    how = how or 'gather'
    if how not in REDUCTIONS:
        raise GraphError('output %s is to be reduced by %r, which is none of %s'
                         % (output, how, ', '.join(REDUCTIONS)))
    if how == 'gather' and output.ndim == 0:
        raise GraphError("output %s is a scalar on each replica and cannot be gathered: say whether the batch's "
                         "is their mean or their sum (reduce='mean', or (output, 'mean') among the outputs)"
                         % output)
    return how


def with_givens(outputs, givens):
    """Outputs with the givens substituted, and the default updates that `theano.function` would apply."""
    if givens:
        replacements = {old: old.type.filter_variable(graph.on_host(theano.tensor.as_tensor_variable(new)))
                        for old, new in givens.items()}
        outputs = graph.substitute(outputs, replacements)
    outputs = graph.host_graph(outputs)
    found = {variable: variable.default_update for variable in graph.shared_variables(outputs)
             if getattr(variable, 'default_update', None) is not None}
    return outputs, dict(zip(found, graph.host_graph(list(found.values()))))


def _converted(variable, value):
    try:
        return variable.type.filter(value, strict=False, allow_downcast=None)
    except (TypeError, ValueError) as error:
        raise BatchError('input %s (%s) cannot take what was given: %s'
                         % (variable, variable.type, ' '.join(map(str, error.args)))) from error
