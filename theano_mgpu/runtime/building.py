"""The building of a function over a batch: from a graph to a plan, and from the plan to an executable."""
from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Dict, Mapping, NamedTuple, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.configparser import change_flags
from theano.printing import Print

from ..comm.communicator import Communicator
from ..devices.context_map import describe
from ..devices.mesh import Mesh
from ..errors import GraphError, warn
from ..graph.draws import drawn_once
from ..graph.own_flags import builds_graphs
from ..graph.placement.tags import placed_on
from ..graph.prints import print_values, take_prints
from ..graph.updates import with_givens
from ..options import AUTO, Options
from ..plan import CannotCut, Machine, Program, Shares, StepPlan, plan, record
from ..plan.layout import placed, spread_over
from ..plan.shares import against_speeds, weights_for
from . import Executable, Splitter, send, step_times
from .batch import Batch
from .batches.batch_inputs import BatchInputs, InputValues
from .batches.example import Example
from .batches.prefetch import LookAhead
from .consensus import check_same_rounding, gather_machine, share_first_values
from .memory import DryStep
from .replicas.replicated import Replicated, replicated
from .sampled_timings import SampledTimings
from .timeline import PHASES, RANK_PHASES

Updates = Dict[SharedVariable, theano.Variable]


class Definition(NamedTuple):
    """A graph over a batch, as plain Theano would compute it: the outputs, values to print last, and the new values."""

    outputs: list[theano.Variable]
    updates: Updates

    @property
    def whole(self) -> list[theano.Variable]:
        """The outputs, and the new values after them."""
        return self.outputs + list(self.updates.values())


@dataclass(frozen=True)
class Divided:
    """A graph over a batch as a program, before it is planned.

    Attributes
    ----------
    inputs : BatchInputs
        Binds the arguments of calls, and finds the samples.
    definition : Definition
    prints : list of Print
        The ops that print the last outputs.
    program : Program
    mesh : Mesh
    refusal : str or None
        Why the graph cannot be divided.
    """

    inputs: BatchInputs
    definition: Definition
    prints: list[Print]
    program: Program
    mesh: Mesh
    refusal: str | None


@dataclass(frozen=True)
class Built(Divided):
    """A function over a batch that is planned and compiled.

    Attributes
    ----------
    number : int
        The number of the function, the same on all ranks.
    executable : Executable
        It has the plan.
    splitter : Splitter
    dry_step : DryStep
        It estimates the memory of steps.
    updated : list of Replicated
        The variables that get new values.
    data_sets : list of Replicated
        The variables that batches are sliced from on the host.
    """

    number: int
    executable: Executable
    splitter: Splitter
    dry_step: DryStep
    updated: list[Replicated]
    data_sets: list[Replicated]

    @property
    def variables(self) -> list[Replicated]:
        """The variables that a step reads and changes, on devices or on the host."""
        return list(dict.fromkeys(self.executable.variables + self.data_sets + self.updated))

    @property
    def alike(self) -> list[Replicated]:
        """The variables that are the same on each replica and rank: those that are read, and those that a step changes.
        """
        plan = self.executable.plan
        read = [each for each in self.executable.variables + self.data_sets
                if each.variable not in plan.program.own]
        # A rank that has samples of its own also has their states.
        own = plan.rows if plan.shares.is_sharded else ()
        return list(dict.fromkeys(read + [each for each, variable in zip(self.updated, plan.program.updated)
                                          if variable not in own]))


