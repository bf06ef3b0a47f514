"""A plan, compiled: the functions of each part on each context, and the memory that its steps use again."""
from __future__ import annotations

import os
from typing import Any, Collection, Mapping, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors

from ..comm.communicator import Communicator
from ..comm.compilation import first_compiler
from ..comm.tree_products import Product
from ..devices.context_map import Context
from ..devices.failures import FailureExplained
from ..devices.launcher import Launcher
from ..devices.transfers import DeviceBuffers
from ..errors import MgpuError, user_frame
from ..exchange.memory import Memories
from ..exchange.over_ranks import OverRanks
from ..graph import graph
from ..graph.audit import audit
from ..graph.matrix_products import factors_of
from ..graph.repeatable import draws
from ..plan import Choice, Part, Program, StepPlan
from ..utils import progress
from ..utils.executors import Executor, make_executor
from ..utils.timeline import Timings
from . import compiler, graph_calls
from .consensus import check_same_graph
from .exchanges import exchanges_of
from .forked_parts import forked_parts
from .replicas.replicated import Replicated, Storages, replicated, storages_of
from .sharded_update import DeviceBroadcasts, UpdateOwners


class CompiledPart:
    """A part of a plan, with a function for each of its contexts.

    The ranks of the communicator compile the same part. Products among the `factored` outputs are made as a `Product`.
    """

    def __init__(self, part: Part, replicas: Mapping[SharedVariable, Replicated], communicator: Communicator, mode: Any,
                 factored: Collection[theano.Variable] = ()):
        self.part, shared = part, variables_of(part)
        self.variables = [replicas[variable] for variable in shared]
        self.updated = [replicas[variable] for variable in part.updates]  # their new values follow the outputs
        graph.check_inputs(part.inputs, [*part.graphs, *part.updates.values()])
        self._factors = [factors_of(each) if variable in factored else None
                         for variable, each in zip(part.outputs, part.graphs)]
        graphs = [each for pair, whole in zip(self._factors, part.graphs) for each in pair or (whole,)]
        compiled: dict[Context, Any] = {}
        with compiling(part), first_compiler(communicator):
            for i, context in enumerate(dict.fromkeys(part.contexts)):  # the host may be a place of every replica
                with FailureExplained(i, context, 'copies of shared variables'):
                    local = {variable: graph.seen_on(context.name, replicas[variable].on(context))
                             for variable in shared}
                    compiled[context] = compiler.compile_for(
                        context, list(part.inputs), graphs, part.updates, local, mode, part.name,
                        like=list(compiled.values()))
        self._copies = [[variable.on(context) for variable in self.variables] for context in part.contexts]
        self.functions = [compiled[context] for context in part.contexts]
        # Nothing looks into the calls of the functions: no mode that checks, and no profile.
        self.is_plain = all(each.mgpu_optimised is not None and not each.profile for each in self.functions)

    def function_of(self, place: int) -> tuple[Any, Sequence[bool], Sequence[int]]:
        """Return how to compute the part on its context of a number.

        The function's ``mgpu_call(*values)`` returns the outputs and the new values on the context's device; factored
        outputs are products that are not computed yet. Return with it whether it takes each value on its device, and
        for each result its number among the outputs and the new values.
        """
        function: Any = self.functions[place]
        if not any(self._factors):
            return function, function.mgpu_takes, function.mgpu_order
        return Factored(function, self._factors), function.mgpu_takes, range(len(self._factors) + len(self.updated))

    def storages(self, contexts: tuple[Context, ...], left_out: Sequence[bool]) -> Storages:
        """Return the Storages of the variables that get new values on contexts, but for some that are left out."""
        updated = [variable for variable, is_left_out in zip(self.updated, left_out) if not is_left_out]
        return storages_of(updated, contexts, self.part.copied_to)

    def refresh(self) -> None:
        """Bring the replicas up to date with the user's variables."""
        for i, (context, copies) in enumerate(zip(self.part.contexts, self._copies)):
            stale = [(variable, copy) for variable, copy in zip(self.variables, copies)
                     if copy not in variable.latest_in or variable.divided]
            if stale:
                with FailureExplained(i, context, 'copies of shared variables'):
                    for variable, copy in stale:
                        variable.refresh(copy, self.part.is_share)

    def drop(self) -> None:
        """Free the values that a failed call has left in the functions: Theano frees them in a call that ends."""
        for function in self.functions:
            if isinstance(function.mgpu_call, graph_calls.GraphCalls):
                function.mgpu_call.drop()
            for variable, cell in getattr(function.fn, 'storage_map', {}).items():
                if variable.owner is not None:
                    cell[0] = None


class Factored:
    """A function that makes some outputs as two factors each: they become a `Product` that is not computed yet."""

    def __init__(self, function: Any, factors: Sequence[Any]) -> None:
        self._function, self._factors = function, factors
        self._positions = np.argsort(function.mgpu_order).tolist()

    def mgpu_call(self, *values: Any) -> list[Any]:
        """Return the outputs, then the new values."""
        return self.combined(self._function.mgpu_call(*values))

    def combined(self, results: Sequence[Any]) -> list[Any]:
        """Return the outputs, then the new values, from the results of the function."""
        ordered = iter([results[i] for i in self._positions])
        outputs = [Product(next(ordered), next(ordered)) if pair else next(ordered) for pair in self._factors]
        return outputs + list(ordered)


