"""Build a function over a batch: from a graph to a plan, and from the plan to what runs."""
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.printing import Print

from .batches.batch_inputs import BatchInputs, InputValues
from .devices.choice import resolve_contexts
from .devices.context_map import describe
from .devices.mesh import Mesh
from .distributed.choice import choose_ranks
from .errors import warn
from .graphs.own_flags import builds_graphs
from .graphs.prints import take_prints
from .graphs.updates import with_givens
from .options import Options
from .patches.placement_tags import placed_on
from .placement.layout import placed
from .plan import CannotCut, Machine, Program, Shares, StepPlan, plan, record, undivided
from .profiling.timeline import PHASES, RANK_PHASES, Timings
from .replicas.replicated import Replicated, replicated
from .runtime import Executable, Splitter
from .runtime.consensus import share_first_values
from .runtime.executable import profiled
from .runtime.machine import gather

Updates = Dict[SharedVariable, theano.Variable]


class Definition(NamedTuple):
    """A graph over a batch, as plain Theano would compute it: the outputs, values to print last, and the new values."""

    outputs: List[theano.Variable]
    updates: Updates

    @property
    def whole(self) -> List[theano.Variable]:
        """The outputs, and the new values after them."""
        return self.outputs + list(self.updates.values())


@dataclass(frozen=True)
class Built:
    """What a function over a batch consists of.

    Attributes
    ----------
    inputs : BatchInputs
        Binds the arguments of calls, and finds the samples.
    definition : Definition
    prints : list of Print
        The ops that print the last outputs.
    number : int
        That of the function, the same on all ranks.
    refusal : str or None
        Why the graph cannot be divided.
    executable : Executable
        It has the plan.
    splitter : Splitter
    updated : list of Replicated
        The variables that get new values.
    """

    inputs: BatchInputs
    definition: Definition
    prints: List[Print]
    number: int
    refusal: Optional[str]
    executable: Executable
    splitter: Splitter
    updated: List[Replicated]

    @property
    def alike(self) -> List[Replicated]:
        """The variables that are the same on each replica and rank: those that are read, and those that a step changes.
        """
        plan = self.executable.plan
        read = [each for each in self.executable.variables if each.variable not in plan.program.own]
        # A rank that has samples of its own also has their states.
        own = plan.rows if plan.shares.is_sharded else ()
        return list(dict.fromkeys(read + [each for each, variable in zip(self.updated, plan.program.updated)
                                          if variable not in own]))


class Divided(NamedTuple):
    """A graph over a batch as a program: what is known before it is planned."""

    inputs: BatchInputs
    definition: Definition
    prints: List[Print]
    program: Program
    mesh: Mesh
    refusal: Optional[str]


@builds_graphs
def divide(inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Updates, options: Options,
           contexts: Sequence[Any], n_ranks: int = 1) -> Divided:
    """Divide a graph among the replicas of some contexts and ranks, if there are several and it can be divided.

    Parameters
    ----------
    inputs, outputs, updates, options
        As for `build`.
    contexts : list of Context, or list of list of Context
        Those of this process; in lists of their own, those of each replica of a placed graph.
    n_ranks : int
    """
    batch = BatchInputs(inputs, options, options.is_sharded(n_ranks))
    with placed_on(None):  # what is made of the graph is not the user's, whatever block this is called in
        outputs, updates = with_givens(outputs, updates, options.givens, options.no_default_updates)
        prints, outputs, updates = take_prints(outputs, updates)
        outputs, updates, mesh = placed(outputs, updates, contexts)
        definition = Definition(*batch.find_slices(outputs, updates))
        whole, refusal = definition.whole, None
        program, updated = undivided(whole), list(definition.updates)
        if options.internal.whole:
            mesh = mesh.first()
        elif n_ranks > 1 or len(mesh.replicas) > 1 or options.micro_batches > 1 or \
                options.updates_on(mesh.contexts) == 'host' and mesh.contexts[0].kind != 'cpu':
            try:
                program = batch.divide(whole, updated)
            except CannotCut as error:
                refusal, mesh = str(error), mesh.first()
    program = program._replace(given=batch.arguments.inputs + list(batch.rows.values()), updated=updated)
    return Divided(batch, definition, prints, program, mesh, refusal)


