"""A graph over a batch, run over several contexts: what every function of the package has."""
import contextlib
import threading
import time

import numpy as np
import theano
from theano.gof.graph import ancestors
from theano.tensor.nnet.bn import AbstractBatchNormTrain

from .batches.arguments import Arguments, no_samples, sample_axes
from .batches.data_sets import Slices
from .batches.division import Division, divided
from .batches.prefetch import LookAhead
from .batches.scatter import Scatter
from .batches.sub_batches import batch_length
from .devices.context_map import describe
from .devices.contexts import check_process
from .distributed.consistency import meet_for_batch
from .errors import GraphError, LengthError, MgpuError, warn
from .graphs import graph
from .graphs.updates import with_givens
from .jobs import rank_process
from .patches.shared_variables import watcher_of
from .profiling.timeline import PHASES, RANK_PHASES, Timings
from .program import CannotCut, CompiledProgram, Runner, undivided
from .program.parallel_graph import Transaction, choose_ranks, resolve_contexts, share_first_values
from .replicas.replicated import replicated
from .verification.comparison import Verification


class DataParallel:
    """A graph over a batch that is computed in sub-batches, one a context, with the result of one device.

    Parameters
    ----------
    inputs : list of theano.Variable
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values. Default updates are added.
    options : Options

    Attributes
    ----------
    contexts : list of Context
        Those that it runs on: the first one alone where the graph cannot be divided.
    is_divided : bool
        Whether batches are divided among replicas.
    refused : str or None
        Why the graph cannot be divided.
    ranks : Ranks
        The processes that call it together.
    samples : int
        Of the last batch, on all ranks.
    seconds : float
        What the last step took until new values were there, without what comes after that: outputs with a row a sample.
    timings : Timings
        Seconds that the calls spent in each phase, see `timeline.PHASES`.
    """

    def __init__(self, inputs, outputs, updates, options):
        axes = sample_axes(inputs, options.samples, options.broadcast)
        self.arguments = Arguments(inputs, axes, options.allow_input_downcast)
        self.options = options
        self.contexts = resolve_contexts(options.contexts)
        self.ranks = choose_ranks(options.executor)
        self.number = self.ranks.function_number(options.name)
        self.sharded = options.is_sharded(self.ranks)
        self.lock = threading.RLock()
        self.samples = self.calls = 0
        self.seconds = 0.0
        self.timings = Timings(RANK_PHASES if self.ranks.size > 1 else PHASES)
        self.look_ahead = LookAhead(self._prepare)
        self._verifies = theano.config.mgpu.verify == 'True'
        outputs, updates = with_givens(outputs, updates, options.givens, options.no_default_updates)
        outputs, updates = self._on_samples(outputs, updates)
        self._compile(outputs, updates)

    # ------------------------------------------------------------------------------------------------ compiling

    def _on_samples(self, outputs, updates):
        """The graph as one of inputs with samples along axis 0; finds the slices of data sets that are its batch."""
        given, options = self.arguments.inputs, self.options
        whole = graph.substitute(outputs + list(updates.values()), self.arguments.replacements)
        graph.check_inputs(given, whole)
        self.slices = Slices(given, whole, updates, self.sharded)
        if options.length is not None:
            lengths = self.slices.lengths(self.arguments.bind(options.example, {}))
            self.slices.keep({v for v, length in lengths.items() if length == options.length})
        elif any(self.arguments.split):
            self.slices.keep(())
        if not any(self.arguments.split) and not self.slices:
            raise no_samples(given)
        return whole[:len(outputs)], dict(zip(updates, whole[len(outputs):]))

    def _compile(self, outputs, updates):
        options, updated = self.options, list(updates)
        whole = outputs + list(updates.values())
        self._definition, self.refused = (outputs, updates), None
        self.is_divided = self.ranks.size > 1 or len(self.contexts) > 1 or options.micro_batches > 1 or \
            options.updates_on(self.contexts) == 'host' and self.contexts[0].kind != 'cpu'
        program, self.rows, self._only_length = self._divided(whole, updated)
        # Ranks compile the same graphs, whatever their devices.
        on_host = min(self.ranks.everyones(options.updates_on(self.contexts) == 'host'))
        with profiled(options.profile):
            self.compiled_program = CompiledProgram(
                program, self.arguments.inputs + list(self.rows.values()), updated,
                'host' if on_host else 'device', self.contexts, self.ranks, options.mode, options.name)
        distinct = list(dict.fromkeys(self.results))
        self._row_outputs = [output for output in distinct if isinstance(output.how, tuple)]
        self._alike_outputs = [output for output in distinct if not isinstance(output.how, tuple)]
        self._runner = Runner(self.compiled_program, self.ranks, options.executor, self.timings)
        self.scatter = Scatter(self.arguments, self.rows, program, self._runner, self.is_divided,
                               options.micro_batches, self._least(whole), self.sharded)
        self.updated = [replicated(variable, variable in program.streams) for variable in updated]
        # Where each rank has samples of its own, it has their states, too.
        own = self.compiled_program.rows if self.sharded else ()
        self._alike = [each for each, variable in zip(self.updated, updated) if variable not in own]
        share_first_values(self.ranks, self._alike)
        for variable in self._read() + self.updated:
            variable.step_locks.add(self.lock)

    def _divided(self, outputs, updated):
        """The Division of the graph: among replicas, if there are several, and it can be."""
        if self.is_divided:
            try:
                return divided(self.arguments.with_samples, self.slices, outputs, updated, self.options.length,
                               self.sharded)
            except CannotCut as error:
                if self.sharded or self.options.must_divide:
                    raise GraphError('%s%s cannot be computed in parts: %s' % (
                        'each process has samples of its own, but ' * self.sharded,
                        self.options.name or 'a function', error)) from error
                self.refused, self.is_divided = str(error), False
                self.contexts = self.contexts[:1]
        return Division(undivided(outputs), {}, None)

    def _least(self, outputs):
        """Samples that a sub-batch has at least: where each is normalised by itself, one cannot be."""
        normalised = theano.config.mgpu.batch_statistics == 'local' and any(
            v.owner and isinstance(v.owner.op, AbstractBatchNormTrain) for v in ancestors(outputs))
        return max(self.options.least_samples, 2 if normalised else 1)

    def warn_if_refused(self):
        """Say that it runs on one context, and why, where it was to run on several."""
        if self.refused:
            warn('%s runs whole on %s, since it cannot be computed in parts: %s'
                 % (self.options.name or 'a function', describe(self.contexts), self.refused))

    @property
    def results(self):
        """The Outputs of the program that are not new values."""
        return self.compiled_program.results

    @property
    def compiled(self):
        """The compiled functions, one a context of each stage."""
        return [function for each in self.compiled_program.graphs for function in each.compiled]

    @property
    def profiles(self):
        """The ProfileStats of the compiled functions, where they are profiled."""
        return [function.profile for function in self.compiled if function.profile]

    @property
    def executor(self):
        return self._runner.executor

    @executor.setter
    def executor(self, executor):
        self._runner.executor = executor

    @property
    def n_replicas(self):
        """Replicas on all ranks."""
        return self.scatter.n_replicas

    @property
    def on_devices(self):
        """Whether a context is not the host."""
        return self._runner.on_devices

    def replicated(self):
        """All variables that are the same on each replica and rank: those that they read, and that a step changes."""
        own = self.compiled_program.program.own
        return dict.fromkeys([each for each in self._read() if each.variable not in own] + self._alike)

    def _read(self):
        return [variable for each in self.compiled_program.graphs for variable in each.variables]

    # -------------------------------------------------------------------------------------------------- calling

    def step(self, args, kwargs):
        """Compute a batch, on every rank, or change nothing on any.

        Returns
        -------
        list of ndarray
            The outputs.
        """
        if self._verifies:
            self._verify_first(args, kwargs)
        return self._locked_step((args, kwargs))

    def _locked_step(self, arguments):
        if self.on_devices:
            check_process()
        # On one line, since Ctrl-C may raise between any two: before the lock is taken, or where `with` frees it.
        with self.lock: return self._step(arguments)  # noqa: E701

    def _step(self, arguments):
        with self.ranks.one_thread():
            began = time.perf_counter()
            with self.timings.span('scatter'):
                ahead, values, states, own = self._bind(arguments)
            with self.timings.span('wait'):
                lengths = meet_for_batch(self, own, values)
            self.samples = sum(lengths) if self.sharded else own
            self.calls += 1
            self.timings.calls += 1
            if not self.samples and arguments is None:
                return None
            if not self.samples:
                raise LengthError('the batch is empty: no process has a sample of it')
            transaction = Transaction()
            try:
                with self.timings.span('scatter'):
                    batch = ahead or self.scatter(values, states, lengths)
                    self.refresh()
                outputs = self._compute(batch, transaction, began)
                with self.timings.span('wait'):
                    self.ranks.agree()
                with self.timings.span('update'):
                    transaction.commit()
            except BaseException as error:
                transaction.roll_back()
                self.ranks.give_up(error)
                raise
            rank_process.note_step()
            return outputs

    def _compute(self, batch, transaction, began):
        """Run the program, and have new values stored by the transaction; returns the outputs."""
        runner, compiled = self._runner, self.compiled_program
        runner.run_stages(batch, transaction, self.look_ahead.prepare)
        results = runner.run_parts(batch, transaction)
        with self.timings.span('run'):  # where nothing left the device, nobody has waited for it yet
            found = runner.values(self._alike_outputs, batch, results)
        self._check([found.get(output) for output in compiled.results])
        self.seconds = time.perf_counter() - began
        found.update(runner.gather(self._row_outputs, batch, self.sharded))
        if not (self.sharded and batch.idle):
            states = runner.gather(list(compiled.rows.values()), batch, self.sharded)
            with self.timings.span('update'):
                for variable, output in compiled.rows.items():
                    _store(variable, states[output], transaction)
        return [found[output] for output in compiled.results]

    def _check(self, results):
        """Raise an error where results are not to be used; those with a row a sample are not among them."""

    def verify(self, *args, tolerance=None, **kwargs):
        """Compute a batch with plain Theano on the host, and over the contexts, from the same state, and compare.

        Parameters
        ----------
        args, kwargs
            Of a call. With several processes, each makes the same one.
        tolerance : float, optional
            The largest relative difference that counts as rounding: 1e-5 for float32, 1e-10 for float64.

        Returns
        -------
        Certificate
            Of the outputs, and the new values of shared variables, which stay as they were. Print it.

        Raises
        ------
        MgpuError
            If each process has samples of its own.

        Examples
        --------
        ``print(step.verify(x[:31], y[:31]))``
        """
        if self.sharded:
            raise MgpuError('verify compares with one device, which has the whole batch: here each process has samples '
                            'of its own. Verify in one process, without mpirun')
        with self.lock:
            verification = Verification(self.arguments.inputs, *self._definition, self.options.mode)
            return verification.certificate(self.arguments.bind(args, kwargs), lambda: self._traceless(args, kwargs),
                                            self.contexts, tolerance)

    def _traceless(self, args, kwargs):
        """The outputs of a step, and the new values, which are taken back."""
        before = [each.value() for each in self.updated]
        try:
            return self._locked_step((args, kwargs)) + [each.value() for each in self.updated]
        finally:
            for each, value in zip(self.updated, before):
                each.variable.set_value(value)

    def _verify_first(self, args, kwargs):
        """Raise a GraphError where the first batch that is divided does not give the answer of one device."""
        values = self.arguments.bind(args, kwargs)
        if self.sharded or len(sum(self.scatter.rounds(self._length(values)), [])) < 2:
            return
        self._verifies = False
        certificate = self.verify(*args, **kwargs)
        if not certificate.passed:
            raise GraphError('%s does not give the answer of one device, nothing was changed: %s'
                             % (self.options.name or 'a function', certificate))

    def seconds_alone(self, args):
        """Seconds that the first context alone takes for a batch: copies, stages and updates. Nothing is changed.

        Parameters
        ----------
        args : list of ndarray
            Of a call.
        """
        with self.lock:
            self.refresh()
            began = time.perf_counter()
            values = self.arguments.bind(args, {})
            batch = self.scatter(values, {}, [self._length(values)], alone=True)
            transaction = Transaction()
            try:
                self._runner.run_stages(batch, transaction)
                self._runner.run_parts(batch, transaction)
                transaction.wait()
                return time.perf_counter() - began
            finally:
                transaction.roll_back()

    def refresh(self):
        """Bring the replicas up to date with the user's variables."""
        for each in self.compiled_program.graphs:
            each.refresh()

    def join(self):
        """Call it where each process of a job feeds its own data, once that has ended: it returns when all have.

        Until then the process takes part in the others' calls, without samples.
        """
        for _ in self.joined():
            pass

    def joined(self):
        """As `join`, but yields of each call the outputs, and its samples."""
        while self.sharded:
            outputs = self._locked_step(None)
            if not self.samples:
                return
            yield outputs, self.samples

    # ------------------------------------------------------------------------------------------------ the batch

    def _bind(self, arguments):
        """The batch that was prepared, or None; the arguments, the states with a row a sample, and their length."""
        states = {variable: np.asarray(variable.get_value(borrow=True)) for variable in self.rows}
        if arguments is None:
            return None, None, states, 0
        ahead = self.look_ahead.take(*arguments)
        if ahead:
            return ahead.batch, ahead.values, {}, self._length(ahead.values)
        values = self.arguments.bind(*arguments)
        return None, values, states, self._length(values, states)

    def _length(self, values, states=()):
        """Samples of a batch; a BatchError where its arguments, slices, and states of samples do not agree."""
        named = self.arguments.named(values) + self.slices.named(values)
        named += [(len(states[variable]), 'the state %s' % variable) for variable in states]
        # A process slices nothing once it is through its part of the data; the others may go on.
        length = batch_length(*map(list, zip(*named)), least=0 if self.sharded and self.slices else 1)
        if self._only_length not in (None, length):
            raise LengthError('a batch of %d samples was given, but the graph has the length of its batches, %d, as a '
                              'number' % (length, self._only_length))
        return length

    def _prepare(self, args):
        """Scatter and send a batch while the devices compute the one before it: its values, and the Batch."""
        if self.sharded or self.rows:
            return None
        with self.timings.span('scatter'):
            values = self.arguments.bind(args, {})
            batch = self.scatter(values, {}, [self._length(values)])
        self._runner.send(batch.rounds[0], batch.common)
        return values, batch


