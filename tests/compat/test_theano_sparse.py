"""Theano's ops on sparse matrices, after the patches of theano_mgpu."""
import theano_mgpu as mgpu

import numpy as np
import pytest
import scipy.sparse
import theano
import theano.tensor as T
from theano import sparse

pytestmark = pytest.mark.needs_compiler
RANDOM = np.random.RandomState(0)
SPARSE = RANDOM.rand(4, 6) * (RANDOM.rand(4, 6) > .5)
WAYS = {'rows': lambda x: x[:4, :6].copy(), 'columns': lambda x: np.asfortranarray(x[:4, :6]),
        'part': lambda x: x[:4, 2:8], 'steps': lambda x: x[::2, ::2], 'turned': lambda x: x[3::-1, 5::-1]}


@pytest.mark.slow_with('csc-float64', 'csr-float32')
@pytest.mark.parametrize('dtype', ['float64', 'float32'])
@pytest.mark.parametrize('kind', ['csr', 'csc'])
def test_dense_matrices_of_any_strides(kind, dtype):
    """A sum or a product had wrong numbers, and the sum overwrote foreign memory: "free(): invalid pointer"."""
    s, d = sparse.matrix(kind, 's', 'float64'), T.matrix('d', dtype)
    f = theano.function([s, d], [sparse.add(s, d), sparse.dense_from_sparse(sparse.mul(s, d))], mode='FAST_RUN')
    names = ' '.join(type(node.op).__name__ for node in f.maker.fgraph.apply_nodes)
    assert 'AddSD_ccode' in names and ('MulSDCS' in names) == (dtype == 'float64')
    of_kind, base = scipy.sparse.csc_matrix if kind == 'csc' else scipy.sparse.csr_matrix, RANDOM.rand(8, 12)
    for name, way in WAYS.items():
        dense = way(base.astype(dtype))
        total, product = f(of_kind(SPARSE), dense)
        np.testing.assert_allclose(total, SPARSE + dense, err_msg=name)
        np.testing.assert_allclose(product, SPARSE * dense, err_msg=name)


def test_columns_of_a_dense_batch_are_added_to_a_sparse_matrix(cpu2):
    """The columns of the second context were added to other columns, and the process died now and then."""
    values = T.dvector('values')
    s = sparse.CSC(values, np.arange(3, dtype='int32'), np.array([0, 1, 3], 'int32'), np.array([3, 2]))
    d = T.fmatrix('d')
    f = mgpu.function([values, d], sparse.add(s, d), samples={d: 1})
    dense = RANDOM.rand(3, 2).astype('float32')
    expected = scipy.sparse.csc_matrix(([1., 2., 3.], np.arange(3), [0, 1, 3]), (3, 2)) + dense
    np.testing.assert_allclose(f([1., 2., 3.], dense), expected)
    assert f.refused is None
