"""Arrays are copied from one device to another, whatever their layout, and in order with the devices' computations."""
import theano_mgpu as mgpu
from theano_mgpu.devices import cuda_contexts
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.devices.transfers import DeviceBuffers, copy_to
from theano_mgpu.runtime import compiler

import numpy as np
import pytest
import theano.tensor as T
from support.devices import context_map
from support.sending import Sender

LONG = 40000000  # steps of a loop that takes about 50 ms

# One work-item runs a loop that no compiler can leave out, and then fills an array.
FILL = '''#include "cluda.h"
KERNEL void fill_slowly(GLOBAL_MEM float *x, ga_size n, ga_size loops, ga_float value) {
    float sum = 0;
    if (GID_0 == 0 && LID_0 == 0) {
        for (ga_size i = 0; i < loops; ++i) sum += (float)(i * 7 % 13) * 1e-30f;
        for (ga_size i = 0; i < n; ++i) x[i] = sum > 1e20f ? 0 : value;
    }
}'''


class Filler:
    """A function that fills arrays on their devices, slowly if need be; a call does not wait for the device."""

    def __init__(self):
        self._kernels = {}

    def __call__(self, array, value, loops=1):
        from pygpu.gpuarray import SIZE, GpuArray, GpuKernel
        context = array.context
        if context.ptr not in self._kernels:
            self._kernels[context.ptr] = GpuKernel(FILL, 'fill_slowly', [GpuArray, SIZE, SIZE, 'float32'],
                                                   context=context)
        self._kernels[context.ptr](array, np.uint64(array.size), np.uint64(loops), np.float32(value), gs=1, ls=1)


@pytest.fixture
def fill(gpu2):
    """Return a Filler whose kernels are compiled for both devices."""
    filler = Filler()
    for context in gpu2:
        warm = on_device(context, np.zeros(4, 'f4'))
        filler(warm, 1)
        warm.sync()
    return filler


def on_device(context, value):
    from pygpu import gpuarray
    return gpuarray.array(value, dtype=value.dtype, context=gpu_context(context))


def check(copy, expected, context):
    assert copy.context.ptr == gpu_context(context).ptr
    assert copy.flags.c_contiguous and copy.dtype == expected.dtype and copy.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(copy), expected)


DTYPES = ['float16', 'float32', 'float64', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64',
          'bool']


@pytest.mark.cuda
def test_arrays_of_every_dtype_are_copied(gpu2):
    for dtype in DTYPES:
        values = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
        source = on_device(gpu2[0], values)
        check(copy_to(gpu2[1], source), values, gpu2[1])
        if dtype in ('float16', 'float64', 'int64', 'bool'):  # each takes a kernel of its own
            check(copy_to(gpu2[1], source.T), values.T, gpu2[1])


@pytest.mark.cuda
def test_arrays_of_every_layout_are_copied(gpu2):
    values = np.arange(24, dtype='float32').reshape(2, 3, 4)
    source = on_device(gpu2[0], values)
    for view in (lambda x: x, lambda x: x[1], lambda x: x[:, 1:], lambda x: x[..., ::2], lambda x: x[::-1],
                 lambda x: x.transpose(2, 1, 0), lambda x: x.transpose(1, 0, 2), lambda x: x[:0], lambda x: x[:, :0],
                 lambda x: x[1, 2, 3:4].reshape(())):
        check(copy_to(gpu2[1], view(source)), view(values), gpu2[1])
    check(copy_to(gpu2[1], on_device(gpu2[0], np.zeros((0, 3), 'f4'))), np.zeros((0, 3), 'f4'), gpu2[1])
    np.testing.assert_array_equal(np.asarray(source), values)


@pytest.mark.cuda
def test_an_array_that_is_there_is_not_copied(gpu2):
    source = on_device(gpu2[0], np.ones((2, 3), 'float32'))
    assert copy_to(gpu2[0], source) is source and copy_to(gpu2[0], source.T).strides == source.T.strides
    number = np.float32(1)
    assert copy_to(gpu2[0], number) is number


