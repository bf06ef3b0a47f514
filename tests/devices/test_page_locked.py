"""Page-locked memory on the host: CUDA devices copy to it while the host goes on."""
import cuda_on_cpu
import pytest
from support.standin import run

pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
pytestmark = [pytest.mark.needs_compiler, pytest.mark.skipif(cuda_on_cpu.unavailable() is not None,
                                                             reason=cuda_on_cpu.unavailable() or '')]

FETCHED = '''
import ctypes, gc
from pygpu import gpuarray
from theano_mgpu.devices import page_locked
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.comm.host_sum import describe
from theano_mgpu.exchange.layout import SMALL, Layout, blocks_of
from theano_mgpu.exchange.memory import Memories
contexts = mgpu.init('a->cuda0;b->cuda1')
sizes = SMALL, 3, 5
layout = Layout([((size,), np.dtype('f4')) for size in sizes])
blocks, fetchers = blocks_of(layout, %d), []
for context in contexts:
    here = layout.allocated(lambda shape, dtype: page_locked.zeros(shape, dtype, [context]))
    fetchers.append(Memories().fetcher(context, layout, blocks, here))
right, later, views = [], [], []
for number in range(20):
    there = [[gpuarray.array(np.full(size, 10 * number + i, 'f4'), context=gpu_context(context)) for size in sizes]
             for i, context in enumerate(contexts)]
    for view in views:
        view[...] = -1
    for fetcher, arrays in zip(fetchers, there):
        fetcher.start(arrays)
    later.append(any((view == -1).all() for view in views))
    for i in range(len(blocks)):
        for fetcher in fetchers:
            fetcher.arrive(i)
    host = [list(fetcher.here.views.values()) for fetcher in fetchers]
    right += [(array == 10 * number + i).all() for i, arrays in enumerate(host) for array in arrays]
    views = sum(map(list, host), [])
print(all(right), len(right), any(later))

array = page_locked.zeros((2, 3), 'float64', contexts[1:])
print(array.shape, array.dtype, (array == 0).all())
address, row = ctypes.c_void_p(array.ctypes.data), array[1:]
del array
gc.collect()
row[...] = 2
print((row == 2).all())
del row
gc.collect()
print('freed' if ctypes.CDLL('libcuda.so').cuMemFreeHost(address) else 'still there')
'''


@pytest.mark.slow_with('4096')
@pytest.mark.parametrize('block', [1 << 30, 4096])  # bytes: in order with what the devices compute, and beside it
def test_devices_copy_at_the_same_time_and_all_copies_are_waited_for(block):
    """Each operation of a device begins some time after its call. The memory lives as long as a view of it."""
    assert run(FETCHED % block, DELAY_US=3000) == ['True 120 True', '(2, 3) float64 True', 'True', 'freed']
