"""Checks of `theano-mgpu doctor`: cuDNN is found and compiles, and a convolution by it agrees with one without it."""
from __future__ import annotations

from typing import Any

from ...compat import cuda_libraries
from ...devices.context_map import Context, describe
from ...devices.contexts import init
from ..output import quietly
from .host_checks import FAIL, OK, SKIP, WARN, Finding, Setup, first_line

SLOWER = 'without it, convolutions are several times slower'


def check_cudnn(setup: Setup) -> Finding:
    """Check that cuDNN is installed with its headers, and that Theano's convolutions compile with it."""
    if not cuda_libraries.survey().capabilities:
        return Finding(SKIP, 'not tried: no CUDA device can be used')
    cudnn = cuda_libraries.find_cudnn()
    if not cudnn.problem:
        return Finding(OK, '%s: %s, headers in %s' % (cuda_libraries.dotted(cudnn.version), cudnn.path, cudnn.include))
    if cudnn.path is None:
        return Finding(SKIP, 'optional; %s; %s%s' % (cudnn.problem, SLOWER, cudnn.remedy and ': ' + cudnn.remedy))
    return Finding(WARN, '%s; %s' % (cudnn.problem, SLOWER), cudnn.remedy)


def check_convolution(setup: Setup, context: Context) -> Finding:
    """Compare a convolution and its gradients, by cuDNN and by Theano's own ops, on one context."""
    from theano.gpuarray import dnn
    if cuda_libraries.find_cudnn().problem:
        return Finding(SKIP, 'needs cuDNN')
    try:
        with quietly():
            init(describe([context]))
            dnn.dnn_available(context.name)  # opening the context makes a handle, and this tries a convolution
            reason = '' if dnn.dnn_available(context.name) else dnn.dnn_available.msg
            by_cudnn, plain = ([] if reason else _convolve(context.name, *excluded) for excluded in ((), ('cudnn',)))
    except Exception as error:
        return Finding(FAIL, first_line(error), 'Do without cuDNN: THEANO_FLAGS=dnn.enabled=False')
    if reason:
        return Finding(WARN, '%s; %s' % (reason, SLOWER), 'Install another version of cuDNN (python -m pip index '
                       'versions nvidia-cudnn-cu12 lists them), or do without: THEANO_FLAGS=dnn.enabled=False')
    worst = max(_difference(one, other) for one, other in zip(by_cudnn, plain))
    if not worst < 1e-3:
        return Finding(FAIL, 'a convolution by cuDNN differs from GpuCorrMM by %.2g of its largest value' % worst,
                       'Do without cuDNN: THEANO_FLAGS=dnn.enabled=False')
    return Finding(OK, '%s: a convolution and its gradient agree with GpuCorrMM to %.0e' % (context.device, worst))


def _convolve(name: str, *excluded: str) -> list[Any]:
    """Return a convolution on a context, and its gradients, computed without some of Theano's optimisations."""
    import numpy as np
    import theano
    import theano.tensor as T
    rng = np.random.RandomState(0)
    x, w = (theano.shared(rng.uniform(-1, 1, shape).astype('float32'), target=name)
            for shape in ((4, 3, 16, 16), (8, 3, 3, 3)))
    y = T.nnet.conv2d(x, w, border_mode='half')
    mode = theano.compile.get_default_mode().excluding(*excluded)
    return [np.asarray(value) for value in theano.function([], [y, *T.grad((y ** 2).sum(), [x, w])], mode=mode)()]


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference of two arrays, as a part of the largest value."""
    import numpy as np
    return float(np.abs(one - other).max() / np.abs(other).max())
