"""Shares of a batch: each sample belongs to one replica of one rank, in one micro-batch."""
from theano_mgpu.errors import ContextError
from theano_mgpu.plan.shares import (
    Machine,
    Shares,
    equal_sizes,
    ranges,
    weighted_sizes,
    weights_for,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

N = st.integers(1, 200)
FEW = st.integers(1, 9)


@examples(100)
@given(N, FEW, FEW)
def test_sizes(n, replicas, least):
    sizes = equal_sizes(n, replicas, least)
    assert sum(sizes) == n and len(sizes) == max(1, min(n // least, replicas))
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= min(n, least) and sizes == sorted(sizes, reverse=True)


@examples(100)
@given(N, FEW, FEW, FEW)
def test_rounds_cover_each_sample_once(n, replicas, micro_batches, least):
    shares = Shares(Machine(replicas=(replicas,)), micro_batches=micro_batches, least_samples=least)
    rounds, of_replicas = shares.rounds(n), ranges(shares.sizes([n]))
    spans = sorted(span for round_ in rounds for _, span in round_)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
    assert min(stop - start for start, stop in spans) >= min(n, least)
    assert len(rounds) <= micro_batches and all(len(later) <= len(rounds[0]) for later in rounds)
    for round_ in rounds:
        for replica, (start, stop) in round_:
            assert of_replicas[replica][0] <= start < stop <= of_replicas[replica][1]


WEIGHTS = st.lists(st.integers(0, 9) | st.integers(100, 1000), min_size=1, max_size=6).filter(any)


@pytest.mark.slow
@examples(300)
@given(N, WEIGHTS, FEW)
def test_sizes_by_weights(n, weights, least):
    sizes = weighted_sizes(n, weights, least)
    assert sum(sizes) == n and len(sizes) == len(weights)
    assert all(not size or weight and size >= min(n, least) for size, weight in zip(sizes, weights))
    assert sum(map(bool, sizes)) == min(sum(map(bool, weights)), max(1, n // least))
    total = sum(weights)
    if all(n * weight >= least * total for weight in weights if weight):
        assert all(abs(size - n * weight / total) < 1 for size, weight in zip(sizes, weights))
    assert all(a >= b for a, v in zip(sizes, weights) for b, w in zip(sizes, weights) if v > w)


def test_equal_weights_are_equal_shares():
    for n in range(1, 30):
        assert weighted_sizes(n, [5, 5, 5]) == Shares(Machine(replicas=(3,))).sizes([n])


@pytest.mark.parametrize('flag,weights', [('auto', ()), ('equal', ()), ('3:1', (3, 1))])
def test_weights_of_the_flag(flag, weights):
    assert weights_for(flag, Machine(replicas=(1, 1))) == weights
    assert weights_for(flag, Machine()) == ()


def test_a_flag_with_another_number_of_weights_is_an_error():
    with pytest.raises(ContextError, match='mgpu.shares=7:2:1 has 3 numbers, .* among 2 contexts: give one number'):
        weights_for('7:2:1', Machine(replicas=(2,)))


@examples(100)
@given(N, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.randoms())
def test_ranks_cover_each_sample_once(n, replicas, micro_batches, random):
    """Each rank computes its spans of a whole batch by itself."""
    weights = random.choice([(), tuple(random.randint(1, 9) for _ in range(sum(replicas)))])
    shares = [Shares(Machine(rank, tuple(replicas)), micro_batches=micro_batches, weights=weights)
              for rank in range(len(replicas))]
    lengths = shares[0].lengths(n)
    assert sum(lengths) == n
    samples = []
    for of_rank, length in zip(shares, lengths):
        own = sorted(span for round_ in of_rank.rounds(n) for _, span in round_)
        assert sum(stop - start for start, stop in own) == length
        samples += [i for start, stop in own for i in range(start, stop)]
    assert samples == list(range(n))


@examples(100)
@given(N, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_a_rank_covers_its_own_samples_once(n, replicas, micro_batches):
    machine = Machine(len(replicas) - 1, tuple(replicas))
    rounds = Shares(machine, is_sharded=True, micro_batches=micro_batches).rounds(n)
    assert max(map(len, rounds)) <= replicas[-1]
    spans = sorted(span for round_ in rounds for _, span in round_)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
