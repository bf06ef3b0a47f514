"""The building of a function over a batch: from a graph to a plan, and from the plan to an executable."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.printing import Print

from ..comm.communicator import Communicator
from ..devices.context_map import describe
from ..devices.memory_meter import Meter
from ..devices.mesh import Mesh
from ..errors import GraphError, warn
from ..graph.layers import name_function
from ..graph.partition import drawn_once
from ..graph.placement.tags import placed_on
from ..graph.rewrites import take_prints
from ..graph.theano_functions import builds_graphs
from ..graph.updates import with_givens
from ..options import AUTO, Options
from ..plan import CannotCut, Machine, Program, Shares, StepPlan, plan, record
from ..plan.context_layout import placed, spread_over
from ..plan.shares import against_speeds, weights_for
from ..utils.attributes import temporarily
from ..utils.timeline import PHASES, RANK_PHASES, Timings
from .batch import Splitter
from .batches.batch_inputs import BatchInputs
from .consensus import check_same_rounding, gather_machine, share_first_values
from .executable import Executable
from .replicas.replicated import Replicated, replicated

Updates = Dict[SharedVariable, theano.Variable]


class NotWanted(GraphError):
    """A graph can be divided, but not in a way that is wanted."""


class PlainGraph(NamedTuple):
    """A graph over a batch, as plain Theano would compute it: the outputs, values to print last, and the new values."""

    outputs: list[theano.Variable]
    updates: Updates

    @property
    def whole(self) -> list[theano.Variable]:
        """The outputs, and the new values after them."""
        return self.outputs + list(self.updates.values())


@dataclass(frozen=True)
class Divided:
    """A graph over a batch as a program, before it is planned."""

    inputs: BatchInputs
    definition: PlainGraph
    prints: list[Print]  # the ops that print the last outputs
    program: Program
    mesh: Mesh
    refusal: str | None  # why the graph cannot be divided, if so
    source: PlainGraph   # the graph as it was given, without places


@dataclass(frozen=True)
class Built(Divided):
    """A function over a batch that is planned and compiled."""

    number: int                  # of the function, the same on all ranks
    executable: Executable
    splitter: Splitter
    meter: Meter                 # of the memory in use after its first steps
    updated: list[Replicated]    # the variables that get new values
    data_sets: list[Replicated]  # the variables whose rows are the batch, or that it is sliced from on the host

    @property
    def variables(self) -> list[Replicated]:
        """The variables that a step reads and changes, on devices or on the host."""
        return list(dict.fromkeys(self.executable.variables + self.data_sets + self.updated))

    @property
    def alike(self) -> list[Replicated]:
        """The variables that are the same on each replica and rank: a step reads them, or changes them."""
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

    Default updates are added. The contexts belong to this process; of a placed graph, maybe in a list for each
    replica. A GraphError says why the graph cannot be run over them.
    """
    batch = BatchInputs(inputs, options, options.is_sharded(n_ranks))
    name_function(outputs, updates.values())
    with placed_on(None):  # new ops are not the user's, whatever block this is called in
        outputs, updates = with_givens(outputs, updates, options.givens, options.no_default_updates)
        prints, outputs, updates = take_prints(outputs, updates)
        source = PlainGraph(outputs, updates)
        outputs, updates, mesh = placed(outputs, updates, contexts) if not options.strategy.spread else \
            spread_over(outputs, updates, contexts, options.params)
        definition = PlainGraph(*batch.find_slices(outputs, updates))
        whole, refusal = definition.whole, None
        program, updated = batch.undivided(whole), list(definition.updates)
        if options.whole:
            mesh = mesh.first()
        elif n_ranks > 1 or len(mesh.replicas) > 1 or options.in_rounds or options.strategy.in_slices or \
                options.updates_on(mesh.contexts)[0] == 'host' and mesh.contexts[0].kind != 'cpu':
            try:
                program = batch.divide(whole, updated)
                if options.in_rounds:
                    program = drawn_once(program)
            except CannotCut as error:
                refusal, mesh = str(error), mesh.first()
    if options.wanted is not None and not options.wanted(program):
        raise NotWanted('%s can be divided, but not as it was asked for' % (options.name or 'a function'))
    program = program._replace(given=batch.given, updated=updated)
    return Divided(batch, definition, prints, program, mesh, refusal, source)


