"""The cases of test_theano_ops.py, and the process that compares Theano's gpuarray backend with Theano on the CPU.

Run as a program, it reads names of cases from its arguments (none: all cases) and prints a line of JSON for each.
"""
import json
import sys
import traceback

import numpy as np

REDUCED_AXES = {
    1: [0],
    2: [0, 1, (0, 1)],
    3: [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)],
    4: [(0, 2, 3), (0, 1, 2), 1, 3],
}
NAMES = [
    'dense', 'dense gradient', 'conv2d', 'conv2d gradient', 'conv3d', 'pool', 'pool gradient', 'softmax',
    'softmax of long rows', 'crossentropy', 'reduce 1d', 'reduce 2d', 'reduce 3d', 'reduce 4d', 'embedding', 'scan',
    'scan gradient', 'float64', 'batch normalisation', 'join and split', 'cumsum', 'topk', 'elementwise',
    'eye and alloc', 'repeat and tile', 'images2neibs', 'batched dot', 'random', 'float16',
]


def cases():
    """Yield name, function of symbolic inputs that builds the outputs, inputs, and options of `compare`."""
    import theano
    import theano.tensor as T
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor.signal.pool import pool_2d

    rng = np.random.RandomState(0)

    def values(*shape):
        return rng.rand(*shape).astype('float32')

    def sum_of_squares_gradient(build):
        return lambda *inputs: T.grad(T.sum(build(*inputs) ** 2), list(inputs))

    def recurrent(x, w):
        return theano.scan(lambda now, state, w: T.tanh(now + T.dot(state, w)), sequences=x,
                           outputs_info=T.zeros_like(x[0]), non_sequences=w)[0]

    def pools(x):
        return [pool_2d(x, (2, 2), ignore_border=True, mode=mode) for mode in ('max', 'average_inc_pad')]

    yield 'dense', lambda x, w, b: T.tanh(T.dot(x, w) + b), [values(32, 100), values(100, 50), values(50)], {}
    yield ('dense gradient', sum_of_squares_gradient(lambda x, w: T.nnet.relu(T.dot(x, w))),
           [values(32, 100), values(100, 50)], {})
    yield 'conv2d', T.nnet.conv2d, [values(4, 3, 20, 20), values(8, 3, 3, 3)], {}
    yield ('conv2d gradient', sum_of_squares_gradient(lambda x, w: T.nnet.conv2d(x, w, border_mode='half')),
           [values(4, 3, 20, 20), values(8, 3, 3, 3)], dict(rtol=1e-3))
    yield 'conv3d', T.nnet.conv3d, [values(2, 2, 6, 8, 8), values(3, 2, 3, 3, 3)], {}
    yield 'pool', pools, [values(4, 3, 20, 20)], {}
    yield ('pool gradient', lambda x: [T.grad(T.sum(pool ** 2), x) for pool in pools(x)], [values(4, 3, 20, 20)], {})
    yield ('softmax', lambda x: [T.nnet.softmax(x), T.grad(T.sum(T.nnet.softmax(x) ** 2), x)], [values(40, 17)], {})
    yield 'softmax of long rows', T.nnet.softmax, [values(4, 20000)], {}

    def crossentropy(x, labels):
        loss = T.nnet.categorical_crossentropy(T.nnet.softmax(x), labels).mean()
        return [loss, T.grad(loss, x)]
    yield 'crossentropy', crossentropy, [values(40, 17), rng.randint(0, 17, 40)], {}

    for dimensions, axes in sorted(REDUCED_AXES.items()):
        def reduce(x, axes=axes):
            return [function(x, axis=axis) for axis in axes for function in (T.sum, T.max, T.min, T.prod)] + [
                x.mean(axis=axes[0]), x.argmax(axis=0)]
        shape = (5000,) if dimensions == 1 else (7, 33, 130, 5)[:dimensions]
        yield 'reduce %dd' % dimensions, reduce, [values(*shape)], dict(rtol=1e-3)

    yield ('embedding', lambda w, i: [w[i], T.grad(T.sum(w[i] ** 2), w), T.inc_subtensor(w[i], 1.5),
                                      T.set_subtensor(w[2:5], 0), w[::-1, 3], w[i, i]],
           [values(30, 30), rng.randint(0, 30, 12)], {})
    yield ('scan', lambda x: theano.scan(lambda now, state: T.tanh(now + state * .5), sequences=x,
                                         outputs_info=T.zeros_like(x[0]))[0], [values(10, 8)], {})
    yield ('scan gradient', lambda x, w: T.grad(T.sum(recurrent(x, w)), w), [values(10, 4, 8), values(8, 8) * .1], {})
    yield ('float64', lambda x, w: [T.dot(x, w), T.exp(x).sum(axis=0), T.grad(T.sum(T.nnet.sigmoid(T.dot(x, w))), w)],
           [rng.rand(20, 30), rng.rand(30, 10)], {})
    yield ('batch normalisation', lambda x: (x - x.mean(axis=(0, 2, 3), keepdims=True)) / T.sqrt(
        x.var(axis=(0, 2, 3), keepdims=True) + 1e-4), [values(8, 3, 10, 10)], dict(rtol=1e-3))
    yield ('join and split', lambda x, y: [T.concatenate([x, y], axis=1), T.stack([x, x]), x.T, x.reshape((-1,)),
                                           x.dimshuffle(1, 'x', 0)], [values(6, 7), values(6, 9)], {})
    yield 'cumsum', lambda x: [T.cumsum(x, axis=0), T.cumsum(x)], [values(30, 20)], {}
    yield 'topk', lambda x: T.sort(T.topk(x, 5, axis=-1, sorted=False), axis=-1), [values(10, 50)], {}
    yield ('elementwise', lambda x: [
        T.switch(x > .5, x, -x), T.clip(x, .2, .6), T.erf(x), T.erfinv(x * .9), T.gammaln(x + 1), T.log1p(x),
        T.arctan2(x, x + 1), x // .3, x % .3, T.isnan(x), T.round(x * 9), T.cast(x * 100, 'int8'), T.minimum(x, .3),
        x ** 2.5], [values(20, 30)], dict(rtol=1e-3))
    yield ('eye and alloc', lambda x: [T.eye(x.shape[0]), T.alloc(np.float32(3), x.shape[0], 4) + x[:, :4], T.tril(x),
                                       T.arange(x.shape[0]) * x[:, 0]], [values(20, 20)], {})
    yield ('repeat and tile', lambda x: [T.tile(x, (2, 3)), T.repeat(x, 2, axis=0), T.extra_ops.diff(x)],
           [values(5, 6)], {})
    yield 'images2neibs', lambda x: T.nnet.neighbours.images2neibs(x, (2, 2)), [values(2, 3, 8, 8)], {}
    yield 'batched dot', T.batched_dot, [values(5, 6, 7), values(5, 7, 8)], {}

    def random(x):
        return [MRG_RandomStreams(7).uniform((50, 20)) * x.sum(), MRG_RandomStreams(7).normal((50, 20)) * x.sum(),
                MRG_RandomStreams(7).binomial((50, 20), p=.3) * x.sum()]
    yield 'random', random, [values(3)], dict(rtol=1e-3, atol=1e-3, repeatable=False)
    yield ('float16', lambda x: T.cast(T.cast(x, 'float16') * np.float16(2), 'float32'), [values(30, 20)],
           dict(rtol=1e-2))


