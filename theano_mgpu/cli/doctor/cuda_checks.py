"""A check of `theano-mgpu doctor`: how libgpuarray uses CUDA contexts."""
from ...devices import discovery
from ...patches import cuda_contexts
from ..output import quietly
from .host_checks import FAIL, OK, SKIP, Finding


def check_libgpuarray(setup):
    """Whether libgpuarray leaves CUDA contexts current, and whether the patch prevents it on two of them."""
    import pygpu
    found = discovery.discover('cuda')[0]
    if not found:
        return Finding(SKIP, 'no CUDA device here')
    used = (found * 2)[:2]
    with quietly():
        contexts = [pygpu.init(device) for device in used]
        leaked = cuda_contexts.entries_left(contexts[0])
        for context in contexts:
            cuda_contexts.protect(context)
        left = sum(cuda_contexts.entries_left(context) for context in contexts)
    version = 'libgpuarray of pygpu ' + pygpu.__version__
    if left:
        return Finding(FAIL, '%s leaves a context current, and the patch does not help: several CUDA contexts in one '
                       'process will fail' % version, 'Use one process for each device: theano-mgpu launch')
    if leaked:
        return Finding(OK, '%s leaves a context current when it has a kernel already; with the patch of theano_mgpu '
                       'it does not, on %s and %s' % (version, *used))
    return Finding(OK, '%s leaves contexts as they were, on %s and %s' % (version, *used))
