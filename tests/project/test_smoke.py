"""A small test of each part on `cpu` contexts; `make test-pythons` runs it on each Python."""
import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T


def test_two_contexts_train_as_one(tmp_path):
    mgpu.init('host0->cpu;host1->cpu')
    x, y = np.random.RandomState(0).randn(2, 9, 5).astype(theano.config.floatX)
    results = []
    for contexts in (['host0'], ['host0', 'host1']):
        inputs, targets = T.matrix('inputs'), T.matrix('targets')
        w = theano.shared(np.zeros((5, 5), theano.config.floatX), name='w')
        loss = ((T.tanh(T.dot(inputs, w)) - targets) ** 2).mean()
        step = mgpu.training_function([inputs, targets], loss, [w], lambda g, w=w: {w: T.cast(w - 0.1 * g[0], w.dtype)},
                                      contexts=contexts)
        losses = [float(step(x, y)) for _ in range(5)]
        step.save(str(tmp_path / 'state.npz'))
        step.load(str(tmp_path / 'state.npz'))
        results.append(losses + list(w.get_value().ravel()))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_scan_and_convolution():
    """Another version of the compiler, or none, might break these."""
    mgpu.init('host0->cpu;host1->cpu')
    x = T.matrix('x')
    powers, _ = theano.scan(lambda h: h * 2, outputs_info=[x], n_steps=3)
    values = np.ones((4, 3), theano.config.floatX)
    np.testing.assert_array_equal(mgpu.function([x], powers[-1])(values), 8 * values)
    if theano.config.cxx:
        images, kernel = T.tensor4('images'), theano.shared(np.ones((1, 1, 2, 2), theano.config.floatX))
        total = mgpu.function([images], T.nnet.conv2d(images, kernel))
        np.testing.assert_array_equal(total(np.ones((3, 1, 2, 2), theano.config.floatX)).ravel(), [4, 4, 4])


def test_keras_imports_on_theano():
    import keras
    assert keras.backend.backend() == 'theano'
