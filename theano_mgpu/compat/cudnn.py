"""Patches of Theano's use of cuDNN: versions 8 and 9, one choice of algorithms, and no error of g++ within a script.

Theano 1.0.5 knows cuDNN 5 to 7. Its check compiles a call of ``cudnnCreate`` alone, so that it takes cuDNN 8 and 9, and
the first convolution does not compile. It takes the compute capability from two digits, so that 10.0 and 12.0 count as
0 and 20. `use_any_version` puts a check in front of that, and `cudnn_shim.h` before the C code of the ops.
"""
from __future__ import annotations

import sys
import zlib
from typing import Any

from ..errors import warn
from ..utils import flag_text
from .cuda_libraries import find_cudnn
from .cuda_libraries.cudnn_choice import SHIM
from .wrapping import mark_version, wrap

GRADIENTS = 'dnn.conv.algo_bwd_data', 'dnn.conv.algo_bwd_filter'  # flags whose defaults are not deterministic
NO_RNN = ('cuDNN 9 lacks the functions that the RNN ops of Theano 1.0.5 call. Write the recurrence as theano.scan (the '
          'recurrent layers of Keras and Lasagne are), or install cuDNN 8: python -m pip install '
          "'nvidia-cudnn-cu12<9'")


def postpone_the_check(module: Any) -> None:
    """Keep ``theano.gpuarray.dnn`` from looking for cuDNN while it is imported; `use_any_version` does so on demand.

    `module` is ``theano.gpuarray.cudnn_defs``, which ``theano.gpuarray.dnn`` imports first.
    """
    from theano import config as theano_config
    if not hasattr(sys.modules.get('theano.gpuarray.dnn'), 'version'):  # else it was imported before theano_mgpu
        theano_config.dnn.enabled = 'False'


def default_to_deterministic_algorithms(theanos: dict[str, str]) -> None:
    """Compute the gradients of convolutions by deterministic algorithms, unless the user chose others.

    Theano's default algorithms add up in any order: two runs differ in the last bits.
    """
    for name in GRADIENTS:
        if flag_text.flag(name) is None:
            theanos[name] = 'deterministic'


def use_any_version(dnn: Any) -> None:
    """Use cuDNN 7, 8 or 9, if a convolution compiles and computes; otherwise say in one line why not.

    `dnn` is ``theano.gpuarray.dnn``, whose functions that look for cuDNN are replaced.
    """
    from theano import config as theano_config
    _put_shim_before_ops(dnn)
    if theano_config.dnn.enabled == 'False':
        theano_config.dnn.enabled = flag_text.flag('dnn.enabled', 'auto')
    if dnn.dnn_present.avail and dnn.version.v is not None:  # Theano was imported first, and has opened a context
        return
    dnn.dnn_present.avail = dnn.dnn_present.msg = None

    @wrap(dnn)
    def dnn_present(original):
        if dnn.dnn_present.avail is None:
            cudnn = find_cudnn()
            dnn.dnn_present.avail, dnn.dnn_present.msg = not cudnn.problem, cudnn.why_not()
            if dnn.dnn_present.avail:
                _take(dnn, cudnn)
        return dnn.dnn_present.avail

    @wrap(dnn)
    def version(original, raises=True):
        if dnn.dnn_present():
            return find_cudnn().number
        if raises:
            raise RuntimeError("We can't determine the cudnn version as it is not available", dnn.dnn_present.msg)
        return -1

    @wrap(dnn)
    def dnn_available(original, context_name):
        reason = (_reason_against(dnn, dnn.get_context(context_name), find_cudnn()) if dnn.dnn_present() else
                  dnn.dnn_present.msg)
        dnn.dnn_available.msg = reason or None
        return not reason

    @wrap(dnn)
    def _make_handle(original, context):
        return context.cudnn_handle if hasattr(context, 'cudnn_handle') else original(context)


def give_contiguous_parameters() -> None:
    """Give contiguous parameters to the gradient of batch normalisation by cuDNN.

    Theano 1.0.5 describes the statistics and the gradients to cuDNN by the strides of the scale.
    """
    from theano.gpuarray import dnn

    @wrap(dnn.GpuDnnBatchNormGrad)
    def make_node(original, self, x, dy, scale, x_mean, x_invstd, *epsilon):
        return original(self, x, dy, *map(dnn.gpu_contiguous, (scale, x_mean, x_invstd)), *epsilon)


def _take(dnn, cudnn):
    """Set Theano's flags, and the type of cuDNN's handles, to a cuDNN."""
    from theano import config as theano_config
    theano_config.dnn.include_path, theano_config.cuda.include_path = cudnn.include, cudnn.cuda_include
    theano_config.dnn.library_path = theano_config.dnn.bin_path = cudnn.link
    dnn.version.v = cudnn.number
    # These types were made when the flags had no values. Each op refers to them.
    for kind in (dnn.handle_type, dnn.dropoutdesc_type, dnn.rnndesc_type):
        vars(kind).update(vars(dnn.CUDNNDataType(kind.ctype, kind.freefunc)))
    # Their gradient by the filters has a deterministic algorithm since cuDNN 7.
    dnn.cudnn.conv3d_bwd_filter_algorithms += ('deterministic',)


def _reason_against(dnn, context, cudnn):
    """Return why a context does not use cuDNN; '' if it does.

    When Theano opens the context, a handle is made. The first graph on it tries a convolution.
    """
    if context.kind != b'cuda':
        return 'Not on a CUDA device.'
    if not hasattr(context, 'mgpu_against_cudnn'):
        context.mgpu_against_cudnn, context.mgpu_tried_cudnn = '', False
        try:
            context.cudnn_handle = dnn._make_handle(context)
        except (RuntimeError, OSError) as error:
            context.mgpu_against_cudnn = 'cuDNN %d (%s) cannot be started: %s' % (
                cudnn.number, cudnn.path, ' '.join(map(str, error.args)))
    elif not context.mgpu_against_cudnn and not context.mgpu_tried_cudnn:
        context.mgpu_tried_cudnn = True
        problem = cudnn.trial(context.cudnn_handle.value, context)
        if problem:
            context.mgpu_against_cudnn = 'cuDNN %d (%s): %s' % (cudnn.number, cudnn.path, problem)
            warn('%s. Convolutions on %s are computed without it, by GpuCorrMM'
                 % (context.mgpu_against_cudnn, getattr(context, 'dev', 'a device')))
    return context.mgpu_against_cudnn


def _put_shim_before_ops(dnn):
    """Put `SHIM` before the C code of all ops of cuDNN, and refuse RNN ops where they cannot be compiled."""
    from theano import config as theano_config

    def shim():
        return '#define THEANO_MGPU_TF32\n' * (theano_config.mgpu.tf32 == 'True') + SHIM

    @wrap(dnn.DnnBase)
    def c_support_code(original, self):
        return shim() + original(self)

    mark_version(dnn.DnnBase, lambda: (zlib.crc32(shim().encode()),))

    for owner in (dnn.RNNBlock, dnn._RNNDescriptor):
        @wrap(owner)
        def __init__(original, self, *args, **options):
            if dnn.version() >= 90000:
                raise RuntimeError(NO_RNN)
            original(self, *args, **options)