@pytest.mark.cuda
def test_a_cpu_context_has_the_array_on_the_host(gpu2):
    from theano_mgpu.devices.context_map import parse_context_map
    host = parse_context_map('host->cpu')[0]
    values = np.arange(6, dtype='float32').reshape(2, 3)
    source = on_device(gpu2[0], values)
    for given, expected in ((source, values), (source.T, values.T), (source[1, 2], values[1, 2])):
        fetched = copy_to(host, given)
        assert isinstance(fetched, np.ndarray) and fetched.flags.c_contiguous and fetched.shape == expected.shape
        np.testing.assert_array_equal(fetched, expected)


@pytest.mark.cuda
def test_a_copy_waits_for_what_computes_the_source(gpu2, fill):
    """libgpuarray alone did not wait, with the one CUDA stream that Theano has by default."""
    source = on_device(gpu2[0], np.zeros(1000, 'float32'))
    for value in (1, 2):
        fill(source, value, LONG)
        check(copy_to(gpu2[1], source), np.full(1000, value, 'float32'), gpu2[1])
    fill(source, 3, LONG)
    check(copy_to(gpu2[1], source[::2]), np.full(500, 3, 'float32'), gpu2[1])


@pytest.mark.cuda
def test_the_source_may_change_and_go_while_the_destination_is_busy(gpu2, fill):
    """A copy that begins late still has the values that the source had at the time of the call."""
    busy = on_device(gpu2[1], np.zeros(1000, 'float32'))
    source = on_device(gpu2[0], np.full(1000, 1, 'float32'))
    fill(busy, 1, LONG)
    first = copy_to(gpu2[1], source)
    fill(source, 2)
    fill(busy, 1, LONG)
    second = copy_to(gpu2[1], source)
    del source
    others = [on_device(gpu2[0], np.full(1000, 9, 'float32')) for _ in range(4)]  # in the memory of the source
    for other in others:
        fill(other, 8)
    check(first, np.full(1000, 1, 'float32'), gpu2[1])
    check(second, np.full(1000, 2, 'float32'), gpu2[1])


@pytest.mark.cuda
def test_memory_of_a_copy_is_that_of_no_other(gpu2):
    source = on_device(gpu2[0], np.ones(5, 'float32'))
    one, two = copy_to(gpu2[1], source), copy_to(gpu2[1], source)
    one[:] = np.float32(7)
    check(two, np.ones(5, 'float32'), gpu2[1])
    check(copy_to(gpu2[0], one), np.full(5, 7, 'float32'), gpu2[0])
    check(source, np.ones(5, 'float32'), gpu2[0])


@pytest.mark.cuda
def test_a_function_takes_what_another_device_has_computed(gpu2):
    x, y = T.fmatrix('x'), T.fmatrix('y')
    first = compiler.compile_for(gpu2[0], [x], [(x * 2).T], {}, {})
    second = compiler.compile_for(gpu2[1], [y], [y + 1], {}, {})
    to_first, to_second = Sender(first), Sender(second)
    for n in (3, 3, 4):
        values = np.arange(2 * n, dtype='float32').reshape(2, n)
        moved = to_second.send(first(*to_first.send([values])))
        check(moved[0], values.T * 2, gpu2[1])
        np.testing.assert_array_equal(np.asarray(second(*moved)[0]), values.T * 2 + 1)
        np.testing.assert_array_equal(np.asarray(second(*to_second.send([values]))[0]), values + 1)


@pytest.mark.opencl
@pytest.mark.cuda
def test_contexts_of_one_device(contexts):
    device = context_map('gpu', 1).split('->')[1]
    one, two = mgpu.init('same0->%s;same1->%s' % (device, device))
    values = np.arange(6, dtype='float32').reshape(2, 3)
    check(DeviceBuffers(two).send('key', on_device(one, values)), values, two)
    check(copy_to(two, on_device(one, values).T), values.T, two)


@pytest.mark.cuda
def test_copies_leave_no_context_current(gpu2):
    source = on_device(gpu2[0], np.ones((2, 3), 'float32'))
    if source.context.kind != b'cuda':
        pytest.skip('only CUDA has current contexts')
    back = copy_to(gpu2[0], copy_to(gpu2[1], source.T))
    assert [cuda_contexts.entries(gpu_context(context)) for context in gpu2] == [0, 0]
    check(back, np.ones((3, 2), 'float32'), gpu2[0])
