"""A plan, compiled: the functions of each part on each context, and the memory that its steps use again."""
import contextlib
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..devices.context_map import HOST, Context
from ..devices.contexts import contexts as active_contexts
from ..distributed.alone import Alone
from ..distributed.communicator import Communicator
from ..distributed.compilation import first_compiler
from ..graphs import graph
from ..plan import Exchange, Part, Program, StepPlan, SumGroup
from ..profiling.timeline import Timings
from ..replicas.replicated import Replicated, replicated
from ..replicas.transfers import DeviceBuffers
from ..utils import progress
from .advice import MemoryExplained
from .consensus import check_same_graph, share_first_values
from .divided_update import UpdateOwners
from .launcher import Launcher, choose_executor
from .over_ranks import OverRanks
from .sums import HostSums, sums_of


class CompiledPart:
    """A part of a plan, with a function for each of its contexts.

    Parameters
    ----------
    part : Part
    replicas : dict of SharedVariable to Replicated
        Those of the variables that it reads and updates.
    first : int
        Replicas of the ranks before this one.
    communicator : Communicator
        The processes that compile the same part.
    mode : str or theano.Mode, optional

    Attributes
    ----------
    functions : list of theano.compile.function_module.Function
        One a context.
    takes : list of list of bool
        For each context, the inputs that are taken on its device.
    variables : list of Replicated
        Those that it reads and updates.
    updated : list of Replicated
        The variables whose new values follow the outputs.
    """

    def __init__(self, part: Part, replicas: Mapping[SharedVariable, Replicated], first: int,
                 communicator: Communicator, mode: Any):
        self.part, self.level = part, part.level
        self.variables = [replicas[variable] for variable in variables_of(part)]
        self.updated = [replicas[variable] for variable in part.updates]
        indices = {context: i for i, context in enumerate(active_contexts())}
        graph.check_inputs(part.inputs, list(part.graphs) + list(part.updates.values()))
        compiled: Dict[Context, Any] = {}
        with compiling(part.name, part.inputs, part.contexts), first_compiler(communicator):
            for i, context in enumerate(dict.fromkeys(part.contexts)):  # the host may be a place of every replica
                with MemoryExplained(i, context, 'copies of shared variables'):
                    local = {variable: replicas[variable].on(context, indices.get(context, 0), first)
                             for variable in variables_of(part)}
                    compiled[context] = graph.compile_for(context, list(part.inputs), list(part.graphs), part.updates,
                                                          local, mode, part.name, like=list(compiled.values()))
        self.functions = [compiled[context] for context in part.contexts]
        self.takes = [function.mgpu_takes for function in self.functions]
        self._positions = np.argsort(self.functions[0].mgpu_order).tolist()

    def refresh(self) -> None:
        """Bring the replicas up to date with the user's variables."""
        own = self.part.is_share
        for i, context in enumerate(self.part.contexts):
            with MemoryExplained(i, context, 'copies of shared variables'):
                for variable in self.variables:
                    variable.refresh([context], own)

    def run(self, replica: int, arguments: Sequence[Any]) -> Tuple[List[Any], List[Any]]:
        """Run one replica.

        Parameters
        ----------
        replica : int
        arguments : list of ndarray or pygpu.gpuarray.GpuArray
            Of the inputs' types, on the device where it `takes` them there.

        Returns
        -------
        outputs, new_values : list
            On the replica's device.
        """
        made = self.functions[replica].unwatched_call(*arguments)
        results = [made[i] for i in self._positions]
        n_outputs = len(self.part.outputs)
        return results[:n_outputs], results[n_outputs:]


class CompiledBoundary(NamedTuple):
    """What is exchanged before a stage: all exchanges, the sums among them, and the others."""

    exchanges: Sequence[Exchange]
    sums: List[HostSums]
    others: Sequence[Exchange]


class CompiledStage(NamedTuple):
    """A stage of an Executable: the boundary before it, the values of earlier stages that it takes, and its parts."""

    boundary: CompiledBoundary
    saved: List[Tuple[theano.Variable, theano.Variable]]
    parts: List[CompiledPart]