def compare(build, inputs, rtol=2e-4, atol=1e-5, repeatable=True):
    """Compile for the GPU and for the CPU, and compare the outputs; a second call must give the same bits."""
    import theano
    import theano.tensor as T
    fast_run = theano.compile.mode.get_mode('FAST_RUN')

    def compiled(mode):
        symbols = [T.TensorType(value.dtype, (False,) * value.ndim)() for value in inputs]
        outputs = build(*symbols)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return theano.function(symbols, outputs, mode=mode, on_unused_input='ignore')

    on_gpu = compiled(fast_run.including('gpuarray'))
    assert any('Gpu' in str(node.op) for node in on_gpu.maker.fgraph.toposort()), 'nothing runs on the GPU'
    got, again, want = on_gpu(*inputs), on_gpu(*inputs), compiled(fast_run.excluding('gpuarray'))(*inputs)
    for index in range(len(want)):
        np.testing.assert_allclose(np.asarray(got[index]), np.asarray(want[index]), rtol=rtol, atol=atol,
                                   err_msg='output %d' % index)
        if repeatable:
            np.testing.assert_array_equal(np.asarray(got[index]), np.asarray(again[index]))


def main(names):
    import theano_mgpu  # noqa: F401 - installs the version fixes of theano
    for name, build, inputs, options in cases():
        if names and name not in names:
            continue
        try:
            compare(build, inputs, **options)
            failure = None
        except Exception:
            failure = traceback.format_exc()[-4000:]
        print(json.dumps([name, failure]), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