class Executable:
    """A compiled plan."""

    def __init__(self, plan: StepPlan, communicator: Communicator, executor: str, timings: Timings,
                 mode: Any = None):
        self.plan, self.communicator, self.timings = plan, communicator, timings
        program, contexts = plan.program, plan.mesh.contexts
        groups = [group for part in plan.parts for group in part.sums]
        if plan.overlaps and not communicator.takes_threads and not all(group.way.by_devices for group in groups):
            raise MgpuError('mgpu.overlap=True exchanges gradients on a thread of its own, and MPI was started without '
                            'MPI_THREAD_MULTIPLE, which this needs. Leave out mpi4py.rc.thread_level and '
                            'mpi4py.rc.threads, or set mgpu.overlap=False')
        # Each rank has other shares of an update: they come last.
        read = [variables_of(part) for part in plan.parts if not part.is_share]
        read += [list(plan.divided.read)] if plan.divided else []
        read += [variables_of(part) for part in plan.parts if part.is_share]
        shared = list(dict.fromkeys(sum(read, [])))
        _check_same_program(communicator, program, shared)
        replicas = {variable: replicated(variable) for variable in shared}
        self.variables = list(dict.fromkeys(replicas.values()))  # the same on all ranks
        self._seen: int | None = None  # the `changes` when all replicas were up to date
        by_tree, self.on_devices = plan.shares.logical_shards > 0, plan.mesh.on_devices
        factored = {each.source for group in groups for each in group.exchanges}.difference(plan.kept) \
            if by_tree and not self.on_devices else ()
        self.parts = {part: CompiledPart(part, replicas, Communicator() if part.is_share else communicator, mode,
                                         factored) for part in plan.parts}
        self.functions = list(dict.fromkeys(each for compiled in self.parts.values() for each in compiled.functions))
        self.forked = forked_parts(self.parts, plan, executor)
        self.launcher = Launcher(choose_executor(executor, self.functions, len(contexts)), timings)
        memories = Memories(in_arena=self.forked is not None and self.forked.updates)
        self.exchanges = exchanges_of(plan, communicator, memories, self.launcher, timings)
        self.by_devices = [channel for _, channel in self.exchanges.values() if not channel.by_host]
        self.over_ranks = OverRanks(communicator, timings, plan.overlaps)
        self.owners = UpdateOwners(communicator, plan.divided, plan.broadcasts) if plan.divided else None
        self.broadcasts = DeviceBroadcasts(plan.broadcasts, communicator, memories) if plan.broadcasts else None
        # The outputs and new values of rank 0 count where an op may give other results on each rank.
        self.of_rank_0 = communicator.size > 1 and not plan.shares.is_divided and \
            draws([each for part in plan.parts for each in [*part.graphs, *part.updates.values()]])
        self.update_buffers = {context: DeviceBuffers(context) for part in plan.update for context in part.contexts}

    def drop(self) -> None:
        """Free the arrays that a failed step has left on the devices."""
        for order, channel in self.exchanges.values():
            order.drop()
            channel.drop()
        for compiled in self.parts.values():
            compiled.drop()

    def changes(self) -> list[Choice]:
        """Return what calls have chosen for the compiled parts, for the plan."""
        return graph_calls.changes(self.functions)

    def refresh(self) -> None:
        """Copy values of the user's variables to replicas that are out of date."""
        if self._seen == Replicated.changes:
            return
        seen = Replicated.changes
        for variable in self.variables:  # all of them: another function may have divided some otherwise
            if variable.divided and (self.owners is None or variable.divided != self.owners.gather):
                variable.divided()
            variable.note_edits()
            if variable.on_read is not None:
                variable.on_read(variable.variable)
        for compiled in self.parts.values():
            compiled.refresh()
        looks = any(variable.divided or variable.lent is not None or variable.on_read for variable in self.variables)
        self._seen = None if looks else seen  # each step looks at such variables

    def note_new_values(self) -> None:
        """Note that the replicas are up to date, after a step has stored new values."""
        if self._seen is not None:
            self._seen = Replicated.changes


def variables_of(part: Part) -> list[SharedVariable]:
    """Return the shared variables that a part reads and updates."""
    return graph.shared_variables([*part.graphs, *part.updates.values(), *part.updates])


def compiling(part: Part) -> Any:
    """Return a context manager that shows the progress of compiling a part for its contexts.

    A function without a name has the name of the line that has made its first output, as plain Theano's has.
    """
    frames = [frame for frame in map(user_frame, part.graphs) if frame]
    name = part.name or ('%s:%d' % (os.path.basename(frames[0][0]), frames[0][1]) if frames else 'a function')
    return progress.compiling(name, ' for ' + ', '.join(context.name for context in part.contexts))


def _check_same_program(ranks: Communicator, program: Program, shared: Sequence[SharedVariable]) -> None:
    outputs = [variable for stage in program.stages for variable in stage.outputs]
    outputs += [output.variable for output in program.outputs]
    inputs = [v for v in dict.fromkeys(ancestors(outputs)) if v.owner is None and not hasattr(v, 'container')
              and not isinstance(v, theano.Constant)]
    own = [variable for variable in shared if variable in program.own]
    check_same_graph(ranks, inputs + own, outputs, [variable for variable in shared if variable not in program.own])


def choose_executor(name: str, functions: Sequence[Any], n_replicas: int) -> Executor:
    """Return an executor for compiled functions of some replicas.

    For 'auto', and for 'mpi' in each of its processes, it takes threads where functions of two or more GPUs block
    inside, because ops of theirs fall to the host.
    """
    if name in ('auto', 'mpi'):
        blocking = {f.mgpu_context for f in functions if f.mgpu_context.kind == 'cuda' and _blocks(f)}
        name = 'threads' if len(blocking) > 1 else 'serial'
    return make_executor(name, n_replicas)


def _blocks(function: Any) -> bool:
    """Return whether a function waits for its device before it returns: it reads from the device on the way."""
    return any('HostFromGpu' in str(entry.op) for entry in audit(function))