class Executable:
    """A compiled plan.

    Parameters
    ----------
    plan : StepPlan
    communicator : Communicator
        The processes that run it together.
    executor : str
        See `choose_executor`.
    timings : Timings
    mode : str or theano.Mode, optional

    Attributes
    ----------
    stages : list of CompiledStage
    last : CompiledBoundary
    update : list of CompiledPart
    sums : dict of SumGroup to HostSums
    variables : list of Replicated
        Those that the parts read and update, and those that other ranks compute; each once, the same on all ranks.
    owners : UpdateOwners or None
        If ranks divide the update.
    streams : frozenset of SharedVariable
        Random states that each replica has one of its own of.
    launcher : Launcher
    on_devices : bool
        Whether any context is on a device other than the CPU.
    """

    def __init__(self, plan: StepPlan, communicator: Communicator, executor: str, timings: Timings, mode: Any = None):
        self.plan, self.communicator, self.timings = plan, communicator, timings
        program, machine = plan.program, plan.machine
        if plan.overlaps:
            communicator.check_threads()
        self.streams = frozenset(program.streams)
        of_update = list(plan.divided.read) if plan.divided else []
        common = [variables_of(part) for part in plan.parts if not part.is_share]
        shares = [variables_of(part) for part in plan.parts if part.is_share]
        read = list(dict.fromkeys(sum(common + [of_update] + shares, [])))
        _check_same_program(communicator, program, read)
        replicas = {variable: replicated(variable, variable in program.streams) for variable in read}
        self.variables = list(dict.fromkeys(replicas.values()))
        share_first_values(communicator, [each for each in self.variables if each.variable not in program.own])
        # Other ranks compile other shares of an update.
        compiled = {part: CompiledPart(part, replicas, machine.first_replica,
                                       Alone() if part.is_share else communicator, mode) for part in plan.parts}
        self.update = [compiled[part] for part in plan.update]
        self.on_devices = any(context.kind != 'cpu' for context in plan.mesh.contexts)
        self.launcher = Launcher(choose_executor(executor, self.functions_of(compiled.values()),
                                                 len(plan.mesh.contexts)))
        self._make_sums()
        self.stages = [CompiledStage(self._boundary(stage.boundary), list(stage.saved.items()),
                                     [compiled[part] for part in stage.parts]) for stage in plan.stages]
        self.last = self._boundary(plan.last)
        self.over_ranks = OverRanks(communicator, timings, plan.overlaps)
        self.owners = plan.divided and UpdateOwners(communicator, plan.divided)
        self._parts = list(compiled.values())
        self._update_buffers: Dict[Context, DeviceBuffers] = {}

    @staticmethod
    def functions_of(parts: Iterable[CompiledPart]) -> List[Any]:
        """Return the functions of parts, each once: one on the host may be that of several replicas."""
        return list(dict.fromkeys(function for part in parts for function in part.functions))

    @property
    def functions(self) -> List[Any]:
        """The compiled functions of Theano."""
        return self.functions_of(self._parts)

    def refresh(self) -> None:
        """Copy values of the user's variables to replicas that are out of date."""
        for variable in self.variables:  # of all parts, since another function may have divided some of them otherwise
            if variable.divided and (self.owners is None or variable.divided != self.owners.gather):
                variable.divided()
            if variable.lent:
                variable.note_edits()
        for part in self._parts:
            part.refresh()

    def update_buffers(self, context: Context) -> DeviceBuffers:
        """Return the memory on a context's device that the arguments of updates are sent to."""
        if context not in self._update_buffers:
            self._update_buffers[context] = DeviceBuffers(context)
        return self._update_buffers[context]

    def _make_sums(self):
        plan = self.plan
        read_on = {context: set() for context in plan.mesh.contexts + [HOST]}
        for part in plan.parts:
            for context in part.contexts:
                read_on[context].update(part.given)
        one_replica = plan.machine.size == len(plan.mesh.replicas) == 1
        groups = [group for part in plan.parts for group in part.sums]
        self.sums: Dict[SumGroup, HostSums] = {
            group: sums_of(group, plan.kept, read_on, self.launcher, self.timings, one_replica) for group in groups}

    def _boundary(self, boundary) -> CompiledBoundary:
        return CompiledBoundary(boundary.exchanges, [self.sums[group] for group in boundary.sums], boundary.others)


def variables_of(part: Part) -> List[SharedVariable]:
    """Return the shared variables that a part reads and updates."""
    return graph.shared_variables(list(part.graphs) + list(part.updates.values()) + list(part.updates))


def compiling(name: Optional[str], inputs: Sequence[theano.Variable], contexts: Sequence[Context]):
    """Return a context manager that shows the progress of compiling a function for some contexts."""
    names = [variable.name for variable in inputs if variable.name]
    shown = 'a function' + ' of ' * bool(names) + ', '.join(names[:3]) + ', ...' * (len(names) > 3)
    return progress.compiling('compiling %s for %s' % (name or shown, ', '.join(each.name for each in contexts)))


@contextlib.contextmanager
def profiled(profile: Optional[bool]):
    """Profile what is compiled in a ``with`` block, if `profile` is true or the flag ``profile`` is."""
    with theano.configparser.change_flags(profile=theano.config.profile or bool(profile)):
        yield


def _check_same_program(ranks: Communicator, program: Program, read: Sequence[SharedVariable]) -> None:
    """Raise a RankError unless all ranks have the same program over variables of the same shapes."""
    if ranks.size == 1:
        return
    outputs = [variable for stage in program.stages for variable in stage.outputs]
    outputs += [output.variable for output in program.outputs]
    inputs = [v for v in dict.fromkeys(ancestors(outputs)) if v.owner is None and not hasattr(v, 'container')
              and not isinstance(v, theano.Constant)]
    own = [variable for variable in read if variable in program.own]
    check_same_graph(ranks, inputs + own, outputs, [variable for variable in read if variable not in program.own])
