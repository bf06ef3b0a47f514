"""A graph over a batch, run over several contexts: what every function of the package has."""
import threading
import time
from typing import Any, Dict, List, Sequence

import numpy as np
import theano

from .batches.batch_inputs import BatchInputs, InputValues
from .batches.prefetch import LookAhead
from .batches.scatter import Scatter
from .devices.context_map import describe
from .devices.contexts import check_process
from .distributed.activities import AGREE
from .distributed.collectives import all_gather_int
from .distributed.consistency import handshake_for_batch
from .distributed.failures import raise_common
from .errors import LengthError, warn
from .graphs.own_flags import builds_graphs
from .graphs.prints import print_values, take_prints
from .graphs.updates import with_givens
from .jobs import rank_process
from .options import UPDATE_ON
from .patches.placement_tags import placed_on
from .patches.shared_variables import add_step_lock
from .placement.layout import placed
from .profiling.timeline import PHASES, RANK_PHASES, Timings
from .program import CannotCut, CompiledProgram, Runner, undivided
from .program.parallel_graph import choose_ranks, profiled, resolve_contexts, share_first_values
from .program.transaction import Transaction
from .replicas.replicated import replicated
from .verification import self_check


class DataParallel(InputValues):
    """A graph over a batch, computed in one sub-batch per context, with the result of one device.

    Parameters
    ----------
    inputs : list of theano.Variable
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values. Default updates are added.
    options : Options

    Attributes
    ----------
    mesh : Mesh
        The contexts of each replica.
    placement : dict of SharedVariable to str
        Where the graph is placed, the place of each shared variable.
    is_divided : bool
        Whether batches are divided among replicas.
    refused : str or None
        Why the graph cannot be divided.
    ranks : Communicator
        The processes that call it together.
    runner : Runner
    samples : int
        Of the last batch, on all ranks.
    seconds : float
        Duration of the last step up to its new values; gathering outputs with one row per sample is not included.
    timings : Timings
        Seconds that the calls spent in each phase, see `timeline.PHASES`.
    """

    @builds_graphs
    def __init__(self, inputs, outputs, updates, options):
        self.options, contexts = options, resolve_contexts(options.contexts)
        self.ranks = choose_ranks(options.executor)
        self.number = self.ranks.functions.add(options.name)
        self.sharded = options.is_sharded(self.ranks)
        self.inputs = BatchInputs(inputs, options, self.sharded)
        self.arguments = self.inputs.arguments
        self.lock = threading.RLock()
        self.samples = self.calls = 0
        self.seconds = 0.0
        self.timings = Timings(RANK_PHASES if self.ranks.size > 1 else PHASES)
        self.look_ahead = LookAhead(self._prepare)
        self._verifies = theano.config.mgpu.verify == 'True'
        with placed_on(None):  # what is made of the graph is not the user's, whatever block this is called in
            outputs, updates = with_givens(outputs, updates, options.givens, options.no_default_updates)
            self._prints, outputs, updates = take_prints(outputs, updates)
            outputs, updates, self.placement, self.mesh = placed(outputs, updates, contexts)
            self.definition = self.inputs.find_slices(outputs, updates)
            self._compile(*self.definition)

    def _compile(self, outputs, updates):
        options, updated = self.options, list(updates)
        self.ranks.divided.consolidate()
        whole = outputs + list(updates.values())
        self.refused = None
        self.is_divided = not options.whole and (
            self.ranks.size > 1 or len(self.mesh.replicas) > 1 or options.micro_batches > 1 or
            options.updates_on(self.contexts) == 'host' and self.contexts[0].kind != 'cpu')
        if options.whole:
            self.mesh = self.mesh.first()
        program = self._divided(whole, updated)
        # Ranks compile the same graphs, whatever their devices.
        where = min(all_gather_int(self.ranks, UPDATE_ON.index(options.updates_on(self.contexts))))
        with profiled(options.profile):
            self.compiled_program = CompiledProgram(
                program, self.arguments.inputs + list(self.inputs.rows.values()), updated,
                UPDATE_ON[where], self.mesh, self.placement, self.ranks, options)
        self.runner = Runner(self.compiled_program, self.ranks, options.executor, self.timings)
        self.scatter = Scatter(self.arguments, self.inputs.rows, program, self.runner, self.is_divided,
                               options.micro_batches, options.least(whole), self.sharded)
        self.updated = [replicated(variable, variable in program.streams) for variable in updated]
        # A rank that has samples of its own also has their states.
        own = self.compiled_program.rows if self.sharded else ()
        self._alike = [each for each, variable in zip(self.updated, updated) if variable not in own]
        share_first_values(self.ranks, self._alike)
        for variable in self._read() + self.updated:
            add_step_lock(variable, self.lock)

    def _divided(self, outputs, updated):
        """The Program of the graph: divided among replicas, if there are several and it can be."""
        if self.is_divided:
            try:
                return self.inputs.divide(outputs, updated)
            except CannotCut as error:
                self.refused, self.is_divided = str(error), False
                self.mesh = self.mesh.first()
        return undivided(outputs)

    def warn_of_refusals(self):
        """Warn, with the reason, of what was asked for and is not done, such as to run on several contexts."""
        name = self.options.name or 'a function'
        if self.refused:
            warn('%s runs whole on %s, since it cannot be computed in parts: %s'
                 % (name, describe(self.contexts), self.refused))
        if self.options.recompute and len(self.mesh.places) == 1 and theano.config.mgpu.recompute != 'True':
            warn('recompute=True has no effect on %s, since it is not placed on several contexts. To save memory, '
                 'place it by "with mgpu.device(...)", or pass micro_batches=2 or more' % name)

    @property
    def contexts(self):
        """The contexts that it runs on; those of the first replica if the graph cannot be divided."""
        return self.mesh.contexts

    @property
    def results(self):
        """The Outputs of the program that a call returns."""
        return self._returned(self.compiled_program.results)

    def _returned(self, values):
        """Those of the outputs that a call returns; the others are printed."""
        return values[:len(values) - len(self._prints)] if self._prints else values

    @property
    def compiled(self):
        """The compiled functions: one per stage and context."""
        functions = [function for each in self.compiled_program.graphs for function in each.compiled]
        return list(dict.fromkeys(functions))  # one on the host may be that of several replicas

    @property
    def profiles(self):
        """The ProfileStats of the compiled functions, where they are profiled."""
        return [function.profile for function in self.compiled if function.profile]

    @property
    def n_replicas(self):
        """Replicas on all ranks."""
        return self.scatter.n_replicas

    def replicated(self):
        """All variables that are the same on each replica and rank: those that they read, and that a step changes."""
        own = self.compiled_program.program.own
        return dict.fromkeys([each for each in self._read() if each.variable not in own] + self._alike)

    def _read(self):
        return self.compiled_program.variables

    def step(self, args: Sequence[Any], kwargs: Dict[str, Any]) -> List[np.ndarray]:
        """Compute a batch on every rank; on an error nothing changes on any rank.

        Returns
        -------
        list of ndarray
            The outputs.
        """
        try:
            if self._verifies and self_check.is_divided(self, args, kwargs):
                self._verifies = False  # only the first one is compared
                self_check.check(self, args, kwargs)
            return self._printed(self.locked_step((args, kwargs)))
        finally:
            self.arguments.forget_assigned()

    def _printed(self, outputs):
        """Print what the graph prints; returns the outputs without it."""
        if not self._prints or outputs is None:
            return outputs
        if self.sharded or self.ranks.rank == 0:
            print_values(self._prints, outputs[-len(self._prints):])
        return self._returned(outputs)

    def locked_step(self, arguments):
        """Compute a batch, and return the outputs and the values to print.

        Parameters
        ----------
        arguments : tuple of args and kwargs, or None
            None for a process whose data has ended.
        """
        if self.runner.on_devices:
            check_process()
        # One line, because Ctrl-C may raise between two lines, after the lock is taken and before `with` can free it.
        with self.lock: return self._step(arguments)  # noqa: E701

    def _step(self, arguments):
        with self.ranks.single_thread:
            began = time.perf_counter()
            with self.timings.span('scatter'):
                ahead, values, states, own = self._bind(arguments)
            with self.timings.span('wait'):
                lengths, taken = handshake_for_batch(self, own, values)
            if taken is not values:  # those of rank 0
                ahead, values, own = None, taken, lengths[0]
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
                    self.ranks.handshake((AGREE,))
                with self.timings.span('update'):
                    transaction.commit()
            except BaseException as error:
                transaction.roll_back()
                raise_common(self.ranks, error, of_step=True)
            rank_process.note_step()
            return outputs

    def _compute(self, batch, transaction, began):
        """Run the program, and have new values stored by the transaction; returns the outputs."""
        runner, compiled = self.runner, self.compiled_program
        runner.run_stages(batch, transaction, self.look_ahead.prepare)
        results = runner.run_parts(batch, transaction)
        with self.timings.span('run'):  # results that stayed on the device may still be in progress
            found = runner.values(batch, results)
        self._check([found.get(output) for output in self.results])
        self.seconds = time.perf_counter() - began
        found.update(runner.gather(runner.row_outputs, batch, self.sharded))
        if not (self.sharded and batch.idle):
            states = runner.gather(list(compiled.rows.values()), batch, self.sharded)
            with self.timings.span('update'):
                for variable, output in compiled.rows.items():
                    transaction.store_rows(variable, states[output])
        return [found[output] for output in compiled.results]

    def _check(self, results):
        """Raise an error where results are not to be used; those with a row a sample are not among them."""

    def verify(self, *args, tolerance=None, **kwargs):
        """Compute a batch with plain Theano on the host, and over the contexts, from the same state, and compare.

        Parameters
        ----------
        *args, **kwargs : array_like
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
        return self_check.certificate(self, args, kwargs, tolerance)

    def refresh(self) -> None:
        """Copy values of the user's variables to replicas that are out of date."""
        self.compiled_program.refresh()

    def join(self) -> None:
        """Wait for the other processes, where each feeds its own data, once the data of this one has ended.

        Until the data of all has ended, this process takes part in the others' calls, without samples.
        """
        for _ in self.joined():
            pass

    def joined(self):
        """As `join`; yields the outputs and the number of samples of each call."""
        while self.sharded:
            outputs = self._printed(self.locked_step(None))
            if not self.samples:
                return
            yield outputs, self.samples

    def _bind(self, arguments):
        """The batch that was prepared, or None; the arguments, the states with a row a sample, and their length."""
        states = self.inputs.states()
        if arguments is None:
            return None, None, states, 0
        ahead = self.look_ahead.take(*arguments)
        if ahead:
            return ahead.batch, ahead.values, {}, self.inputs.length(ahead.values)
        values = self.arguments.bind(*arguments)
        return None, values, states, self.inputs.length(values, states)

    def _prepare(self, args):
        """Scatter and send a batch while the devices compute the one before it: its values, and the Batch."""
        if self.sharded or self.inputs.rows:
            return None
        with self.timings.span('scatter'):
            values = self.arguments.bind(args, {})
            batch = self.scatter(values, {}, [self.inputs.length(values)])
        self.runner.send(batch.rounds[0], batch.common)
        return values, batch
