"""Sums in the memory of a context."""
from theano_mgpu.exchange.memory import Memories

import numpy as np
import pytest

gpuarray = pytest.importorskip('pygpu.gpuarray', reason='arrays on devices need pygpu')

SHAPES = (), (0, 3), (1,), (5, 7), (3, 1, 400)


@pytest.mark.cuda
@pytest.mark.parametrize('n', [2, 3, 5])
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_sums_have_the_same_bits_on_the_host_and_on_a_device(n, dtype, gpu2, cpu2):
    """Sums of three numbers of float16, added in float32 and rounded once, would differ."""
    rng, memories = np.random.RandomState(n), Memories()
    values = [[np.asarray(rng.randn(*shape) * 3, dtype) for shape in SHAPES] for _ in range(n)]
    context = memories[gpu2[0]].context
    there = [[gpuarray.array(each, dtype=dtype, context=context, order='F' if each.ndim > 1 else 'C') for each in part]
             for part in values]
    on_host = memories[cpu2[0]].add(values)
    for ours, theirs, *terms in zip(memories[gpu2[0]].add(there), on_host, *values):
        expected = terms[-1]
        for term in terms[-2::-1]:
            expected = np.add(term, expected)
        np.testing.assert_array_equal(np.asarray(ours), expected)
        np.testing.assert_array_equal(theirs, expected)
