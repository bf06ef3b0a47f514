"""Agreement of the ranks before they compile, on their devices and flags, their graph, and first values."""
from __future__ import annotations

from typing import Sequence

import numpy as np
import theano
import threadpoolctl
from theano.compile.sharedvalue import SharedVariable
from theano.gof.cmodule import GCC_compiler

from ..checks.ranks import take_values_of_first
from ..comm import tree_products
from ..comm.activities import BUILD
from ..comm.collectives import all_gather_object
from ..comm.communicator import Communicator
from ..devices import nccl
from ..devices.contexts import type_name
from ..devices.mesh import CPU, Mesh
from ..errors import ContextError, RankError, warn
from ..graph import graph
from ..options import Options
from ..plan import Machine
from ..utils import blas
from ..utils.values import checksum
from .replicas.replicated import Replicated


def gather_machine(ranks: Communicator, mesh: Mesh, options: Options) -> Machine:
    """Return the Machine of a function over some contexts of this process; all ranks have to make the call."""
    flags = options.flags
    columns = [mesh.column(place) for place in mesh.places if place != CPU]
    reasons = [nccl.reason_against(column, flags.collectives) for column in columns] or [nccl.NOT_CUDA]
    when = flags.overlap is True or options.strategy.exchange > 0 or (ranks.takes_threads and flags.overlap)
    own = (len(mesh.replicas), options.updates_on(mesh.contexts)[0], when, next(filter(None, reasons), ''),
           flags.collectives == 'nccl', flags.shares, flags.logical_shards)
    replicas, update_on, overlap, against, must, shares, logical = zip(*all_gather_object(ranks, own))
    if len(set(shares)) > 1:
        raise ContextError('the ranks have different flags mgpu.shares, or deterministic: rank %d has mgpu.shares=%s. '
                           'Give every rank the same flags' % (ranks.rank, flags.shares))
    if len(set(logical)) > 1:
        raise ContextError('the ranks have different numbers of logical shards: mgpu.logical_shards is %s on the ranks '
                           '0 to %d. Give every rank the same one'
                           % (', '.join(map(str, logical)), ranks.size - 1))
    reason = next((each + ' (rank %d)' % rank * (ranks.size > 1) for rank, each in enumerate(against) if each), '')
    if sum(replicas) > 1 and not reason:
        reason = next(filter(None, [nccl.connect(column, ranks) for column in columns]), '')
    if sum(replicas) > 1 and reason and any(must):
        raise ContextError('mgpu.collectives=nccl, but %s. Set it to auto or host' % reason)
    rate = 0 if reason or sum(replicas) == 1 else min(nccl.rate_of(column, ranks.size) for column in columns)
    return Machine(ranks.rank, replicas, update_on, overlap, reason, rate)


def check_same_rounding(ranks: Communicator, mesh: Mesh) -> None:
    """Check that all devices of all ranks round alike, for the same bits on any number of them; note it if not.

    The BLAS of the host gets one thread: with several, bits depend on their number, which differs from job to job.
    Raise a ContextError if contexts are on the processors of hosts that round otherwise.
    """
    if theano.config.cxx:
        tree_products.compiled(theano.config.cxx)  # before the next line, since it loads Theano's BLAS
        threadpoolctl.threadpool_limits(1, user_api='blas')
    kinds = {context.kind for context in mesh.contexts}
    if 'cuda' in kinds:
        check_algorithms()
    if 'cpu' in kinds and theano.config.openmp:
        raise ContextError('openmp=True divides convolutions among threads, so that their bits depend on the number of '
                           'cores, and mgpu.logical_shards gives the same bits everywhere. Leave out openmp=True')
    own = type_name(mesh.contexts[0]), _rounding_of_host() if 'cpu' in kinds else ''
    devices, hosts = zip(*all_gather_object(ranks, own))
    if len(set(hosts)) > 1:
        raise ContextError('mgpu.logical_shards gives the same bits only where all processors round alike, and those '
                           'of the ranks do not: %s. Set OPENBLAS_CORETYPE=Haswell and gcc.cxxflags=-march=haswell on '
                           'every rank' % '; '.join('%s: %s' % (ranks.name(i), text) for i, text in enumerate(hosts)))
    if len({*devices, *map(type_name, mesh.contexts)}) > 1:
        warn('the devices are of several types: the bits of results depend on the samples that each one computes, in '
             'spite of mgpu.logical_shards')


def _rounding_of_host():
    """Return a text that is the same on hosts whose compiled code and BLAS round alike."""
    by_blas = tree_products.compiled(theano.config.cxx) is not None
    return ' '.join(['products by %s' % ('BLAS' if by_blas else 'NumPy'), *blas.loaded().values(),
                     theano.config.blas.ldflags, theano.config.gcc.cxxflags, *(GCC_compiler.march_flags or [])])


def check_algorithms():
    """Raise a ContextError if cuDNN would choose algorithms by their time, or add in any order."""
    flags = theano.config.dnn.conv
    for name in ('algo_fwd', 'algo_bwd_data', 'algo_bwd_filter'):
        value = getattr(flags, name)
        if value.startswith(('time', 'guess')) or name != 'algo_fwd' and value == 'none':
            raise ContextError('dnn.conv.%s=%s, but with mgpu.logical_shards bits must not depend on times, or on the '
                               'order in which threads add. Set it to deterministic, or leave it out'
                               % (name, value))


def check_same_graph(ranks: Communicator, inputs: Sequence[theano.Variable], outputs: Sequence[theano.Variable],
                     shared: Sequence[SharedVariable]) -> None:
    """Raise a RankError unless all ranks have the same graph over variables of the same shapes."""
    if ranks.size == 1:
        return
    numbers = ranks.handshake((BUILD,), [graph.checksum(inputs, outputs, shared)])[:, 0]
    others = np.flatnonzero(numbers != numbers[0])
    if len(others):
        raise RankError('the ranks have different models: what is computed on rank %s is not what rank 0 computes. Its '
                        'shared variables on %s: %s. Build the same model on every rank; if each rank holds its own '
                        'part of a data set, set mgpu.data=sharded (theano-mgpu launch --sharded)'
                        % (', '.join(map(str, others)), ranks.name(ranks.rank), graph.listing(shared)))


def share_first_values(ranks: Communicator, variables: Sequence[Replicated]) -> None:
    """Give variables that are new to the ranks the values that rank 0 has."""
    # New on any rank: each one's garbage collector decides when an unused variable is gone.
    shared = zip(*all_gather_object(ranks, [variable.shared for variable in variables]))
    new = [variable for variable, of_ranks in zip(variables, shared) if not all(of_ranks)]
    if ranks.size > 1 and new:  # a data set is the same on each rank, as a rule
        checksums = all_gather_object(ranks, [checksum(each.peek()) for each in new])
        take_values_of_first(ranks, [each for each, *alike in zip(new, *checksums) if len(set(alike)) > 1])
    for variable in new:
        variable.shared, variable.touched = True, False