@builds_graphs
def divide(inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Updates, options: Options,
           contexts: Sequence[Any], n_ranks: int = 1) -> Divided:
    """Divide a graph among the replicas of some contexts and ranks, if there are several and it can be divided.

    Parameters
    ----------
    inputs : list of (theano.Variable or theano.In)
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values. Default updates are added.
    options : Options
    contexts : list of Context, or list of list of Context
        The contexts of this process; of a placed graph, maybe in a list for each replica.
    n_ranks : int

    Raises
    ------
    GraphError
        If the graph cannot be run over the contexts.
    """
    batch = BatchInputs(inputs, options, options.is_sharded(n_ranks))
    with placed_on(None):  # new ops are not the user's, whatever block this is called in
        outputs, updates = with_givens(outputs, updates, options.givens, options.no_default_updates)
        prints, outputs, updates = take_prints(outputs, updates)
        outputs, updates, mesh = placed(outputs, updates, contexts) if not options.internal.spread else \
            spread_over(outputs, updates, contexts, options.internal.params)
        definition = Definition(*batch.find_slices(outputs, updates))
        whole, refusal = definition.whole, None
        program, updated = batch.undivided(whole), list(definition.updates)
        if options.internal.whole:
            mesh = mesh.first()
        elif n_ranks > 1 or len(mesh.replicas) > 1 or options.in_rounds or options.internal.in_slices or \
                options.updates_on(mesh.contexts) == 'host' and mesh.contexts[0].kind != 'cpu':
            try:
                program = batch.divide(whole, updated)
                if options.in_rounds:
                    program = drawn_once(program)
            except CannotCut as error:
                refusal, mesh = str(error), mesh.first()
    program = program._replace(given=batch.given, updated=updated)
    return Divided(batch, definition, prints, program, mesh, refusal)


def plan_of(divided: Divided, options: Options, machine: Machine) -> StepPlan:
    """Return the plan of a divided graph."""
    is_divided, flag = divided.program.is_divided, options.flags.shares
    logical_shards = options.flags.logical_shards if is_divided else 0
    if logical_shards % machine.size and options.is_sharded(machine.size):
        raise GraphError('mgpu.logical_shards=%d, but %d processes have samples of their own, each as many of the '
                         'logical shards: choose a multiple of %d' % (logical_shards, machine.size, machine.size))
    shares = Shares(machine, is_divided, options.is_sharded(machine.size), options.slices,
                    options.least(divided.definition.whole), options.micro_batches == AUTO,
                    weights_for(flag, machine) if is_divided else (),
                    is_divided and machine.n_replicas > 1 and flag == AUTO and
                    not against_speeds(options.flags, divided.mesh, machine), logical_shards)
    with placed_on(None):
        return plan(divided.program, divided.mesh, options, machine, shares, divided.refusal)


@builds_graphs
def build(divided: Divided, options: Options, ranks: Communicator) -> Built:
    """Build a function over a batch.

    Parameters
    ----------
    divided : Divided
    options : Options
        Those that the graph was divided by.
    ranks : Communicator

    Raises
    ------
    ContextError, RankError
        If the graph cannot be run over the contexts, or the ranks have different graphs.
    ReplicaError
        If a device has too little memory for copies of the variables, or fails.
    """
    number, program = ranks.functions.add(options.name), divided.program
    ranks.divided.consolidate()
    step_plan = plan_of(divided, options, gather_machine(ranks, divided.mesh, options))
    timings = SampledTimings(RANK_PHASES if ranks.size > 1 else PHASES)
    deterministic = 'more' if step_plan.shares.logical_shards else theano.config.deterministic
    with change_flags(profile=theano.config.profile or bool(options.profile), deterministic=deterministic), \
            placed_on(None):
        executable = Executable(step_plan, ranks, options.executor, timings, options.mode)
    if options.divides_always:
        check_same_rounding(ranks, divided.mesh)
    batch = divided.inputs
    splitter = Splitter(step_plan, batch.with_samples)
    dry_step = DryStep(executable, splitter)
    built = Built(**vars(divided), number=number, executable=executable, splitter=splitter, dry_step=dry_step,
                  updated=list(map(replicated, program.updated)),
                  data_sets=[replicated(variable) for variable in batch.slices.data_sets()]
                  if batch.slices.on_host else [])
    share_first_values(ranks, built.alike)
    record.note(step_plan, splitter, timings, weakref.WeakMethod(dry_step.estimate))
    step_times.note(executable)
    return built


