"""Shares of a batch: each sample belongs to one replica of one rank, in one micro-batch."""
from theano_mgpu.plan.shares import Machine, Shares, micro_batch_rounds, ranges, sub_batch_sizes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

N = st.integers(1, 200)
FEW = st.integers(1, 9)


@examples(100)
@given(N, FEW, FEW)
def test_sizes(n, replicas, least):
    sizes = sub_batch_sizes(n, replicas, least)
    assert sum(sizes) == n and len(sizes) == max(1, min(n // least, replicas))
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= min(n, least) and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize('n,replicas', [(0, 1), (3, 0), (-1, 2)])
def test_sizes_of_nothing(n, replicas):
    with pytest.raises(ValueError, match='at least 1'):
        sub_batch_sizes(n, replicas)


@examples(100)
@given(N, FEW, FEW, FEW)
def test_rounds_cover_each_sample_once(n, replicas, micro_batches, least):
    rounds = micro_batch_rounds(n, replicas, micro_batches, least)
    spans = sorted(span for round_ in rounds for span in round_)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
    assert min(stop - start for start, stop in spans) >= min(n, least)
    assert len(rounds) <= micro_batches and all(len(later) <= len(rounds[0]) for later in rounds)
    of_replicas = ranges(sub_batch_sizes(n, replicas, least))
    for round_ in rounds:
        for (start, stop), (first, last) in zip(round_, of_replicas):
            assert first <= start < stop <= last


@examples(100)
@given(N, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_ranks_cover_each_sample_once(n, replicas, micro_batches):
    """Each rank computes its spans of a whole batch by itself."""
    shares = [Shares(Machine(rank, tuple(replicas)), micro_batches=micro_batches) for rank in range(len(replicas))]
    lengths = shares[0].lengths(n)
    assert sum(lengths) == n
    samples = []
    for of_rank, length in zip(shares, lengths):
        own = sorted(span for round_ in of_rank.rounds(n) for span in round_)
        assert sum(stop - start for start, stop in own) == length
        samples += [i for start, stop in own for i in range(start, stop)]
    assert samples == list(range(n))


@examples(100)
@given(N, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_a_rank_covers_its_own_samples_once(n, replicas, micro_batches):
    machine = Machine(len(replicas) - 1, tuple(replicas))
    rounds = Shares(machine, is_sharded=True, micro_batches=micro_batches).rounds(n)
    assert max(map(len, rounds)) <= replicas[-1]
    spans = sorted(span for round_ in rounds for span in round_)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
