"""The comparison of the figures that two runs of a script yield."""
import numpy as np

TOLERANCE = {'float16': 1e-2, 'float32': 1e-5, 'complex64': 1e-5}  # other dtypes: 1e-9


def assert_equal(one, other):
    """Check that figures are equal: arrays, numbers, texts, or lists, tuples and dicts of these."""
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each in zip(one, other):
            assert_equal(*each)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal(list(one.values()), list(other.values()))
    elif isinstance(one, (np.ndarray, np.generic, float)):
        assert np.shape(one) == np.shape(other) and np.asarray(one).dtype == np.asarray(other).dtype
        tolerance = TOLERANCE.get(str(np.asarray(one).dtype), 1e-9)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance / 1000)
    else:
        assert one == other
