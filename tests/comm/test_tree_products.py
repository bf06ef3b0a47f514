"""Sums of products in the order of the tree: the same bits, however shards are spread over ranks."""
from theano_mgpu.comm import tree_products
from theano_mgpu.comm.tree import Tree, folded
from theano_mgpu.comm.tree_products import Product, add_products

import numpy as np
import pytest
import theano
from threadpoolctl import threadpool_limits

SHAPES = [(3, 5), (150, 260), (128, 128), (300, 1)]
WAYS = [pytest.param(True, marks=pytest.mark.needs_compiler, id='compiled'), pytest.param(False, id='NumPy')]


@pytest.fixture(autouse=True)
def one_thread():
    threadpool_limits(1, user_api='blas')


@pytest.fixture
def way(request, monkeypatch):
    """Have products added by compiled code, or by NumPy."""
    if not request.param:
        monkeypatch.setattr(tree_products, 'compiled', lambda compiler: None)
    elif not theano.tensor.blas.ldflags():
        pytest.skip('Theano has no BLAS')
    return request.param


def noise(shape, dtype='float32', total=7):
    """Return the products of some shards, whose numbers of samples differ by one."""
    rng = np.random.RandomState(total)

    def matrix(samples, columns):
        return (rng.randn(samples, columns) * 10. ** rng.randint(-3, 3, (samples, 1))).astype(dtype)
    return [Product(*(matrix(4 - i % 2, columns) for columns in shape)) for i in range(total)]


def sums_of(tree, every_product):
    """Return the sums of the nodes that the shards of a rank come to."""
    first = tree.first(tree.rank)
    own = list(enumerate(every_product))[first:first + tree.counts[tree.rank]]
    sums = [np.full(own[0][1].shape, np.nan, own[0][1].dtype) for _ in tree.nodes_of(tree.rank)]
    add_products(tree, own, sums)
    return sums


@pytest.mark.parametrize('way', WAYS, indirect=True)
@pytest.mark.parametrize('counts', [(7,), (3, 4), (1, 5, 1), (2, 2, 2, 1)])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_any_cut_gives_the_same_bits(way, counts, dtype):
    for shape in SHAPES:
        every_product = noise(shape, dtype)
        nodes = []
        for rank in range(len(counts)):
            tree = Tree(rank, counts)
            nodes += [node._replace(value=value) for node, value in zip(tree.nodes_of(rank),
                                                                       sums_of(tree, every_product))]
        (_, _, total), = tree.merged(nodes, lambda values, level, place: folded(values, np.add))
        leaves, = zip(*[sums_of(Tree(i, (1,) * 7), every_product) for i in range(7)])
        np.testing.assert_array_equal(total, Tree(0, (7,)).reduced(leaves, np.add))
        exact = sum(left.T.astype('float64') @ right for left, right in every_product)
        np.testing.assert_allclose(total, exact, rtol=1e-4, atol=1e-6 * abs(exact).max())


@pytest.mark.parametrize('way', WAYS[:1], indirect=True)
def test_bits_do_not_depend_on_the_number_of_threads(way, monkeypatch):
    monkeypatch.setattr(tree_products, 'SHARE', 1 << 10)
    found = []
    for threads in '1', '2':
        monkeypatch.setenv('OMP_NUM_THREADS', threads)
        found += sums_of(Tree(0, (7,)), noise((300, 400)))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize('way', WAYS, indirect=True)
def test_matrices_in_any_order(way):
    every_product = noise((150, 260))
    expected, = sums_of(Tree(0, (7,)), every_product)
    found, = sums_of(Tree(0, (7,)), [Product(*map(np.asfortranarray, each)) for each in every_product])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)
