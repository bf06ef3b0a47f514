"""Requirements of the tests of the stand-in."""
import ctypes

import pytest

from cuda_on_cpu import unavailable


@pytest.fixture(scope='session', autouse=True)
def standin():
    """Skip where the stand-in cannot run."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope='session')
def protection_keys():
    """Skip where the processor or the kernel has no protection keys (PKU)."""
    libc = ctypes.CDLL(None)
    key = libc.pkey_alloc(0, 0) if hasattr(libc, 'pkey_alloc') else -1
    if key <= 0:
        pytest.skip('no protection keys (PKU), without which a device can touch the memory of another one')
    libc.pkey_free(key)
