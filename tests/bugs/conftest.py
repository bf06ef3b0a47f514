"""What several files of these tests share."""
import pytest


@pytest.fixture
def enabled():
    """A function that enables all contexts for Keras's models; texts for the user go into its report alone."""
    from theano_mgpu.keras import disable, enable

    def start(**options):
        return enable(**dict({'tell': lambda text: None}, **options))
    yield start
    disable()
