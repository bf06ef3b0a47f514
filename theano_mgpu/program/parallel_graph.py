"""One graph compiled for several contexts, over replicas of its shared variables."""
import contextlib
import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable

from ..devices.context_map import Context, describe
from ..devices.contexts import contexts as active_contexts
from ..devices.contexts import get as get_context
from ..devices.mesh import rows_of
from ..distributed.activities import BUILD
from ..distributed.alone import Alone
from ..distributed.collectives import all_gather_int
from ..distributed.communicator import Communicator
from ..distributed.compilation import first_compiler
from ..distributed.consistency import take_values_of_first
from ..distributed.mpi import mpi_communicator
from ..errors import ContextError, RankError
from ..executors import TaskError, make_executor
from ..graphs import graph
from ..graphs.audit import audit
from ..jobs import mpi_environment
from ..replicas.replicated import replicated
from ..utils import progress
from .advice import error_of, memory_explained
from .partition import Program


def resolve_contexts(contexts):
    """The Contexts that a function runs over.

    Parameters
    ----------
    contexts : list of (str or Context), or list of lists of these, or None
        In lists of their own: the contexts of each replica of a placed graph. None for all active ones.

    Returns
    -------
    list of Context, or list of list of Context
        With several processes on a host, those of them that belong to this process; lists of contexts are complete, and
        `mesh.mesh_of` selects those of this process.

    Raises
    ------
    ContextError
        If the list is empty, names a context twice or one that is not mapped, or none of this process's own.
    """
    if contexts is None:
        return active_contexts()
    if isinstance(contexts, str):
        contexts = [contexts]
    if not isinstance(contexts, (list, tuple)):
        raise ContextError('contexts=%r is not a list of contexts or their names, such as %r; mgpu.init(%r) maps them'
                           % (contexts, [context.name for context in active_contexts()], contexts))
    rows = rows_of(contexts)
    if rows and len(rows) < len(contexts):
        raise ContextError('contexts=%r mixes contexts with lists of contexts: give one list, or a list for each '
                           'replica' % (contexts,))
    chosen = [get_context(c.name if isinstance(c, Context) else c) for c in (sum(rows, []) if rows else contexts)]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ContextError('a function runs over at least one context, each named once; given: %r, known: %s'
                           % (list(contexts), describe(active_contexts())))
    own = [context for context in chosen if context in active_contexts()]
    if not own:
        raise ContextError('the contexts %s are those of other processes; this one has %s'
                           % (describe(chosen), describe(active_contexts())))
    if rows:
        return [[chosen.pop(0) for _ in row] for row in rows]
    return own


class ParallelGraph:
    """A graph compiled for each of several contexts.

    Parameters
    ----------
    inputs, outputs : list of theano.Variable
    updates : dict of SharedVariable to theano.Variable
        New values, returned after the outputs.
    contexts : list of Context
    ranks : Communicator
        The processes that do the same.
    program : Program
        What the graph is a part of: its `streams` are one a context, its `own` data one a process.
    mode, name
        As for `theano.function`.

    Attributes
    ----------
    compiled : list of theano.compile.function_module.Function
        One a context.
    takes : list of list of bool
        For each context, which inputs are taken on its device.
    replicas : list of int
        Contexts of each rank.
    """

    def __init__(self, inputs: List[theano.Variable], outputs: List[theano.Variable],
                 updates: Dict[SharedVariable, theano.Variable], contexts: List[Context], ranks: Communicator,
                 program: Program, mode: Any = None, name: Optional[str] = None):
        graph.check_inputs(inputs, outputs + list(updates.values()))
        self.contexts = contexts
        self.n_outputs = len(outputs)
        shared = graph.shared_variables(outputs + list(updates.values()) + list(updates))
        own = [variable for variable in shared if variable in program.own]
        alike = [variable for variable in shared if variable not in own]
        self.replicas = check_same_graph(ranks, inputs + own, outputs + list(updates.values()), alike, len(contexts))
        self.variables = [replicated(variable, variable in program.streams) for variable in shared]
        replicas = list(zip(shared, self.variables))
        self.updated = [replicated(variable, variable in program.streams) for variable in updates]
        share_first_values(ranks, [each for each in self.variables if each.variable not in own])
        first = sum(self.replicas[:ranks.rank])
        indices = {context: i for i, context in enumerate(active_contexts())}
        with compiling(name, inputs, contexts), first_compiler(ranks):
            made = {}
            for i, context in enumerate(dict.fromkeys(contexts)):  # the host may be a place of every replica
                with memory_explained(i, context, 'copies of shared variables'):
                    local = {variable: r.on(context, indices.get(context, 0), first) for variable, r in replicas}
                    made[context] = graph.compile_for(context, inputs, outputs, updates, local, mode, name,
                                                      like=list(made.values()))
            self.compiled = [made[context] for context in contexts]
        self.takes = [function.mgpu_takes for function in self.compiled]
        self._positions = np.argsort(self.compiled[0].mgpu_order).tolist()

    def refresh(self, own: bool = False) -> None:
        """Bring the replicas up to date with the user's variables; `own` as for `Replicated.refresh`."""
        for i, context in enumerate(self.contexts):
            with memory_explained(i, context, 'copies of shared variables'):
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
        made = self.compiled[replica].unwatched_call(*arguments)
        results = [made[i] for i in self._positions]
        return results[:self.n_outputs], results[self.n_outputs:]


