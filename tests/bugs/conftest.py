"""Fixtures for several of these files."""
import pytest


@pytest.fixture
def enabled():
    """Return a function that enables all contexts for models of Keras; notes go to its report only."""
    from theano_mgpu.keras import disable, enable

    def start(**options):
        return enable(**dict({'tell': lambda text: None, 'always': True}, **options))
    yield start
    disable()
