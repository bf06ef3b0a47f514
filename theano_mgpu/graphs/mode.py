"""The optimisations of Theano that a context may use."""
from __future__ import annotations

from typing import Sequence

import theano
from theano.gof.graph import ancestors

from ..devices.context_map import Context

# The kernel of top-k uses __ballot, which devices from compute capability 7.0 on do not have: it stays on the host.
NOT_ON_GPU = ('local_gpua_topkop',)
# Optimisations that must not be used on OpenCL. Theano 1.0.5 registers them for any GPU, but:
#   the first one's kernel does not build there (clBuildProgram error);
#   scan's pure-Python loop reads CUDA's own attributes ("This is for CUDA arrays");
#   the last one's kernel is CUDA source.
NOT_ON_OPENCL = ('local_gpua_crossentropysoftmaxargmax1hotwithbias', 'local_gpua_scan_to_gpua', 'local_gpua_cumop')
# CLBlast refuses float16 on devices without half arithmetic ("float16 is not supported on this
# device"), and pygpu cannot ask a device whether it has it: products with float16 stay on the host.
NOT_IN_HALF = ('local_gpua_dot22', 'local_gpua_dot22scalar', 'local_gpua_gemm', 'local_gpua_gemv',
               'local_gpua_ger', 'local_gpua_gemmbatch', 'local_gpua_abstractconv',
               'local_gpua_lift_abstractconv_graph')


def compile_mode(context: Context, outputs: Sequence[theano.Variable],
                 mode: str | theano.Mode | None = None) -> theano.Mode:
    """Return a Theano Mode for a graph on one context.

    Parameters
    ----------
    context : Context
    outputs : list of theano.Variable
    mode : str or theano.Mode, optional
        None for ``theano.config.mode``.

    Returns
    -------
    theano.Mode
    """
    mode = theano.compile.get_mode(mode)
    if not theano.config.cxx:
        # Fused elementwise ops are interpreted element by element; single ones are NumPy's.
        mode = mode.excluding('fusion')
    if context.kind == 'cpu':
        return mode.excluding('gpuarray_opt')
    if context.kind == 'opencl':
        has_half = any(getattr(v.type, 'dtype', None) == 'float16' for v in ancestors(outputs))
        return mode.excluding(*NOT_ON_GPU + NOT_ON_OPENCL + (NOT_IN_HALF if has_half else ()))
    return mode.excluding(*NOT_ON_GPU)
