"""Matrix products of Theano: each is computed once, and products of few rows in blocks."""
import theano_mgpu  # noqa: F401

import keras
import keras.backend as K
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiled_ops import use_theanos_own
from theano.tensor import blas
from threadpoolctl import threadpool_limits

PRODUCTS = blas.Dot22, blas.Dot22Scalar, blas.Gemm


def scale_by_blas(monkeypatch):
    rewrite = blas.local_dot22_to_dot22scalar
    monkeypatch.setattr(rewrite, 'transform', rewrite.transform.__wrapped__)


def trained(optimizer, linker='py', batch_size=128, steps=0):
    """Return a training function of a dense layer, and its weights after some steps."""
    random = np.random.RandomState(0)
    w = K.variable(random.randn(30, 20).astype('float32'))
    x, labels = T.fmatrix(), T.fmatrix()
    loss = K.mean(K.square(T.dot(x, w) - labels))
    f = theano.function([x, labels], loss, updates=[pair for pair in optimizer.get_updates(loss=loss, params=[w])
                                                    if isinstance(pair, tuple)],
                        mode=theano.Mode(linker, 'fast_run'))
    for _ in range(steps):
        f(random.randn(batch_size, 30).astype('float32'), random.randn(batch_size, 20).astype('float32'))
    return f, w.get_value()


def products_of(function):
    return [node.op for node in function.maker.fgraph.apply_nodes if isinstance(node.op, PRODUCTS)]


@pytest.mark.slow_with('Nadam')
@pytest.mark.parametrize('optimizer', [keras.optimizers.SGD(momentum=.9), *(
    make() for make in (keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta,
                        keras.optimizers.Adam, keras.optimizers.Adamax, keras.optimizers.Nadam))],
    ids=lambda optimizer: type(optimizer).__name__)
def test_optimizers_compute_each_gradient_once(optimizer):
    assert len(products_of(trained(optimizer)[0])) == 2  # forward, and the gradient


def test_theano_computes_gradients_twice(monkeypatch):
    scale_by_blas(monkeypatch)
    assert len(products_of(trained(keras.optimizers.Adam())[0])) == 3


def test_a_product_that_is_scaled_alone_is_scaled_by_blas():
    x, y = T.fmatrices('xy')
    f = theano.function([x, y], 3 * T.dot(x, y), mode=theano.Mode('py', 'fast_run'))
    assert [type(op) for op in products_of(f)] == [blas.Dot22Scalar]


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_without_fused_products_the_weights_are_the_same_bit_by_bit(monkeypatch):
    with theano.configparser.change_flags(**{'gcc.cxxflags': theano.config.gcc.cxxflags + ' -ffp-contract=off'}):
        ours = trained(keras.optimizers.Adam(), 'cvm', steps=5)[1]
        scale_by_blas(monkeypatch)
        np.testing.assert_array_equal(ours, trained(keras.optimizers.Adam(), 'cvm', steps=5)[1])


def test_few_rows_are_multiplied_in_blocks(monkeypatch):
    op = blas.Dot22()
    assert 'sgemm_in_blocks' in op.c_support_code()
    version = op.c_code_cache_version()
    use_theanos_own(monkeypatch, blas.GemmRelated, ['c_support_code', 'build_gemm_version'])
    assert 'sgemm_in_blocks' not in op.c_support_code() and op.c_code_cache_version() != version


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_blocks_come_to_the_whole_product():
    x, y, w = T.fmatrices('xyw')
    a = T.fscalar('a')
    f = theano.function([x, y, w, a], [T.dot(x, w), T.dot(y, w.T), blas.gemm_no_inplace(T.tanh(y), a, x, w, a)])
    assert sum(isinstance(node.op, blas.GemmRelated) for node in f.maker.fgraph.apply_nodes) == 3
    threadpool_limits(1, user_api='blas')
    random = np.random.RandomState(0)
    for rows in (1, 3, 4, 16, 31, 32, 33, 50):
        for m, n in ((64, 64), (130, 261), (700, 129), (2100, 1030)):
            a, b, c = (random.randn(*shape).astype('float32') for shape in ((rows, m), (rows, n), (m, n)))
            expected = [a.astype('float64') @ c, b.astype('float64') @ c.T]
            expected.append(.5 * np.tanh(b, dtype='float64') + .5 * expected[0])
            for weights in (c, np.asfortranarray(c)):
                for found, exact in zip(f(a, b, weights, np.float32(.5)), expected):
                    np.testing.assert_allclose(found, exact, atol=1e-5 * abs(exact).max())
