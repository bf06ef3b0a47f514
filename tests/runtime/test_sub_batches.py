"""The number of samples of a batch."""
from theano_mgpu.errors import BatchError
from theano_mgpu.runtime.batches.sub_batches import batch_length

import pytest


def test_lengths_that_differ_name_the_input_and_the_remedy():
    with pytest.raises(BatchError) as caught:
        batch_length([8, 3], ['x', 'rates'])
    assert 'x has 8, rates has 3 samples' in str(caught.value) and 'broadcast=[rates]' in str(caught.value)


def test_an_empty_batch():
    with pytest.raises(BatchError, match='the batch is empty: x has 0 samples'):
        batch_length([0], ['x'])
