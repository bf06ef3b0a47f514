"""The registry of contexts, which are Theano's names for devices."""
from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import Any, Iterator, List, Sequence

from ..compat import cuda_libraries
from ..errors import ContextError
from ..parsing import MOST_DEVICES
from ..utils import blas, mpi_environment, processor, rank_process
from ..utils.flag_text import flag, own_flag, source_of
from ..utils.tables import counted
from . import cards, discovery, leases, opening
from .context_map import Context, brief, default_map, describe, longer_map, parse_context_map
from .cuda_driver import load_driver

_active: List[Context] = []   # the contexts over which functions of this process run
_host: List[Context] = []     # the contexts of all processes of the job on this host
_cores: List[Context] = []    # contexts that stand for the cores of the CPU, where nothing is mapped
_all_are_mapped: List[bool] = []  # holds True if contexts of cores count as mapped
_opened_in: List[int] = []    # the number of the process that opened a GPU, if one is open
_before: List[Any] = []       # the contexts before each lease that is in force, on the host and of this process
_changing = threading.RLock()
FUNCTION, OPTION = 'call theano_mgpu.init(%r)', 'give --contexts %r'  # the ways in which callers map contexts
TOLD = 'MGPU_TOLD'  # the last note about cards that are left out, for the processes that this one starts
ON_CPU = Context('host', 'cpu', 'cpu')
TO_USE_GPUS = ('start processes with multiprocessing.set_start_method("spawn"), chains of PyMC3 with mp_ctx="spawn", '
               'or fork before the first function over contexts is made')


def flagged() -> str:
    """Return the context map of THEANO_FLAGS or .theanorc; the empty string where they have none."""
    return flag('contexts', '').strip()


def configured(n: int = 1) -> list[Context]:
    """Return the contexts of THEANO_FLAGS or .theanorc, else of this machine's devices but those that are left out.

    A note names these, see `cards.left_out`. Of them, the least bad ones are taken where there are not `n` others.
    """
    every = of_all_devices()
    if flagged() or every[0].kind != 'cuda':
        return every
    # All ranks on a host choose alike, though not at the same time.
    out = cards.left_out(tuple(context.device for context in every), for_good=mpi_environment.size() > 1)
    taken = list(out)[:max(0, n - len(every) + len(out))]
    _tell_once(cards.left_out_note(out, taken, describe(every)))
    return [context for context in every if context.device in taken or context.device not in out]


def of_all_devices() -> list[Context]:
    """Return the contexts of THEANO_FLAGS or .theanorc, else of all devices that `discovery.discover_best` finds.

    On a machine without a GPU there is a context for each core; for a process that a script has started, one.
    """
    if flagged():
        return parse_context_map(flagged())
    found = discovery.discover_best()
    return parse_context_map(default_map(found * _n_cores() if found == ['cpu'] else found))


def _tell_once(text):
    """Print a note, unless this process or the one that has started it has."""
    if text and os.environ.get(TOLD) != text:
        os.environ[TOLD] = text
        rank_process.note(text)


