"""Names of ``theano.sandbox.cuda``, the GPU code of Theano before 1.0, as ops for any device.

Theano moves these ops to the devices of contexts, so that a script needs no GPU, and can be divided.
"""
from __future__ import annotations

from typing import Any

from ..utils import progress
from . import old_flags


def names() -> dict[str, Any]:
    """Return what scripts import from the package, but for ops that are written in CUDA."""
    import theano
    from theano import tensor
    from theano.gpuarray import GpuArrayType, basic_ops
    from theano.gpuarray import type as gpuarray_type
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor.nnet import abstract_conv
    from theano.tensor.signal import pool

    def dnn_conv(img, kerns, border_mode='valid', subsample=(1, 1), conv_mode='conv', *hints, **more_hints):
        return abstract_conv.conv2d(img, kerns, **describe(border_mode, subsample, conv_mode)())

    def dnn_pool(img, ws, stride=(1, 1), mode='max', pad=(0, 0)):
        pooled = pool.pool_3d if len(ws) == 3 else pool.pool_2d
        return pooled(img, ws, True, stride, pad, {'average': 'average_inc_pad'}.get(mode, mode))

    def describe(border_mode='valid', subsample=(1, 1), conv_mode='conv', precision=None):
        options = dict(border_mode=border_mode, subsample=subsample, filter_flip=conv_mode == 'conv')
        return lambda *shapes: options

    def transposed(kerns, top, out, desc):
        return abstract_conv.conv2d_grad_wrt_inputs(top, kerns, (None, None, out.shape[2], out.shape[3]), **desc)

    def correlation(border_mode='valid', subsample=(1, 1), pad=(0, 0)):
        border_mode = border_mode if pad in (0, (0, 0)) else pad
        return lambda img, kerns: dnn_conv(img, kerns, border_mode, subsample, 'cross')

    return {
        'use': use, 'unuse': lambda: None, 'cuda_available': False, 'cuda_enabled': False,
        'dnn_available': lambda: False, 'dnn_present': lambda: False, 'dnn_conv': dnn_conv, 'dnn_pool': dnn_pool,
        'GpuDnnConvDesc': describe, 'GpuDnnConvGradI': lambda *options: transposed, 'GpuCorrMM': correlation,
        'GpuDnnConv': lambda *options: lambda img, kerns, out, desc: abstract_conv.conv2d(img, kerns, **desc),
        **dict.fromkeys(('gpu_contiguous', 'as_cuda_ndarray_variable', 'host_from_gpu', 'gpu_from_host'),
                        tensor.as_tensor_variable),
        'gpu_alloc_empty': lambda *shape: tensor.zeros(shape, 'float32'),
        **dict.fromkeys(('shared_constructor', 'float32_shared_constructor'), theano.shared),
        'CudaNdarrayType': GpuArrayType, 'HostFromGpu': basic_ops.HostFromGpu, 'GpuFromHost': basic_ops.GpuFromHost,
        'CURAND_RandomStreams': MRG_RandomStreams,
        # Of pickles, see old_pickles.py.
        'CudaNdarray_unpickler': lambda array: gpuarray_type.GpuArray_unpickler(array, None),
        'CudaNdarrayVariable': gpuarray_type.GpuArrayVariable, 'CudaNdarrayConstant': gpuarray_type.GpuArrayConstant,
        'CudaNdarraySharedVariable': gpuarray_type.GpuArraySharedVariable}


def use(device: str, *ignored: Any, **options: Any) -> None:
    """Have Theano compute on a device of an old name, unless contexts are chosen; where it cannot, a note says so."""
    import theano.gpuarray
    device = old_flags.today({'device': device})[0]['device']
    try:
        if device != 'cpu':
            theano.gpuarray.use(device)
    except Exception as error:  # of many kinds
        progress.note('Theano computes on the CPU, since it cannot use %s: %s' % (device, error))
