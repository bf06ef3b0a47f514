"""Splitting a batch and putting its results together."""
from theano_mgpu.errors import BatchError
from theano_mgpu.plan.shares import micro_batch_rounds, ranges, sub_batch_sizes
from theano_mgpu.runtime.batches.sub_batches import batch_length

import pytest


@pytest.mark.parametrize('n', range(1, 30))
@pytest.mark.parametrize('replicas', [1, 2, 3, 8])
def test_sizes(n, replicas):
    sizes = sub_batch_sizes(n, replicas)
    assert sum(sizes) == n and len(sizes) == min(n, replicas)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize('n,replicas', [(0, 1), (3, 0), (-1, 2)])
def test_sizes_of_nothing(n, replicas):
    with pytest.raises(ValueError, match='at least 1'):
        sub_batch_sizes(n, replicas)


@pytest.mark.parametrize('n,replicas,slices', [(10, 2, 3), (7, 3, 2), (1, 4, 5), (9, 4, 100), (100, 3, 7)])
def test_rounds_cover_each_sample_once(n, replicas, slices):
    rounds = micro_batch_rounds(n, replicas, slices)
    spans = sorted(span for round_ in rounds for span in round_)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
    assert len(rounds) <= slices and all(len(later) <= len(rounds[0]) for later in rounds)
    of_replicas = ranges(sub_batch_sizes(n, replicas))
    for round_ in rounds:
        for (start, stop), (first, last) in zip(round_, of_replicas):
            assert first <= start < stop <= last


def test_lengths_that_differ_name_the_input_and_the_remedy():
    with pytest.raises(BatchError) as caught:
        batch_length([8, 3], ['x', 'rates'])
    assert 'x has 8, rates has 3 samples' in str(caught.value) and 'broadcast=[rates]' in str(caught.value)


def test_an_empty_batch():
    with pytest.raises(BatchError, match='the batch is empty: x has 0 samples'):
        batch_length([0], ['x'])
