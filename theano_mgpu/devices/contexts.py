"""Contexts: Theano's names for devices. Choose them, open their devices, look names up.

Also here: the mends of Theano's own context handling, since they need what this module knows.
"""
import contextlib
import copy
import ctypes
import functools
import io
import itertools
import os
import sys

from .. import config
from ..errors import ContextError
from ..jobs import mpi_environment, rank_process
from ..patches import compat, cuda_contexts, opencl_programs
from . import cuda_libraries, discovery, host_memory
from .context_map import EXAMPLE, default_map, describe, parse_context_map

_active = []          # the contexts that functions of this process run over
_host = []            # those of all processes of its job on this host
_borrowed = set()     # names of further contexts that are in use
_opened_in = []       # the process that opened a GPU, if one is open
_pinned = [None]      # the context that a graph is being compiled for, innermost last


def flagged():
    """The context map of THEANO_FLAGS or .theanorc; the empty string where they have none."""
    return config.flag('contexts', '').strip()


def configured():
    """Contexts of THEANO_FLAGS or .theanorc, else of this machine's devices: see `devices.discover_best`."""
    return parse_context_map(flagged() or default_map(discovery.discover_best()))


def init(contexts=None):
    """Choose the contexts that functions run over, and open their devices.

    Parameters
    ----------
    contexts : str, int, list of str, or None
        A context map (``'dev0->cuda0;dev1->cuda1'``); the number of contexts to take from those of
        THEANO_FLAGS, .theanorc or this machine's devices, where a machine without a GPU has as many
        ``cpu`` contexts as asked for; their names; or None for all of them.

    Returns
    -------
    list of Context
        In a process that mpirun started: its share of them, see `share`.

    Raises
    ------
    ContextError
        If the map is malformed, there are fewer contexts than asked for, a name is not mapped, or
        a device cannot be opened; the contexts then stay as they were.

    Examples
    --------
    >>> init('dev0->cpu')
    [Context(name='dev0', device='cpu', kind='cpu')]
    """
    chosen = _choose(contexts)
    own = chosen
    if mpi_environment.trains_together():
        own = share(chosen, mpi_environment.local_rank(), mpi_environment.local_size())
    for context in own:
        _open(context)
    _host[:], _active[:] = chosen, own
    return list(own)


