"""The cases of test_cudnn.py, and the process that compares Theano's ops of cuDNN with Theano on the CPU.

It reads names of cases from its arguments (none: all cases), and prints a line of JSON for each case: its name, the ops
of cuDNN in its graph, and the failure or None.
"""
import json
import sys
import traceback

import numpy as np

NAMES = {
    'convolutions': ['GpuDnnConv', 'GpuDnnConvGradI', 'GpuDnnConvGradW'],
    'convolutions in 3 dimensions': ['GpuDnnConv', 'GpuDnnConvGradI', 'GpuDnnConvGradW'],
    'pooling': ['GpuDnnPool', 'GpuDnnPoolGrad'],
    'softmax': ['GpuDnnSoftmax', 'GpuDnnSoftmaxGrad'],
    'batch normalisation': ['GpuDnnBatchNorm', 'GpuDnnBatchNormGrad', 'GpuDnnBatchNormInference'],
    'reductions': ['GpuDnnReduction'],
    'float64': ['GpuDnnConv', 'GpuDnnConvGradW', 'GpuDnnReduction'],
}


def cases():
    """Yield name, function of symbolic inputs that builds the outputs, and inputs."""
    import theano.tensor as T
    from theano.tensor.nnet import bn
    from theano.tensor.signal.pool import pool_2d, pool_3d

    rng = np.random.RandomState(0)

    def values(*shape):
        return rng.uniform(-1, 1, shape).astype('float32')

    def with_gradients(outputs, inputs):
        return [*outputs, *T.grad(sum(T.sum(output ** 2) for output in outputs), inputs)]

    def convolutions(x, w):
        return with_gradients([
            T.nnet.conv2d(x, w), T.nnet.conv2d(x, w, border_mode='full', filter_flip=False),
            T.nnet.conv2d(x, w, border_mode=(2, 1), subsample=(2, 3)),
            T.nnet.conv2d(x, w, border_mode='half', filter_dilation=(2, 2)),
            T.nnet.conv2d(T.concatenate([x, x], axis=1), w, num_groups=2)], [x, w])
    yield 'convolutions', convolutions, [values(3, 2, 9, 8), values(4, 2, 3, 3)]
    yield ('convolutions in 3 dimensions', lambda x, w: with_gradients(
        [T.nnet.conv3d(x, w), T.nnet.conv3d(x, w, border_mode=(1, 0, 2), subsample=(1, 2, 2))], [x, w]),
        [values(2, 2, 5, 6, 6), values(3, 2, 2, 3, 3)])

    def pooling(x, volume):
        flat = [pool_2d(x, (2, 3), ignore_border=True, stride=(2, 2), pad=pad, mode=mode)
                for mode, pad in (('max', (1, 1)), ('average_inc_pad', (1, 1)), ('average_exc_pad', (0, 0)))]
        return with_gradients([*flat, pool_3d(volume, (2, 2, 2), ignore_border=True)], [x, volume])
    yield 'pooling', pooling, [values(2, 3, 7, 8), values(2, 2, 4, 4, 4)]
    yield ('softmax', lambda x: with_gradients([T.nnet.softmax(x), T.nnet.logsoftmax(x)], [x]), [values(9, 7)])

    def normalisation(x, scale, bias, mean, variance):
        outputs = []
        for axes in ('spatial', 'per-activation'):
            pattern = (1,) if axes == 'spatial' else (1, 2, 3)
            order = ['x', *range(len(pattern)), *(['x'] * (3 - len(pattern)))]
            some = [each[(slice(None), *([0] * (3 - len(pattern))))] for each in (scale, bias, mean, variance)]
            some = [each.dimshuffle(order) for each in some]
            some = [T.patternbroadcast(each, [k not in pattern for k in range(4)]) for each in some]
            outputs += bn.batch_normalization_train(x, some[0], some[1], axes, running_mean=some[2],
                                                    running_var=some[3])
            outputs.append(bn.batch_normalization_test(x, *some, axes=axes))
        return with_gradients(outputs[:1] + outputs[6:7], [x, scale, bias]) + outputs
    shape = (3, 4, 4)
    yield ('batch normalisation', normalisation,
           [values(5, *shape), 1 + .1 * values(*shape), values(*shape), values(*shape), 1 + .5 * abs(values(*shape))])
    yield ('reductions', lambda x: [x.sum(axis=(0, 2)), x.max(axis=1), x.min(), x.prod(axis=2), abs(x).max(axis=0),
                                    (x ** 2).sum(axis=1), x.argmax(axis=1), T.max_and_argmax(x, axis=(0, 2))[1]],
           [values(4, 5, 6)])
    yield ('float64', lambda x, w: [T.nnet.conv2d(x, w), T.grad(T.sum(T.nnet.conv2d(x, w) ** 2), w), x.sum(axis=0)],
           [rng.rand(2, 2, 6, 6), rng.rand(3, 2, 3, 3)])


def main(names):
    import theano_mgpu  # noqa: F401 - installs the version fixes of theano

    import theano
    fast_run = theano.compile.mode.get_mode('FAST_RUN')
    for name, build, inputs in cases():
        if names and name not in names:
            continue
        ops, failure = [], None
        try:
            symbols = [theano.tensor.TensorType(value.dtype, (False,) * value.ndim)() for value in inputs]
            outputs = build(*symbols)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            on_gpu, on_cpu = (theano.function(symbols, outputs, mode=mode, on_unused_input='ignore')
                              for mode in (fast_run.including('gpuarray'), fast_run.excluding('gpuarray')))
            ops = sorted({type(node.op).__name__ for node in on_gpu.maker.fgraph.apply_nodes})
            for index, (got, want) in enumerate(zip(on_gpu(*inputs), on_cpu(*inputs))):
                np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-4,
                                           err_msg='output %d' % index)
        except Exception:
            failure = traceback.format_exc()[-2000:]
        print(json.dumps([name, [op for op in ops if op.startswith('GpuDnn')], failure]), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
