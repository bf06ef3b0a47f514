"""The tree of logical shards: the same bits, however shards are spread over replicas and ranks."""
from theano_mgpu.comm.tree import Node, Tree, add_arrays, add_over_ranks

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples


def merged(tree, nodes):
    def add(values, level, place):
        out = np.empty_like(values[0])
        add_arrays(values, out)
        return out
    return tree.merged(nodes, add)


def leaves(values, first=0):
    return [Node(0, first + i, value) for i, value in enumerate(values)]


def noise(total, size, dtype='float32'):
    rng = np.random.RandomState(total)
    return list((rng.randn(total, size) * 10. ** rng.randint(-6, 6, (total, 1))).astype(dtype))


@pytest.mark.slow
@examples(200)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_any_cut_gives_the_same_bits(counts):
    """Each rank merges its own shards, and then all nodes are merged."""
    counts = tuple(counts)
    tree, values = Tree(0, counts), noise(sum(counts), 7)
    nodes = []
    for rank, count in enumerate(counts):
        first = tree.first(rank)
        own = merged(tree, leaves(values[first:first + count], first))
        assert [node[:2] for node in own] == [node[:2] for node in tree.nodes_of(rank)]
        assert len(own) <= 2 * max(1, count).bit_length()
        nodes += own
    (_, _, value), = merged(tree, nodes)
    np.testing.assert_array_equal(value, tree.reduced(values, np.add))


def test_pairs_are_added_first():
    a, b, c, d, e = values = noise(5, 3)
    np.testing.assert_array_equal(Tree(0, (5,)).reduced(values, np.add), ((a + b) + (c + d)) + e)


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('size', [5, 70001])
def test_the_sum_of_several_nodes_rounds_each_time(dtype, size):
    """Compiled code adds a chain of large arrays in one pass, and NumPy adds float16 in float32."""
    values, out = noise(4, size, dtype), np.empty(size, dtype)
    add_arrays(values, out)
    np.testing.assert_array_equal(out, values[0] + (values[1] + (values[2] + values[3])))


class Mail:
    """The collective `all_to_all` of several ranks in one process: each leaves its messages, and the last one gets its.
    """

    def __init__(self, size):
        self.size, self.rank, self.messages = size, 0, {}

    def all_to_all(self, messages, lengths):
        self.messages[self.rank] = messages
        if len(self.messages) < self.size:
            return [np.zeros(length, messages[0].dtype) for length in lengths]
        received = [self.messages[rank][self.rank] for rank in range(self.size)]
        assert [len(each) for each in received] == lengths
        return received


@pytest.mark.parametrize('counts', [(3, 3, 2), (8, 0), (1, 1), (0, 1, 0), (4, 4)])
def test_each_rank_adds_its_block(counts):
    tree, values = Tree(0, counts), noise(sum(counts), 10)
    whole, bounds = tree.reduced(values, np.add), [0, 3, 3, 10] if len(counts) == 3 else [0, 4, 10]
    blocks, mail = list(zip(bounds, bounds[1:])), Mail(len(counts))
    for _ in range(2):  # in the second round, all have sent their messages
        for rank, count in enumerate(counts):
            mail.rank, first = rank, tree.first(rank)
            nodes = merged(tree, leaves(values[first:first + count], first))
            block = add_over_ranks(mail, tree, nodes, blocks, np.dtype('float32'))
            if len(mail.messages) == len(counts):
                np.testing.assert_array_equal(block, whole[slice(*blocks[rank])])