def share(contexts, rank, size):
    """The contexts that one of several processes on a host takes.

    Parameters
    ----------
    contexts : list of Context
        The host's.
    rank, size : int
        Number of the process, and of all, on this host.

    Returns
    -------
    list of Context
        An equal share, of the size in the flag ``mgpu.gpus_per_process`` if that is set. Where there are fewer
        contexts than processes, several take the same one.

    Raises
    ------
    ContextError
        If the flag asks for more contexts than there are.

    Examples
    --------
    >>> four = parse_context_map('a->cuda0;b->cuda1;c->cuda2;d->cuda3')
    >>> describe(share(four, 1, 2))
    'c->cuda2;d->cuda3'
    >>> describe(share(four, 5, 8))
    'b->cuda1'
    """
    n, per_process = len(contexts), config.own_flag('mgpu.gpus_per_process')
    if per_process > n:
        raise ContextError('%d contexts for each process were asked for; this host has %d: %s. Lower '
                           'mgpu.gpus_per_process (launch --gpus-per-process), or map more'
                           % (per_process, n, describe(contexts)))
    if per_process or n < size:
        per_process = per_process or 1
        return [contexts[(rank * per_process + i) % n] for i in range(per_process)]
    return contexts[n * rank // size:n * (rank + 1) // size]


def _choose(contexts):
    if isinstance(contexts, str):
        return parse_context_map(contexts)
    if contexts is None:
        return configured()
    if isinstance(contexts, int) and not isinstance(contexts, bool):
        known = _default_cpus(contexts) or configured()
        if not 1 <= contexts <= len(known):
            raise ContextError('%d contexts were asked for; there are %d: %s. Ask for 1 to %d, or map '
                               'more, e.g. %s' % (contexts, len(known), describe(known), len(known), EXAMPLE))
        return known[:contexts]
    names = list(contexts)
    if not names:
        raise ContextError('an empty list of contexts was given; name at least one of: %s'
                           % describe(configured()))
    if len(set(names)) < len(names):
        raise ContextError('a context is named twice in %r; name each one once' % (names,))
    return [_lookup(name, configured()) for name in names]


def _default_cpus(n):
    """`n` contexts on the CPU where none are mapped and there is no GPU to take, else none; a note says so."""
    if n < 2 or flagged() or discovery.discover_best() != ['cpu']:
        return []
    chosen = parse_context_map(default_map(['cpu'] * n))
    rank_process.note('no usable GPU here: the %d contexts are on the CPU, and share its cores: %s. "theano-mgpu '
                      'devices" lists what there is' % (n, describe(chosen)))
    return chosen


def contexts():
    """The contexts that functions run over; opens the configured ones at the first call.

    Returns
    -------
    list of Context
    """
    return list(_active) if _active else init()


def chosen():
    """The contexts that `init` has opened; unlike `contexts` it opens none, and may return an empty list."""
    return list(_active)


def host_contexts():
    """The contexts of all processes of this job on this host; `contexts` has those of this one."""
    contexts()
    return list(_host)


def get(name):
    """The host's context of a name; a ContextError that lists the known ones if there is none."""
    return _lookup(name, host_contexts())


def _lookup(name, known):
    for context in known:
        if context.name == name:
            return context
    mapped = describe(known)
    raise ContextError('context %r is not mapped; known contexts: %s. Add it to THEANO_FLAGS, e.g. '
                       'contexts=%s;%s->cuda%d' % (name, ', '.join(c.name for c in known),
                                                   mapped, name, len(known)))


def borrow(context):
    """A further context of the same device, for a thread of its own: Theano and pygpu use one from one thread only.

    Parameters
    ----------
    context : Context

    Returns
    -------
    Context
        Named like the first one: ``dev0.1``. `give_back` lets the next one have it.
    """
    taken = _borrowed | {known.name for known in host_contexts()}
    names = ('%s.%d' % (context.name, number) for number in itertools.count(1))
    own = context._replace(name=next(name for name in names if name not in taken))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        # Theano would announce it as if the user had mapped it, and reserve its memory as for that one.
        _open(own, preallocated=False)
    _borrowed.add(own.name)
    return own


def give_back(context):
    """What `borrow` gave is free again; its device stays open."""
    _borrowed.discard(context.name)


def gpu_context(context):
    """The open pygpu context of a Context; None for ``cpu``."""
    if context.kind == 'cpu':
        return None
    from theano.gpuarray.type import get_context
    return get_context(context.name)


def is_fork():
    """Whether this process was forked after a GPU was opened, which neither CUDA nor OpenCL survives."""
    return bool(_opened_in) and _opened_in[0] != os.getpid()


def check_process():
    """Raise a ContextError where `is_fork` holds: the driver would fail, or hang."""
    if is_fork():
        raise ContextError('process %d was forked from process %d, which had opened %s: neither CUDA nor OpenCL can be '
                           'used in the fork. Start processes with multiprocessing.get_context("spawn"), or fork '
                           'before the first function over contexts is made'
                           % (os.getpid(), _opened_in[0], describe(_host) or 'a GPU'))


def is_lost(context):
    """Whether a GPU has failed for good: whatever this process asks of it from then on is an error."""
    if context.kind == 'cpu':
        return False
    try:
        return gpu_context(context).free_gmem < 0
    except Exception:  # pygpu's GpuArrayException, with the driver's reason, as for any call
        return True


def alike(one, other):
    """Whether two contexts have devices of one model, so that what is optimised for one is right for the other."""
    if one.kind != other.kind or one.kind == 'cpu':
        return one.kind == other.kind
    return gpu_context(one).devname == gpu_context(other).devname


def _open(context, preallocated=True):
    """Open the device of a context and register its name with Theano; does nothing the second time.

    Memory is reserved on it as the flag ``gpuarray.preallocate`` says, unless `preallocated` is False.
    """
    if context.kind == 'cpu':
        host_memory.keep_freed_memory()
        return
    import theano.gpuarray
    from theano.gpuarray.type import list_contexts
    check_process()
    if context.name in list_contexts():
        opened = _opened_device(context.name)
        if opened != context.device:
            raise ContextError('context %r is open on %s already and cannot be mapped to %s in the same '
                               'process; use another name' % (context.name, opened, context.device))
        cuda_contexts.protect(gpu_context(context))  # Theano may have opened it, before theano_mgpu was imported
        return
    if theano.gpuarray.pygpu is None:
        raise ContextError('context %s: pygpu, which opens GPUs for Theano, cannot be imported. Install '
                           "it (Debian: apt-get install python3-pygpu; a virtual environment sees it if "
                           "made with --system-site-packages), or map to cpu, e.g. contexts=%s->cpu"
                           % (describe([context]), context.name))
    if context.kind == 'opencl':
        _build_opencl_programs_once()
    if context.kind == 'cuda':
        cuda_libraries.require(context.device)
    # Theano registers a name only for a device string that it has not seen: without this pop, the
    # second name of one device prints "Mapped name dev1 ..." and is then unknown (Theano 1.0.5).
    seen = theano.gpuarray.init_dev.devmap
    first = seen.pop(context.device, None)
    _forget_active_gpu()
    try:
        flagged = theano.config.gpuarray.preallocate
        theano.gpuarray.init_dev(context.device, context.name, flagged if preallocated else min(flagged, 0))
    # pygpu raises ValueError, GpuArrayException, RuntimeError ...: all mean "not opened".
    except Exception as error:
        why = discovery.reason(error).rstrip('.')
        raise ContextError('context %s could not be opened: %s. %s'
                           % (describe([context]), why, _remedy(context, why))) from error
    finally:
        _forget_active_gpu()
        if first is not None:
            seen[context.device] = first
    gpu_context(context).dev = context.device
    cuda_contexts.protect(gpu_context(context))
    _opened_in[:] = [os.getpid()]
    _enable_gpuarray()


@functools.lru_cache(maxsize=None)
def _build_opencl_programs_once():
    """Have OpenCL drivers build each program once, see `opencl_programs`.

    Theano 1.0.5 and libgpuarray 0.7.6 build the kernels of each op of each function anew: a VGG-16 takes a minute.

    Returns
    -------
    list of ProgramCache
    """
    import theano
    caches = []
    for table in opencl_programs.driver_tables():
        cache = opencl_programs.ProgramCache(table, os.path.join(theano.config.base_compiledir, 'opencl_programs'))
        for place, function in cache.functions.items():
            table[place] = ctypes.cast(function, ctypes.c_void_p).value
        caches.append(cache)
    return caches


def _pocl_note():
    if 'POCL_DEVICES' not in os.environ:
        return ''
    note = ('; PoCL shows what POCL_DEVICES said at the first OpenCL call of the process (now: %r)'
            % os.environ['POCL_DEVICES'])
    if compat.theano_was_first:
        note += '. Theano was imported before theano_mgpu and made that call: import theano_mgpu first'
    return note


def _forget_active_gpu():
    """Theano 1.0.5 marks the environment of a process that opened a GPU, and children inherit the mark.

    Without this, every child process, also one started afresh, refuses a GPU: "You can't initialize
    the GPU in a subprocess if the parent process already did it".
    """
    os.environ.pop('THEANO_GPU_IS_ALREADY_ACTIVE', None)


def _opened_device(name):
    """Device of a context that is registered with Theano; init_dev leaves it on the pygpu context."""
    from theano.gpuarray.type import get_context
    return getattr(get_context(name), 'dev', 'an unknown device')


def _remedy(context, why):
    found, why_none = discovery.discover(context.kind)
    if not found:
        more = '' if why_none.rstrip('.') == why else ' (%s)' % why_none
        return 'There is no %s device%s; run "theano-mgpu doctor"' % (context.kind, more)
    if context.device not in found:
        return 'There is: %s%s' % (', '.join(found), _pocl_note() if context.kind == 'opencl' else '')
    return 'The device exists; run "theano-mgpu doctor" to see what is wrong with it'


def _enable_gpuarray():
    """As Theano does for its ``contexts`` flag: ``shared(target=)`` works, graphs move to the GPU."""
    import theano.compile.sharedvalue
    import theano.gpuarray
    if theano.gpuarray.gpuarray_shared_constructor not in theano.compile.sharedvalue.shared.constructors:
        theano.gpuarray.use('')


@contextlib.contextmanager
def compiling_for(context):
    """While a graph is built and compiled: where nothing else says so, its context is this one."""
    _pinned.append(context)
    try:
        yield
    finally:
        _pinned.pop()


def install():
    """Mend how Theano 1.0.5 infers contexts; once, after Theano was imported.

    ``infer_context_name`` walks up through nodes of one input only. Without the mend, every conv2d
    with ``filter_flip=True`` fails on a named context: "Could not infer context from inputs".
    """
    from theano.compile.builders import OpFromGraph
    from theano.gpuarray import basic_ops, dnn, opt, rng_mrg
    from theano.scan_module.scan_op import Scan
    original = basic_ops.infer_context_name
    if original is infer_context_name:
        return
    infer_context_name.original = original
    for name, module in list(sys.modules.items()):
        if name.startswith('theano.gpuarray') and getattr(module, 'infer_context_name', None) is original:
            module.infer_context_name = infer_context_name
    _mend_graph_to_gpu(opt.GraphToGPU)
    for optimizer in (rng_mrg.local_gpua_mrg, dnn.local_abstractconv_cudnn, dnn.local_abstractconv_gw_cudnn,
                      dnn.local_abstractconv_gi_cudnn):
        _mend_local_optimizer(optimizer)
    for op_class in (Scan, OpFromGraph):
        _give_each_thunk_its_inner_function(op_class)


def infer_context_name(*variables):
    """Context of an op from its inputs: the nearest GPU ancestor's, else the one compiled for.

    Replaces ``theano.gpuarray.basic_ops.infer_context_name``; breadth first over all ancestors.
    """
    from theano.gpuarray.basic_ops import HostFromGpu
    from theano.gpuarray.type import GpuArrayType
    seen, level = set(), list(variables)
    while level:
        for variable in level:
            if isinstance(variable.type, GpuArrayType):
                return variable.type.context_name
            if getattr(variable.tag, 'context_name', None) is not None:
                return variable.tag.context_name
            if variable.owner and isinstance(variable.owner.op, HostFromGpu):
                return variable.owner.inputs[0].type.context_name
        seen.update(level)
        level = [parent for variable in level if variable.owner for parent in variable.owner.inputs
                 if parent not in seen]
    if _pinned[-1] is not None and _pinned[-1].kind != 'cpu':
        return _pinned[-1].name
    return infer_context_name.original(*variables)


def _mend_local_optimizer(optimizer):
    """Keep one of Theano 1.0.5's optimisers from nodes that are not on a GPU.

    It asks for the node's context first, and then does nothing unless the first input lies on a GPU. Without
    this, where there is no default context, each function with a random draw logs "Could not infer context
    from inputs" and a traceback: every Keras layer that initialises a weight does.
    """
    original = optimizer.transform

    @functools.wraps(original)
    def transform(node):
        from theano.gpuarray.type import GpuArrayType
        return original(node) if isinstance(node.inputs[0].type, GpuArrayType) else None

    optimizer.transform = transform


def _give_each_thunk_its_inner_function(op_class):
    """Keep two functions from running one inner function at a time.

    Theano 1.0.5 keeps the compiled inner graph of scan and of OpFromGraph on the op, and functions compiled from
    one graph share the op. Without this, replicas in threads write into each other's inner storage: wrong results,
    "Sequence is shorter then the required number of steps", a segmentation fault.
    """
    original = op_class.make_thunk

    @functools.wraps(original)
    def make_thunk(self, node, *args, **kwargs):
        if _pinned[-1] is None:
            return original(self, node, *args, **kwargs)
        node.op = copy.copy(self)  # each compiled function has nodes of its own
        node.op.__dict__.pop('fn', None)
        return original(node.op, node, *args, **kwargs)

    op_class.make_thunk = make_thunk


def _mend_graph_to_gpu(graph_to_gpu):
    """Keep Theano 1.0.5's ``GraphToGPU`` from failing, and logging it, where there is no default context.

    It asks for the context of a graph's inputs even if nothing of the graph lies on a GPU, and
    lifts an Alloc before it has seen a GPU variable to context ``None``: "context name None not
    defined". A graph without a GPU variable stays on the host; in any other, None means its context.
    """
    original = graph_to_gpu.apply

    @functools.wraps(original)
    def apply(self, fgraph):
        from theano.gpuarray.type import GpuArrayType, list_contexts
        if _pinned[-1] is not None and _pinned[-1].kind == 'cpu':
            return None
        if None in list_contexts():
            return original(self, fgraph)
        placed = [v.type.context_name for v in fgraph.variables if isinstance(v.type, GpuArrayType)]
        if not placed:
            return None
        lifters = self.local_optimizers_map
        self.local_optimizers_map = {key: [_LifterTo(placed[0], lifter) for lifter in found]
                                     for key, found in lifters.items()}
        try:
            return original(self, fgraph)
        finally:
            self.local_optimizers_map = lifters

    graph_to_gpu.apply = apply


class _LifterTo:
    """A local optimiser of GraphToGPU that lifts to a named context instead of to None."""

    def __init__(self, context_name, lifter):
        self.context_name = context_name
        self.lifter = lifter

    def transform(self, op, context_name, inputs, outputs):
        return self.lifter.transform(op, context_name or self.context_name, inputs, outputs)
