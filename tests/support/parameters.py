"""Parameters of tests of which most are slow."""
import pytest


def slow_but(quick, values):
    """Return values for `pytest.mark.parametrize`; the ones that are not among `quick` are slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


# For tests with the fixture `kind` that others run on a GPU as well.
SLOW_ON_GPU = pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
