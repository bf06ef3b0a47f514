"""The comparison of values: digests, rounding, and texts about differences."""
from theano_mgpu.utils import values

import numpy as np
import pytest
from scipy import sparse

RANDOM = np.random.RandomState(3)


@pytest.mark.parametrize('one, other', [
    (np.zeros(3), -np.zeros(3)), (np.zeros(3), np.zeros(3, 'float32')), (np.zeros((3, 1)), np.zeros(3)),
    (np.random.RandomState(0), np.random.RandomState(1)),
    (sparse.csr_matrix(np.eye(3)), sparse.csr_matrix(np.eye(3)[::-1])), ([np.arange(3), None], [np.arange(3), 0])])
def test_values_that_digests_tell_apart(one, other):
    assert values.digest(one) == values.digest(one) != values.digest(other)


def test_a_sample_stands_for_a_large_array():
    large = RANDOM.rand(1000, 50)
    other = large.copy()
    other[1, 1] += 1
    assert values.sampled_checksum(large) == values.sampled_checksum(other)
    assert values.checksum(large) != values.checksum(other)
    assert values.sampled_checksum(large) != values.sampled_checksum(large + 1)


def test_when_steps_are_compared():
    assert [step for step in range(1, 41) if values.is_due(step, 10)] == [1, 2, 4, 8, 10, 20, 30, 40]
    assert [step for step in range(1, 5) if values.is_due(step, 1)] == [1, 2, 3, 4]


def test_what_is_wrong():
    assert values.wrong(np.ones(3) + 1e-4, np.ones(3), 1e-3, 0) == ''
    assert values.wrong(np.ones(3) + .25, np.ones(3), 1e-3, 0) == 'is wrong by up to 0.25'
    assert values.relative_difference(np.ones(3), np.ones(2)) == np.inf
    assert values.differing_bits(np.array([0., np.nan]), np.array([-0., np.nan])) == \
        '1 of 2 numbers, the first at [0]: 0.0 and -0.0'
    assert values.coarsest(['int64', 'float64', 'float32', None]) == 'float32' and values.coarsest([]) == 'float64'
