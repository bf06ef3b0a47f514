"""What every function over a batch has: a graph compiled for each context, and how arguments and results go."""
import functools
import operator
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import theano

from . import graph
from .collectives import HostBuffers
from .errors import BatchError, GraphError
from .exchange import lengths_of_ranks
from .parallel_graph import ParallelGraph, choose_executor, choose_ranks, run_replicas, share_first_values
from .replicate import replicated, within_a_step
from .rng import is_random_state
from .samples import analyse
from .scatter_gather import REDUCTIONS, batch_length, micro_batch_rounds
from .statistics import BatchUpdates
from .step import Step
from .timeline import PHASES, RANK_PHASES, Timings, on_track
from .transfers import Fetcher

Prepared = namedtuple('Prepared', 'args values length rounds sent')
Prepared.__doc__ = """The next batch: the `args` of the call, as `values`, its samples, and what was `sent` of it."""


class Forward:
    """The part of a step that `mgpu.function` and `mgpu.training_function` share.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    reductions : list of {None, 'gather', 'mean', 'sum'}
        What becomes of each output.
    contexts : list of Context
    broadcast, givens, executor, mode, name, allow_input_downcast
        As for `mgpu.function`.
    updates : dict of SharedVariable to theano.Variable
        New values made from the batch, besides the default updates that the graph has by itself.
    micro_batches : int
        Slices that a sub-batch is computed in.
    least_samples : int
        No sub-batch is smaller than this, but for a batch that is.
    reduced : int
        The first so many outputs are averaged or added into buffers that are reused from step to
        step (gradients); the others are gathered or reduced afresh.
    scale : scalar theano.Variable, optional
        One more input: on each replica, samples of the batch / samples of its sub-batch.
    uniform : list of theano.Variable
        Inputs that are expected to have the same value for each sample; see `samples.analyse`.
    sharded : bool, optional
        Whether each process of a job is given a part of the batch of its own, not the whole batch; the flag
        ``mgpu.data`` by default.

    Attributes
    ----------
    ranks : Ranks
        The processes that call it together.
    graphs : list of ParallelGraph
        What a step brings up to date before it runs.
    couplings : list of Coupling
        Where the outputs that are not reduced into buffers mix samples.
    """

    def __init__(self, inputs, outputs, reductions, contexts, broadcast=(), givens=None, executor=None, mode=None,
                 name=None, allow_input_downcast=None, updates=None, micro_batches=1, least_samples=1, reduced=0,
                 scale=None, uniform=(), sharded=None):
        self.inputs = [check_input(variable) for variable in inputs]
        self.split = split_inputs(self.inputs, broadcast)
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise GraphError('micro_batches is a number of slices, at least 1, not %r' % (micro_batches,))
        outputs, updates = with_givens(outputs, updates or {}, givens)
        self.output_names = [str(output) for output in outputs]
        self.reductions = [check_reduction(how, output) for how, output in zip(reductions, outputs)]
        self.contexts = contexts
        self.micro_batches, self.least_samples = micro_batches, least_samples
        self.reduced = reduced
        self.scale = scale
        self.allow_input_downcast = allow_input_downcast
        self.lock = threading.RLock()
        self.graphs = []
        self.ranks = choose_ranks(executor)
        self.number = self.ranks.function_number(name)
        self.sharded = self.ranks.size > 1 and (theano.config.mgpu.data == 'sharded' if sharded is None else sharded)
        self._build(outputs, updates, uniform, mode, name)
        self.executor = choose_executor(executor, self.graph.compiled)
        self.calls = 0
        self.samples = 0  # of the last step, on all ranks
        self.timings = Timings(RANK_PHASES if self.ranks.size > 1 else PHASES)
        self.buffers = HostBuffers()
        self.on_devices = any(context.kind != 'cpu' for context in contexts)
        self.sums = None        # FlatBuffers, once a step knows its shapes
        self._fetchers, self._rounds = {}, {}
        # A callable that gives the arguments of the next call, or None. It runs within a step: no variable may be read.
        self.next_batch = None
        self._prepared = None
        self._example = None

    def _build(self, outputs, updates, uniform, mode, name):
        """Compile what the replicas compute: outputs, states with a row a sample, statistics; random streams."""
        carriers = [variable for variable, split in zip(self.inputs, self.split) if split]
        streams = {variable: new for variable, new in updates.items() if is_random_state(variable)}
        self.couplings = analyse(outputs[self.reduced:], carriers, uniform).couplings
        self.updates = BatchUpdates({v: new for v, new in updates.items() if v not in streams}, carriers,
                                    uniform, mode)
        self.rows = list(self.updates.rows)
        self.n_results = len(outputs) + len(self.rows)
        wanted = outputs + list(self.updates.rows.values()) + self.updates.statistics
        # A state that has a row a sample is scattered and gathered with the batch.
        row_inputs = {variable: graph.host_type(variable)('rows of %s' % variable) for variable in self.rows}
        whole = graph.substitute(wanted + list(streams.values()), row_inputs) if row_inputs \
            else wanted + list(streams.values())
        extra = list(row_inputs.values()) + ([self.scale] if self.scale is not None else [])
        self.graph = ParallelGraph(self.inputs + extra, whole[:len(wanted)],
                                   dict(zip(streams, whole[len(wanted):])), self.contexts, self.ranks, mode=mode,
                                   name=name)
        self.of_batch = [replicated(variable) for variable in list(self.updates.updates) + self.rows]
        share_first_values(self.ranks, self.of_batch)
        self.add_graph(self.graph)

    def add_graph(self, graph):
        """Take in a ParallelGraph that its steps run."""
        self.graphs.append(graph)
        for variable in self.replicated():
            variable.step_locks.add(self.lock)

    def step(self, args, kwargs):
        """A `Step` with the arguments of a call."""
        return Step(self, (args, kwargs))

    def send(self, values, row_values, samples, length):
        """Give each replica its part of the arguments, on its device.

        Parameters
        ----------
        values, row_values : list of ndarray
            Of the whole batch.
        samples : list of (int, int)
            One a replica.
        length : int
            Samples of the batch, over all ranks.

        Returns
        -------
        list of list of (ndarray or pygpu.gpuarray.GpuArray)
        """
        parts = [self.part(values, row_values, *span, length=length) for span in samples]
        if not self.on_devices:
            return parts
        with self.timings.span('host_to_device'):
            tasks = [functools.partial(sender.send, part) for sender, part in zip(self.graph.senders, parts)]
            contexts = self.contexts[:len(samples)]
            return self.each('host_to_device', tasks, contexts, samples)

    def each(self, name, tasks, contexts, samples=None):
        """Run a task on each context, shown in the timeline under a name; as `run_replicas`."""
        return run_replicas(self.executor, on_track(tasks, name, contexts), contexts, samples)

    def prepare_next(self):
        """Scatter and send the next batch, if somebody knows it, while the devices compute this one."""
        if self.next_batch is None or self.sharded or self.rows:
            return
        try:
            with within_a_step():
                following = self.next_batch()
            self._prepared = self._prepare(following)
        except Exception:
            # Whatever is wrong with the next batch (its shape, no room for it on a device) must not undo the step under
            # way. Nothing is prepared, so that all of it is done again, and raises, when it is that batch's turn.
            self._prepared = None

    def _prepare(self, following):
        if following is None:
            return None
        with self.timings.span('scatter'):
            values = self.arguments(following, {})
            length = self.length(values, [])
            rounds = self.rounds(length)
        return Prepared(following, values, length, rounds, self.send(values, [], rounds[0], length))

    def forget_prepared(self):
        """Let go of the batch that was prepared: it does not come."""
        self._prepared = None

    def take_prepared(self, args, kwargs):
        """What was prepared, if it is of these arguments."""
        prepared, self._prepared = self._prepared, None
        if prepared and not kwargs and len(args) == len(prepared.args) and all(map(operator.is_, args, prepared.args)):
            return prepared
        return None

    def fetcher(self, replica, bucket):
        """The Fetcher of some outputs of a replica."""
        if (replica, bucket) not in self._fetchers:
            self._fetchers[replica, bucket] = Fetcher(self.contexts[replica])
        return self._fetchers[replica, bucket]

    @functools.cached_property
    def reducer(self):
        """A thread that adds gradients while others are on their way."""
        return ThreadPoolExecutor(1, thread_name_prefix='theano_mgpu all_reduce')

    def join(self, run):
        """Help the other ranks until the data of each has ended.

        Yields
        ------
        results, length : object, int
            What ``run(step)`` returned, and the samples of that step.
        """
        while self.sharded:
            step = Step(self, None)
            results = step.run(run)
            if not step.length:
                return
            yield results, step.length

    def replicated(self):
        """All variables that the replicas have copies of, and those that are made from the batch."""
        return dict.fromkeys([variable for graph in self.graphs for variable in graph.variables] + self.of_batch)

    def refresh(self):
        """Bring the replicas up to date with the user's variables."""
        for each in self.graphs:
            each.refresh()

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
        return [converted(variable, values[position], self.allow_input_downcast)
                for position, variable in enumerate(self.inputs)]

    def state_rows(self):
        """Values of the states with a row a sample."""
        return [variable.get_value(borrow=True) for variable in self.rows]

    def length(self, values, row_values):
        """Samples of a batch; a BatchError where its arguments do not agree, or it cannot be divided."""
        named = [(value, str(variable)) for value, variable, split in zip(values, self.inputs, self.split) if split]
        named += [(value, 'the state %s' % variable) for value, variable in zip(row_values, self.rows)]
        length = batch_length(*map(list, zip(*named)))
        n = self._n_replicas()
        if self.rows and (length % n or self.micro_batches > 1):
            raise BatchError('the model keeps a state for each sample (%s), so each of its %d replicas always gets the '
                             'same share of a batch: %d samples do not divide evenly. Give batches of a multiple of %d '
                             'samples%s' % (', '.join(map(str, self.rows)), n, length, n,
                                            ' and micro_batches=1' if self.micro_batches > 1 else ''))
        return length

    def _n_replicas(self):
        """Replicas among which a batch that this process is given is divided: its own, or all."""
        return len(self.contexts) if self.sharded else sum(self.graph.replicas)

    def rounds(self, length):
        """Rounds of sample ranges, one a replica of this process; see `micro_batch_rounds`. None for no samples."""
        if length not in self._rounds:
            self._rounds[length] = self._make_rounds(length)
        return self._rounds[length]

    def _make_rounds(self, length):
        if not length:
            return []
        rounds = micro_batch_rounds(length, self._n_replicas(), self.micro_batches, self.least_samples)
        if not self.sharded:
            first = sum(self.graph.replicas[:self.ranks.rank])
            rounds = [samples[first:first + len(self.contexts)] for samples in rounds]
        return [samples for samples in rounds if samples]

    def lengths_of_ranks(self, length):
        """Samples of a whole batch that each rank works on."""
        return lengths_of_ranks(length, self.graph.replicas, self.least_samples)

    def example(self, values, lengths):
        """The arguments, or where this rank's data has ended, those of one sample that was met before.

        Parameters
        ----------
        values : list of ndarray, or None
        lengths : list of int
            Of each rank in this step.
        """
        if self._example is None and min(lengths) == 0:
            # Who has no sample at its first step has never seen one.
            root = int(np.argmax(lengths))
            sample = self._first_sample(values) if values is not None else None
            self._example = self.ranks.tell(sample, root)
        elif self._example is None:
            self._example = self._first_sample(values)
        return self._example if values is None else values

    def _first_sample(self, values):
        return [np.array(value[:1]) if split else value for value, split in zip(values, self.split)]

    def part(self, values, row_values, start, stop, length):
        """The arguments of one sub-batch; slices are views."""
        part = [value[start:stop] if split else value for value, split in zip(values, self.split)]
        part += [value[start:stop] for value in row_values]
        if self.scale is not None:
            part.append(np.asarray(length / (stop - start), self.scale.dtype))
        return part


