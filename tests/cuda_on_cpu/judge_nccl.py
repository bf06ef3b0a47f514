"""Calls NVIDIA's own libnccl.so.2 as theano_mgpu does, as far as that goes without a GPU."""
import ctypes
import sys

from theano_mgpu.devices.nccl import FUNCTIONS
from theano_mgpu.devices.nccl_library import UniqueId, load
from theano_mgpu.errors import ExchangeError


def main(path):
    nccl = load(path)
    assert all(nccl.address(name) for name in FUNCTIONS)
    print('%s has all functions' % path)
    ctypes.CDLL('libcuda.so').cuInit(0)
    context = nccl.driver.primary_context('0000:01:00.0')
    one, other = nccl.unique_id(context), nccl.unique_id(context)
    assert len(one) == ctypes.sizeof(UniqueId) == 128 and one != other
    try:
        nccl.connect([context], 0, 1, one)
    except ExchangeError as error:
        print('  as it should be without a GPU: %s' % error)
    else:
        raise AssertionError('NCCL works on the stand-in for the driver')


if __name__ == '__main__':
    main(sys.argv[1])