def check_reductions(results, reductions, outputs):
    """Raise a GraphError where outputs are not to be put together as they have to be.

    Parameters
    ----------
    results : list of program.Output
    reductions : list of {None, 'gather', 'mean', 'sum'}
    outputs : list of theano.Variable
    """
    for how, result, output in zip(reductions, results, outputs):
        if how not in (None, 'gather', 'mean', 'sum'):
            raise GraphError('output %s is to be reduced by %r, which is none of gather, mean, sum' % (output, how))
        if how == 'gather' and result.how is None or how in ('mean', 'sum') and isinstance(result.how, tuple):
            raise GraphError('output %s %s, and cannot be reduced by %r. Leave the reduction out: outputs are those of '
                             'the whole batch' % (output, 'has rows of single samples' if result.how else
                                                  'has no rows of single samples', how))


@contextlib.contextmanager
def profiled(profile):
    """A block in which functions are compiled to be profiled, if `profile` is true, or as the flag ``profile`` says."""
    with theano.configparser.change_flags(profile=theano.config.profile or bool(profile)):
        yield


def _store(variable, value, transaction):
    """Set a variable of the user's."""
    variable = getattr(variable.tag, 'stands_for', variable)
    transaction.convert(variable, np.array(value))  # the caller may be given the same rows as an output
    watcher = watcher_of(variable)
    transaction.then(_written_by_step, watcher)


def _written_by_step(watcher):
    watcher.after_write()
    watcher.touched = False  # the same on every rank: made from what they have added