def plan_of(divided: Divided, options: Options, machine: Machine) -> StepPlan:
    is_divided, flag = divided.program.is_divided, options.flags.shares
    logical_shards = options.flags.logical_shards if is_divided else 0
    if logical_shards % machine.size and options.is_sharded(machine.size):
        raise GraphError('mgpu.logical_shards=%d, but %d processes have samples of their own, each as many of the '
                         'logical shards: choose a multiple of %d' % (logical_shards, machine.size, machine.size))
    shares = Shares(machine, is_divided, options.is_sharded(machine.size), options.slices,
                    options.least_samples, options.micro_batches == AUTO,
                    weights_for(flag, machine) if is_divided else (),
                    is_divided and machine.n_replicas > 1 and flag == AUTO and
                    not against_speeds(options.flags, divided.mesh, machine), logical_shards)
    with placed_on(None):
        return plan(divided.program, divided.mesh, options, machine, shares, divided.refusal)


@builds_graphs
def build(divided: Divided, options: Options, ranks: Communicator) -> Built:
    """Build a function over a batch, with the options that the graph was divided by.

    Raise a RankError if the ranks have different graphs, and a ReplicaError if a device has too little memory for
    copies of the variables, or fails.
    """
    number, program = ranks.add_function(options.name), divided.program
    ranks.consolidate()
    step_plan = plan_of(divided, options, gather_machine(ranks, divided.mesh, options))
    timings = Timings(RANK_PHASES if ranks.size > 1 else PHASES)
    deterministic = 'more' if step_plan.shares.logical_shards else theano.config.deterministic
    with temporarily(theano.config, 'profile', theano.config.profile or bool(options.profile)), \
            temporarily(theano.config, 'deterministic', deterministic), placed_on(None):
        executable = Executable(step_plan, ranks, options.executor, timings, options.mode)
    if options.flags.divides_always:
        check_same_rounding(ranks, divided.mesh)
    batch = divided.inputs
    splitter = Splitter(step_plan, batch.with_samples, executable.parts)
    built = Built(**vars(divided), number=number, executable=executable, splitter=splitter,
                  meter=Meter(step_plan.mesh.contexts), updated=list(map(replicated, program.updated)),
                  data_sets=[replicated(variable) for variable in
                             [*batch.data, *(batch.slices.data_sets() if batch.slices.on_host else ())]])
    share_first_values(ranks, built.alike)
    record.note(step_plan, [splitter, executable, *filter(None, [executable.forked])], timings, built.meter)
    return built


def warn_of_refusals(built: Built, options: Options) -> None:
    """Warn, with the reason, of requests that are not met, such as to run on several contexts."""
    name, plan = options.name or 'a function', built.executable.plan
    if built.refusal:
        warn('%s runs whole on %s, since it cannot be computed in parts: %s'
             % (name, describe(plan.mesh.contexts), built.refusal))
    if options.recompute and len(plan.mesh.places) == 1 and not options.flags.recompute:
        warn('recompute=True has no effect on %s, since it is not placed on several contexts. To save memory, '
             'place it by "with mgpu.device(...)", or pass micro_batches=2 or more' % name)
    shares = plan.shares
    if 0 < shares.logical_shards < shares.n_replicas:
        warn('mgpu.logical_shards=%d leaves %d of the %d replicas of %s without samples: give at least as many'
             % (shares.logical_shards, shares.n_replicas - shares.logical_shards, shares.n_replicas, name))