def plan_of(divided: Divided, options: Options, machine: Machine) -> StepPlan:
    """Return the plan of a divided graph."""
    shares = Shares(machine, divided.program.is_divided, options.is_sharded(machine.size), options.micro_batches,
                    options.least(divided.definition.whole))
    with placed_on(None):
        return plan(divided.program, divided.mesh, options, machine, shares, divided.refusal)


@builds_graphs
def build(inputs: Sequence[Any], outputs: Sequence[theano.Variable], updates: Updates, options: Options) -> Built:
    """Build a function over a batch.

    Parameters
    ----------
    inputs : list of (theano.Variable or theano.In)
    outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values. Default updates are added.
    options : Options

    Raises
    ------
    GraphError, ContextError, RankError
        If the graph cannot be run over the contexts, or the ranks have different graphs.
    """
    contexts, ranks = resolve_contexts(options.contexts), choose_ranks(options.executor)
    number = ranks.functions.add(options.name)
    divided = divide(inputs, outputs, updates, options, contexts, ranks.size)
    batch, program = divided.inputs, divided.program
    ranks.divided.consolidate()
    step_plan = plan_of(divided, options, gather(ranks, divided.mesh, options))
    timings = Timings(RANK_PHASES if ranks.size > 1 else PHASES)
    with profiled(options.profile), placed_on(None):
        executable = Executable(step_plan, ranks, options.executor, timings, options.mode)
    updated = [replicated(variable, variable in program.streams) for variable in program.updated]
    splitter = Splitter(step_plan, batch.arguments.with_samples + list(batch.rows.values()))
    built = Built(batch, divided.definition, divided.prints, number, divided.refusal, executable, splitter, updated)
    share_first_values(ranks, built.alike)
    record.note(step_plan, splitter)
    return built


class BuiltFunction(InputValues):
    """A base of functions over a batch, which shows what they consist of.

    Attributes
    ----------
    plan : StepPlan
        What runs where, what is exchanged, and why. Print it.
    built : Built
    options : Options
    executable : Executable
    ranks : Communicator
        The processes that call it together.
    timings : Timings
        Seconds that the calls spent in each phase, see `timeline.PHASES`.
    """

    def __init__(self, built: Built, options: Options):
        self.built, self.options = built, options
        self.executable, self.plan = built.executable, built.executable.plan
        self.ranks, self.timings = self.executable.communicator, self.executable.timings
        self.inputs, self.arguments = built.inputs, built.inputs.arguments

    @property
    def mesh(self):
        """The contexts of each replica; those of the first replica if the graph cannot be divided."""
        return self.plan.mesh

    @property
    def contexts(self):
        """The contexts that it runs on."""
        return self.plan.mesh.contexts

    @property
    def sharded(self):
        """Whether each process is given samples of its own."""
        return self.plan.shares.is_sharded

    @property
    def refused(self):
        """Why the graph cannot be divided; None if it can be."""
        return self.built.refusal

    @property
    def results(self):
        """The Outputs of the program that a call returns."""
        return self.plan.results[:len(self.plan.results) - len(self.built.prints)]

    @property
    def updated(self):
        """The Replicated of the variables that get new values."""
        return self.built.updated

    @property
    def functions(self):
        """The compiled functions of Theano: one per part and context."""
        return self.executable.functions

    @property
    def profiles(self):
        """The ProfileStats of the compiled functions, where they are profiled."""
        return [function.profile for function in self.functions if function.profile]

    @property
    def n_replicas(self):
        """Replicas on all ranks."""
        return self.plan.shares.n_replicas

    def warn_of_refusals(self) -> None:
        """Warn, with the reason, of what was asked for and is not done, such as to run on several contexts."""
        name = self.options.name or 'a function'
        if self.refused:
            warn('%s runs whole on %s, since it cannot be computed in parts: %s'
                 % (name, describe(self.contexts), self.refused))
        if self.options.recompute and len(self.mesh.places) == 1 and not self.options.flags.recompute:
            warn('recompute=True has no effect on %s, since it is not placed on several contexts. To save memory, '
                 'place it by "with mgpu.device(...)", or pass micro_batches=2 or more' % name)