class BuiltFunction(InputValues):
    """A base of functions over a batch, which has their parts, and makes the batches of their calls.

    Attributes
    ----------
    plan : StepPlan
        The parts, their contexts, the exchanges, and the reasons. Print it.
    built : Built
    options : Options
    executable : Executable
    ranks : Communicator
        The processes that call it together.
    timings : SampledTimings
        Seconds that the calls spent in each phase, see `timeline.PHASES`.
    mesh : Mesh
        The contexts of each replica; of the first replica alone if the graph cannot be divided.
    contexts : list of Context
        The contexts that it runs on.
    n_replicas : int
        Replicas on all ranks.
    sharded : bool
        Whether each process is given samples of its own.
    refused : str or None
        Why the graph cannot be divided, if that is so.
    updated : list of Replicated
        The variables that get new values.
    functions : list of theano.compile.function_module.Function
        One per part and context.
    look_ahead : LookAhead
        The next batch, where it is known.
    """

    def __init__(self, built: Built, options: Options):
        self.built, self.options, self.inputs, self.arguments = built, options, built.inputs, built.inputs.arguments
        self.executable, self.updated, self.refused = built.executable, built.updated, built.refusal
        self.ranks, self.timings = self.executable.communicator, self.executable.timings
        self.plan, self.functions = self.executable.plan, self.executable.functions
        self.mesh, self.contexts, self.n_replicas = self.plan.mesh, self.plan.mesh.contexts, self.plan.shares.n_replicas
        self.sharded = self.plan.shares.is_sharded
        self.look_ahead, self._example = LookAhead(self._prepare), Example(self.arguments, self.ranks)

    @property
    def profiles(self) -> list[Any]:
        """The ProfileStats of the compiled functions, where they are profiled."""
        return [function.profile for function in self.functions if function.profile]

    def split(self, values: Any, states: Mapping[SharedVariable, np.ndarray] = {},
              lengths: Sequence[int] | None = None, alone: bool = False) -> Batch:
        """Return the batch of the arguments of a call.

        Parameters
        ----------
        values : list of ndarray, or None
            Of the inputs; None where the data of this process has ended.
        states : dict of SharedVariable to ndarray
            The values of states with a row a sample.
        lengths : list of int, optional
            Samples that each rank was given; by default, all of them in `values`.
        alone : bool
            Whether the first replica is to have all of it.
        """
        lengths = [self.inputs.length(values)] if lengths is None else lengths
        if self.sharded:
            values = self._example.replacing(values, lengths)
        rows = {self.inputs.rows[variable]: value for variable, value in states.items()}
        sliced = self.inputs.slices.taken(values)
        return self.built.splitter.split({**dict(zip(self.arguments.inputs, values)), **sliced, **rows}, lengths, alone)

    def _prepare(self, args: Sequence[Any]) -> tuple[Sequence[Any], Batch] | None:
        """Split and send a batch while the devices compute the one before; return its values and the Batch."""
        if self.sharded or self.inputs.rows or self.inputs.slices.on_host:
            return None  # a data set that is set before the next step counts for it
        with self.timings.span('scatter'):
            values = self.arguments.bind(args, {})
            batch = self.split(values)
        send(self.executable, batch)
        return values, batch

    def print_last(self, outputs: list[np.ndarray] | None) -> list[np.ndarray] | None:
        """Print the last outputs, if the graph has them printed, and return the others."""
        prints = self.built.prints
        if not prints or outputs is None:
            return outputs
        if self.sharded or self.ranks.rank == 0:
            print_values(prints, outputs[-len(prints):])
        return outputs[:-len(prints)]

    def warn_of_refusals(self) -> None:
        """Warn, with the reason, of requests that are not met, such as to run on several contexts."""
        name = self.options.name or 'a function'
        if self.refused:
            warn('%s runs whole on %s, since it cannot be computed in parts: %s'
                 % (name, describe(self.contexts), self.refused))
        if self.options.recompute and len(self.mesh.places) == 1 and not self.options.flags.recompute:
            warn('recompute=True has no effect on %s, since it is not placed on several contexts. To save memory, '
                 'place it by "with mgpu.device(...)", or pass micro_batches=2 or more' % name)
        shares = self.executable.plan.shares
        if 0 < shares.logical_shards < shares.n_replicas:
            warn('mgpu.logical_shards=%d leaves %d of the %d replicas of %s without samples: give at least as many'
                 % (shares.logical_shards, shares.n_replicas - shares.logical_shards, shares.n_replicas, name))
