"""Opening of devices; an error says why a device cannot be opened, and what to do."""
from __future__ import annotations

from ..compat import cuda_libraries, patch
from ..errors import ContextError
from . import discovery, host_memory
from .context_map import Context, describe
from .cuda_driver import load_driver
from .patches import EACH_GPU, PATCHES
from .theano_contexts import let_children_open_gpus


def open_device(context: Context) -> bool:
    """Open the device of a context and register its name with Theano; do nothing the second time.

    Memory is reserved as the flag ``gpuarray.preallocate`` says. Return whether a GPU was opened by this call. Raise a
    ContextError if the device cannot be opened, or the context is open on another one.
    """
    if context.kind == 'cpu':
        host_memory.keep_freed_memory()
        return False
    import theano.gpuarray
    from theano.gpuarray.type import get_context, list_contexts, reg_context
    if context.name in list_contexts():
        opened = getattr(get_context(context.name), 'dev', 'an unknown device')  # init_dev sets `dev`
        if opened != context.device:
            raise ContextError('context %r is open on %s already and cannot be mapped to %s in the same '
                               'process; use another name' % (context.name, opened, context.device))
        # Theano may have opened it, before theano_mgpu was imported.
        patch.apply(PATCHES, EACH_GPU, get_context(context.name), again=True)
        return False
    if theano.gpuarray.pygpu is None:
        raise ContextError('context %s: pygpu, which opens GPUs for Theano, cannot be imported. Map to cpu, e.g. '
                           'contexts=%s->cpu, or install pygpu: %s'
                           % (describe([context]), context.name, discovery.INSTALL_PYGPU))
    if context.kind == 'cuda':
        cuda_libraries.require(context.device)
    if not _is_default(context):
        _initialise(context)
    else:  # two contexts of one device would each reserve memory, as gpuarray.preallocate says
        reg_context(context.name, get_context(None))
    get_context(context.name).dev = context.device
    patch.apply(PATCHES, EACH_GPU, get_context(context.name), again=True)
    return True


def _is_default(context):
    """Return whether a context is the first one on the device that Theano has opened by the flag ``device``."""
    from theano.gpuarray.type import get_context, list_contexts
    names = list_contexts()
    default = get_context(None) if None in names else None
    if default is None or sum(get_context(name) is default for name in names) > 1:  # each thread needs its own
        return False
    if context.kind != 'cuda' or default.kind != b'cuda':
        return default.dev == context.device
    return load_driver().device_at(discovery.decoded(default.unique_id)) == int(context.device[len('cuda'):] or 0)


def _initialise(context):
    import theano.gpuarray
    # Theano registers a name only for a device string that it has not seen: without this pop, the
    # second name of one device prints "Mapped name dev1 ..." and is then unknown (Theano 1.0.5).
    seen = theano.gpuarray.init_dev.devmap
    first = seen.pop(context.device, None)
    let_children_open_gpus()
    try:
        theano.gpuarray.init_dev(context.device, context.name, theano.config.gpuarray.preallocate)
    # pygpu raises ValueError, GpuArrayException, RuntimeError ...: all mean "not opened".
    except Exception as error:
        why = discovery.reason(error).rstrip('.')
        raise ContextError('context %s could not be opened: %s. %s'
                           % (describe([context]), why, _remedy(context, why))) from error
    finally:
        let_children_open_gpus()
        if first is not None:
            seen[context.device] = first


def _remedy(context, why):
    devices, why_none = discovery.discover(context.kind)
    if not devices:
        more = '' if why_none.rstrip('.') == why else ' (%s)' % why_none
        return 'There is no %s device%s; run "theano-mgpu doctor"' % (context.kind, more)
    if context.device not in devices:
        return 'There is: %s' % ', '.join(devices)
    return 'The device exists; run "theano-mgpu doctor" to see what is wrong with it'


def enable_gpuarray() -> None:
    """Make ``shared(target=)`` work, and graphs move to the GPU, as Theano does for its ``contexts`` flag."""
    import theano.compile.sharedvalue
    import theano.gpuarray
    if theano.gpuarray.gpuarray_shared_constructor not in theano.compile.sharedvalue.shared.constructors:
        theano.gpuarray.use('')