@contextlib.contextmanager
def profiled(profile):
    """A block in which functions are compiled to be profiled, if `profile` is true or the flag ``profile`` is."""
    with theano.configparser.change_flags(profile=theano.config.profile or bool(profile)):
        yield


def compiling(name, inputs, contexts):
    """A context manager that shows the progress of compiling a function for some contexts."""
    names = [variable.name for variable in inputs if variable.name]
    shown = 'a function' + ' of ' * bool(names) + ', '.join(names[:3]) + ', ...' * (len(names) > 3)
    return progress.compiling('compiling %s for %s' % (name or shown, ', '.join(each.name for each in contexts)))


def check_same_graph(ranks, inputs, outputs, shared, n_contexts):
    """Contexts of each rank; a RankError unless all ranks have the same graph."""
    if ranks.size == 1:
        return [n_contexts]
    found = ranks.handshake((BUILD,), [graph.checksum(inputs, outputs, shared), n_contexts])
    others = np.flatnonzero(found[:, 0] != found[0, 0])
    if len(others):
        raise RankError('the ranks have different models: what is computed on rank %s is not what rank 0 computes. Its '
                        'shared variables on %s: %s. Build the same model on every rank; if each rank holds its own '
                        'part of a data set, set mgpu.data=sharded (theano-mgpu launch --sharded)'
                        % (', '.join(map(str, others)), ranks.name(ranks.rank), graph.listing(shared)))
    return found[:, 1].tolist()


def share_first_values(ranks, variables):
    """Give variables that are new to the ranks the values that rank 0 has."""
    new = _new_on_a_rank(ranks, variables)
    if ranks.size > 1 and new:
        take_values_of_first(ranks, new)
    for variable in new:
        variable.shared, variable.touched = True, False


def _new_on_a_rank(ranks, variables):
    """Those that are new on any rank: each rank's garbage collector decides when an unused one is gone."""
    found = []
    for start in range(0, len(variables), 60):  # as many as an integer has bits
        some = variables[start:start + 60]
        masks = all_gather_int(ranks, sum((not variable.shared) << i for i, variable in enumerate(some)))
        found += [variable for i, variable in enumerate(some) if any(mask >> i & 1 for mask in masks)]
    return found


def choose_ranks(name):
    """The processes that a function runs over, for the name of an executor."""
    name = name or theano.config.mgpu.executor
    if mpi_environment.started_by_rank():
        return Alone()
    if name == 'mpi' or (name == 'auto' and mpi_environment.size() > 1):
        return mpi_communicator()
    return Alone()


def choose_executor(name, compiled, n_replicas):
    """An executor for compiled functions.

    Parameters
    ----------
    name : str or None
        ``'serial'`` or ``'threads'``; ``'auto'``, and ``'mpi'`` in each of its processes, takes threads where
        functions of two or more GPUs block inside, because ops of theirs fall to the host. None is the flag
        ``mgpu.executor``.
    compiled : list of theano.compile.function_module.Function
    n_replicas : int

    Returns
    -------
    Executor
    """
    name = name or theano.config.mgpu.executor
    if name in ('auto', 'mpi'):
        blocking = {f.mgpu_context for f in compiled if f.mgpu_context.kind == 'cuda' and _blocks(f)}
        name = 'threads' if len(blocking) > 1 else 'serial'
    return make_executor(name, n_replicas)


def _blocks(function):
    """Whether a function waits for its device before it returns: it reads from it on the way."""
    return any('HostFromGpu' in str(entry.op) for entry in audit(function))


def run_replicas(executor, tasks, contexts, shards=None):
    """Run tasks on contexts.

    Parameters
    ----------
    executor : Executor
    tasks : list of callable
    contexts : list of Context
        Of each task. Those of one context run one after the other.
    shards : list of Shard, optional
        What each task works on.

    Returns
    -------
    list

    Raises
    ------
    Exception
        The first one of a task, with a note of its replica, context and samples; a ReplicaError for that of a device.
    """
    groups = {}
    for i, context in enumerate(contexts):
        groups.setdefault(context, []).append(i)
    done = {context: [] for context in groups}  # results, so that the next one is that of the task that failed

    def run(context):
        for i in groups[context]:
            done[context].append(tasks[i]())
    error = None
    try:
        executor.run([functools.partial(run, context) for context in groups])
    except TaskError as failed:
        context = list(groups)[failed.index]
        index = groups[context][len(done[context])]
        shard = shards[index] if shards else None
        where = 'samples %d to %d' % (shard.span[0], shard.span[1] - 1) if shard else 'update'
        error = error_of(failed.__cause__, shard.replica if shard else index, context, where,
                         shard.span if shard else None, list(groups))
    if error is not None:
        try:
            raise error  # here, since a TaskError tells a user nothing
        finally:
            del error  # its traceback has this frame, which would keep it
    results = {i: result for context, indices in groups.items() for i, result in zip(indices, done[context])}
    return [results[i] for i in range(len(tasks))]