def _n_cores():
    """Return the number of cores on which the contexts of this host are, where nothing is mapped."""
    if leases.is_child():
        return 1
    n_ranks, own = mpi_environment.local_size() if mpi_environment.is_rank() else 1, processor.cores()
    if 'OMP_NUM_THREADS' not in os.environ:  # else it is the share of one rank, as `launch` sets it
        own = max(1, own // n_ranks)
    return own * n_ranks if mpi_environment.trains_together() else own


def are_cores(contexts: Sequence[Any]) -> bool:
    """Return whether contexts stand for cores of the CPU, which the user has not mapped."""
    return len(contexts) > 1 and not _all_are_mapped and all(context in _cores for context in contexts)


def take_cores_as_mapped(are_mapped: bool) -> None:
    """Have functions that are made from now on divide all batches over cores, as if the user had mapped them, or not.
    """
    _all_are_mapped[:] = [True] * are_mapped


def init(contexts: str | int | Sequence[str] | None = None) -> list[Context]:
    """Choose the contexts that functions run over, and open their devices.

    Parameters
    ----------
    contexts : str, int, list of str, or None
        A context map (``'dev0->cuda0;dev1->cuda1'``); how many of the contexts of THEANO_FLAGS,
        .theanorc or this machine's devices to take (a machine without a GPU has any number of ``cpu``
        contexts); their names or numbers; or None for all of them: without a GPU and a map, one for each core.

    Returns
    -------
    list of Context
        In a process that mpirun started, its share of them: see `share`. In a process that a script of
        ``theano-mgpu run`` has started, one of them: see `lease`; in one of PyMC3's chains, as many as each can have.
        Under ``theano-mgpu run`` the map of its option ``--contexts``, or the list of ``--gpus``, counts, whatever the
        script asks for; of others, with a number, the first ``--gpus`` ones.

    Raises
    ------
    ContextError
        If the map is malformed, there are fewer contexts than requested, a name is not mapped, or
        a device cannot be opened. The contexts then stay as they were.

    Examples
    --------
    >>> init('dev0->cpu')
    [Context(name='dev0', device='cpu', kind='cpu')]
    """
    named, given = leases.named(), contexts
    if given is None or isinstance(named, (str, list)):
        contexts = named
    if leases.is_child():
        return _use(*_own_of(contexts))
    way = FUNCTION if contexts is given else OPTION
    chosen = choose_contexts(contexts, way)[:named if isinstance(named, int) else None]
    _cores[:] = [context for context in chosen if context.kind == 'cpu' and contexts is None and not flagged()]
    if given not in (None, contexts, len(chosen)):
        rank_process.note('the script chose the contexts %s; "theano-mgpu run" replaces them with %s'
                          % (given, describe(chosen)))
    return _use(chosen, share(chosen, mpi_environment.local_rank(), mpi_environment.local_size())
                if mpi_environment.trains_together() else chosen)


def _use(chosen, own):
    for context in own:
        _open(context)
    _host[:], _active[:] = chosen, own
    leases.announce(leases.held(own))
    return list(own)


def _own_of(contexts, n=None, wait=False):
    """Return the contexts that a process may take, and those that it takes, see `leases.take`.

    A fork that cannot use GPUs computes on the CPU.
    """
    blas.share_cores()
    if is_fork():
        taken = leases.take([ON_CPU])
        if leases.is_first():
            rank_process.note('processes that are forked from process %d compute on the CPU, since it has used a GPU '
                              'before: %s' % (_opened_in[0], TO_USE_GPUS))
        return taken, taken
    from theano.gpuarray.type import list_contexts
    chosen = choose_contexts(contexts)
    if mpi_environment.started_by_rank():
        chosen = share(chosen, mpi_environment.local_rank(), mpi_environment.local_size())
    return chosen, leases.take(chosen, n, list_contexts(), wait)


@contextlib.contextmanager
def lease(wait: bool = False) -> Iterator[Context]:
    """Have this process compute on one device in the ``with`` block: the one that the fewest processes have.

    Processes of this user on this host count if they have opened the device by this package, and others if NVML tells
    of them. The kernel frees the device when the process ends, however it ends. A process that a script of
    ``theano-mgpu run`` has started has such a device in any case, until it ends. Threads that are in blocks at the same
    time share the device: the contexts are as before once the last one has left.

    Parameters
    ----------
    wait : bool
        Whether to wait until a device is free.

    Yields
    ------
    Context
        `contexts` is a list of it alone in the block.

    Raises
    ------
    ContextError
        As for `init`.

    Examples
    --------
    >>> with lease() as context:
    ...     contexts() == [context]
    True
    """
    if leases.is_child():
        yield contexts()[0]
        return
    taken = _own_of(None, 1, wait)
    with _changing:
        before = list(_host), list(_active)
        context, = _use(*taken)
        _before.append(before)
    try:
        yield context
    finally:
        with _changing:
            _use(*_before.pop())


def share(contexts: list[Context], rank: int, size: int) -> list[Context]:
    """Return the share of a host's contexts that a process takes, by its number on this host, and their number.

    It is an equal share, or as many as the flag ``mgpu.gpus_per_process`` says. Where there are fewer contexts than
    processes, several processes take the same one. Raise a ContextError if the flag is larger than the number of
    contexts.

    >>> four = parse_context_map('a->cuda0;b->cuda1;c->cuda2;d->cuda3')
    >>> describe(share(four, 1, 2)), describe(share(four, 5, 8))
    ('c->cuda2;d->cuda3', 'b->cuda1')
    """
    n, per_process = len(contexts), own_flag('mgpu.gpus_per_process')
    if per_process > n:
        raise ContextError('%d contexts for each process were asked for; this host has %d: %s. Lower '
                           'mgpu.gpus_per_process (launch --gpus-per-process), or map more'
                           % (per_process, n, describe(contexts)))
    if per_process or n < size:
        per_process = per_process or 1
        return [contexts[(rank * per_process + i) % n] for i in range(per_process)]
    return contexts[n * rank // size:n * (rank + 1) // size]


def choose_contexts(contexts: Any, way: str = FUNCTION) -> list[Context]:
    """Return the contexts of this host that the argument of `init`, or of a command, stands for; nothing is opened.

    An error says how to map more of them in the way of the caller.
    """
    if isinstance(contexts, str):
        return parse_context_map(contexts)
    if contexts is None:
        return configured()
    if isinstance(contexts, int) and not isinstance(contexts, bool):
        known = contexts <= MOST_DEVICES and _more_cpus(contexts, way) or configured(contexts)
        if not 1 <= contexts <= len(known):
            raise ContextError('%d contexts were asked for; there are %d: %s%s. Ask for 1%s, or map more: %s' % (
                contexts, len(known), brief(describe(known)), ', by ' + source_of('contexts') if flagged() else '',
                ' to %d' % len(known) if len(known) > 1 else '',
                way % brief(longer_map(known, contexts if len(known) < contexts <= MOST_DEVICES else len(known) + 1))))
        return known[:contexts]
    known = of_all_devices()
    by_number = dict(enumerate(context.name for context in known))
    names = [by_number.get(each, each) for each in contexts]
    if not names:
        raise ContextError('an empty list of contexts was given; name at least one of: %s' % describe(known))
    if len(set(names)) < len(names):
        raise ContextError('a context is named twice in %r; name each one once' % (names,))
    if way == OPTION and not set(names) <= set(by_number.values()):
        raise ContextError('--gpus %s: give a number, or names of %s' % (','.join(map(str, contexts)),
                                                                         ', '.join(by_number.values())))
    return [_lookup(name, known) for name in names]


def _more_cpus(n, way):
    """Return `n` contexts on the CPU, with a note, where no GPU is there, and none or one is mapped.

    Raise a ContextError for an option that asks for more contexts than cores.
    """
    mapped = configured() if flagged() else []
    if n < 2 or [context.kind for context in mapped] != ['cpu'] * bool(mapped) or \
            not mapped and discovery.discover_best() != ['cpu']:
        return []
    text = longer_map(mapped, n) if mapped else default_map(['cpu'] * n)
    cores = max(_n_cores(), len(processor.usable()))
    why = source_of('contexts') + ' maps the CPU alone' if mapped else 'no usable GPU here'
    if way == OPTION and n > cores:
        raise ContextError('--gpus %d: %s, and %s. Ask for at most %d, or map more: %s' % (
            n, why, counted(cores, 'core'), cores, way % brief(text)))
    if not leases.is_child():  # which takes one of them, as its parent has said
        rank_process.note('%s: the %d contexts are on the CPU, and share its cores: %s. "theano-mgpu devices" lists '
                          'what there is' % (why, n, brief(text)))
    return parse_context_map(text)


def known_as_cpu() -> bool:
    """Return whether functions are known to run on contexts of the CPU alone; nothing is looked for, or opened."""
    return bool(_active) and all(context.kind == 'cpu' for context in _active)


def contexts() -> list[Context]:
    """Return the contexts over which functions run; open the configured ones at the first call.

    Returns
    -------
    list of Context

    Raises
    ------
    ContextError
        As for `init`, if the configured contexts cannot be opened.
    """
    return list(_active) if _active else init()


def chosen() -> list[Context]:
    """Return the contexts that `init` has opened; open none, so that the list may be empty."""
    return list(_active)


def host_contexts() -> list[Context]:
    """Return the contexts of all processes of this job on this host; `contexts` has the share of this process."""
    contexts()
    return list(_host)


def get(name: str) -> Context:
    """Return the context of the host with this name; raise a ContextError with the known ones if there is none.

    In a process that takes one device, it is the context of that one, whatever the name. The context of a card that was
    left out is taken.
    """
    host_contexts()
    _take_left_out(name)
    context = _lookup(name, _host)
    return _active[0] if leases.is_child() and context not in _active else context


def _take_left_out(name):
    """Take the context of a card that was left out, now that the script names it."""
    if all(context.name != name for context in _host) and not (leases.is_child() or mpi_environment.size() > 1):
        every, usual = of_all_devices(), configured()
        named = [context for context in every if context.name == name and context not in usual]
        if named and set(_host) <= set(every):
            _use(_host + named, _active + named)


def open_named(name: str) -> bool:
    """Open the device of a context that Theano asks for by its name; return whether it has arrays of a GPU.

    Raise Theano's ContextNotDefined if neither `init`, nor THEANO_FLAGS or .theanorc, maps the name, and a ContextError
    if the device cannot be opened.
    """
    from theano.gpuarray.type import ContextNotDefined
    if _host:
        _take_left_out(name)
    known = _host or (configured() if flagged() else [])
    context = next((each for each in known if each.name == name), None)
    if context is None:
        raise ContextNotDefined('context name %s not defined; %s. Map it in THEANO_FLAGS, e.g. contexts=%s->cuda0'
                                % (name, 'known contexts: %s' % describe(known) if known else 'no contexts are mapped',
                                   name))
    _open(context)
    return context.kind != 'cpu'


def _lookup(name, known):
    for context in known:
        if context.name == name:
            return context
    raise ContextError('context %r is not mapped; known contexts: %s. Add it to THEANO_FLAGS, e.g. contexts=%s'
                       % (name, ', '.join(c.name for c in known), brief(longer_map(known, len(known) + 1))))


def _open(context):
    """Open the device of a context, see `opening.open_device`; not in a fork."""
    if context.kind != 'cpu':
        check_process()
    if opening.open_device(context):
        _opened_in[:] = [os.getpid()]
        opening.enable_gpuarray()


@functools.lru_cache(maxsize=None)
def primary_context(context: Context) -> int:
    """Return the address of the driver's context of a CUDA device, which is kept until the process ends."""
    return load_driver().primary_context(card_of(context))


def gpu_context(context: Context) -> Any:
    """Return the open pygpu context of a Context; None for ``cpu``."""
    if context.kind == 'cpu':
        return None
    from theano.gpuarray.type import get_context
    return get_context(context.name)


def card_of(context: Context) -> str:
    """Return the PCI bus id of the card of an open CUDA context; for another context its device."""
    return discovery.decoded(gpu_context(context).unique_id) if context.kind == 'cuda' else context.device


def has_opened_gpu() -> bool:
    """Return whether this process, or the one that it was forked from, has opened a GPU."""
    from theano.gpuarray.type import list_contexts  # Theano opens the device of its own flag
    return bool(_opened_in or list_contexts())


def is_fork() -> bool:
    """Return whether this process was forked after a GPU was opened, which neither CUDA nor OpenCL survives."""
    return bool(_opened_in) and _opened_in[0] != os.getpid()


def _begin_fork():
    """Have a fork choose its own device, if it takes one, and know whether its parent has used CUDA."""
    if leases.is_child():
        _active.clear()
    if not _opened_in and cuda_libraries.survey.cache_info().currsize and cuda_libraries.survey().capabilities:
        _opened_in[:] = [os.getppid()]


os.register_at_fork(after_in_child=_begin_fork)


def check_process() -> None:
    """Raise a ContextError where `is_fork` holds: the driver would fail, or hang."""
    if is_fork():
        raise ContextError('process %d was forked from process %d, which had opened %s: neither CUDA nor OpenCL can be '
                           'used in the fork: %s'
                           % (os.getpid(), _opened_in[0], describe(_host) or 'a GPU', TO_USE_GPUS))


def is_lost(context: Context) -> bool:
    """Return whether a GPU has failed for good: every further call of this process on it is an error."""
    if context.kind == 'cpu':
        return False
    try:
        return gpu_context(context).free_gmem < 0
    except Exception:  # pygpu's GpuArrayException, with the driver's reason, as for any call
        return True


def type_name(context: Context) -> str:
    """Return the name of the type of a context's device; a graph that is optimised for one suits another of this type.
    """
    return context.kind if context.kind == 'cpu' else '%s %s' % (context.kind, gpu_context(context).devname)