def check_input(variable):
    """The Theano variable of an input; a GraphError for `theano.In` and others that cannot be scattered."""
    if isinstance(variable, theano.In):
        raise GraphError('theano.In(%s) is not taken: give the variable itself, and its value at each call'
                         % variable.variable)
    return variable


def split_inputs(inputs, broadcast):
    """For each input, whether its samples are split: all but scalars and those named in `broadcast`."""
    unknown = [variable for variable in broadcast if variable not in inputs]
    if unknown:
        raise GraphError('broadcast names %s, no inputs; the inputs are %s' % (unknown, inputs))
    split = [variable not in set(broadcast) and getattr(variable.type, 'ndim', 1) > 0 for variable in inputs]
    if not any(split):
        raise GraphError('no input has samples to split: %s. A batch needs one at least' % (inputs,))
    return split


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


def with_givens(outputs, updates, givens):
    """Outputs and updates with the givens substituted; the default updates that they bring along are among the updates.
    """
    n_outputs = len(outputs)
    variables = [graph.host_view(variable) for variable in updates]
    whole = list(outputs) + list(updates.values())
    if givens:
        replacements = {old: old.type.filter_variable(graph.on_host(theano.tensor.as_tensor_variable(new)))
                        for old, new in givens.items()}
        whole = graph.substitute(whole, replacements)
    whole = graph.host_graph(whole)
    default = [variable for variable in graph.shared_variables(whole) if variable not in variables
               and getattr(variable, 'default_update', None) is not None]
    found = dict(zip(variables, whole[n_outputs:]))
    found.update(zip(default, graph.host_graph([variable.default_update for variable in default])))
    return whole[:n_outputs], found


def converted(variable, value, allow_downcast):
    """A value as an array of an input's type; a BatchError if it cannot be one."""
    try:
        return variable.type.filter(value, strict=False, allow_downcast=allow_downcast)
    except (TypeError, ValueError) as error:
        raise BatchError('input %s (%s) cannot take what was given: %s'
                         % (variable, variable.type, ' '.join(map(str, error.args)))) from error
