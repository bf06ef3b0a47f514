"""The rules of the driver that the stand-in keeps: order, events, errors, memory."""
import ctypes
import os
import signal
import threading
import time

import numpy as np

from cuda_on_cpu.child import on_standin, run
from cuda_on_cpu.driver import (
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    LAUNCH_FAILED,
    NOT_INITIALIZED,
    NOT_READY,
    OUT_OF_MEMORY,
    Calls,
    Device,
    Hold,
    call,
    calls,
    fails_with,
    load,
    out,
)


def names_of_devices():
    names = []
    for ordinal in range(out(ctypes.c_int, 'cuDeviceGetCount').value):
        name = ctypes.create_string_buffer(256)
        call('cuDeviceGetName', name, 256, ordinal)
        names.append(name.value.decode())
    return names


# Order of operations

@on_standin()
def test_a_launch_returns_at_once_and_an_event_orders_two_devices():
    first, second = Device(0), Device(1)
    source, target = first.allocate(4), second.allocate(4)
    hold = Hold(first, source)  # returns, although the kernel runs
    event = first.out(ctypes.c_void_p, 'cuEventCreate', 2)
    call('cuCtxPushCurrent_v2', first.context)
    call('cuEventRecord', event, first.stream)
    with fails_with(NOT_READY):
        call('cuEventQuery', event)
    second.call('cuStreamWaitEvent', second.stream, event, 0)
    second.call('cuMemcpyPeerAsync', target, second.context, source, first.context, ctypes.c_size_t(4), second.stream)
    hold.release()
    assert second.read(target, 1)[0] == 42
    call('cuEventQuery', event)


@on_standin()
def test_without_an_event_a_copy_does_not_wait_for_another_device():
    first, second = Device(0), Device(1)
    source, target = first.allocate(4), second.allocate(4)
    hold = Hold(first, source)
    second.call('cuMemcpyPeerAsync', target, second.context, source, first.context, ctypes.c_size_t(4), second.stream)
    assert np.isnan(second.read(target, 1)[0])  # new memory is filled with NaN
    hold.release()


@on_standin()
def test_the_null_stream_waits_for_the_other_streams():
    device = Device(0)
    address, value = device.allocate(4), np.zeros(1, 'float32')
    hold = Hold(device, address)
    threading.Timer(.1, hold.release).start()
    device.call('cuMemcpyDtoH_v2', value.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(4))
    assert value[0] == 42


@on_standin()
def test_a_free_waits_for_a_stream_that_is_destroyed():
    device = Device(0)
    address = device.allocate(4)
    hold = Hold(device, address)
    device.call('cuStreamDestroy_v2', device.stream)
    threading.Timer(.1, hold.release).start()
    device.free(address)
    assert hold.flag.value == 1
    device.call('cuCtxSynchronize')  # the kernel has not touched freed memory


@on_standin(sync=1)
def test_sync_makes_a_launch_wait():
    device = Device(0)
    address = device.allocate(4)
    pinned = device.out(ctypes.c_void_p, 'cuMemAllocHost_v2', ctypes.c_size_t(4))
    flag = ctypes.c_int.from_address(pinned.value)
    timer = threading.Timer(.1, lambda: setattr(flag, 'value', 1))
    timer.start()
    device.launch(device.kernel('hold'), 1, pinned, address)
    assert flag.value == 1


@on_standin(delay_us=100, seed=7)
def test_random_delays_keep_the_order_of_a_stream():
    device = Device(0)
    values = np.arange(20, dtype='float32')
    total, source = device.allocate(4), device.upload(np.ones(64, 'float32'))
    for value in values:
        address = device.upload(np.full(64, value, 'float32'))
        device.call('cuMemcpyDtoDAsync_v2', source, address, ctypes.c_size_t(256), device.stream)
        device.launch(device.kernel('block_sum'), 64, total, source, shared=256)
        assert device.read(total, 1)[0] == 64 * value


# What a host does

@on_standin()
def test_calls_are_counted_from_the_last_time():
    first, second = Device(0), Device(1)
    assert calls(0) == calls(1) == Calls(0, 0, 0, 0, 0, 0, 0)
    source, target, poke = first.upload(np.ones(4, 'float32')), second.allocate(16), first.kernel('poke')
    for _ in range(3):
        first.launch(poke, 1, source, ctypes.c_long(0))
    first.call('cuMemcpyDtoDAsync_v2', source, source, ctypes.c_size_t(4), first.stream)
    second.call('cuMemcpyPeerAsync', target, second.context, source, first.context, ctypes.c_size_t(4), second.stream)
    first.read(source, 4)
    assert calls(0) == Calls(3, 0, 0, to_device=1, to_host=1, on_device=1, between_devices=0)
    assert calls(1) == Calls(0, 0, 0, 0, 0, 0, between_devices=1)
    assert calls(0) == Calls(0, 0, 0, 0, 0, 0, 0)


@on_standin(launch_us=20000)
def test_a_launch_takes_time_of_its_caller():
    device = Device(0)
    address, poke = device.allocate(4), device.kernel('poke')
    began = time.monotonic()
    for _ in range(2):
        device.launch(poke, 1, address, ctypes.c_long(0))
    assert time.monotonic() - began >= .04


# Handles and contexts

@on_standin()
def test_events_and_kernels_belong_to_a_context():
    first, second = Device(0), Device(1)
    event, poke = first.out(ctypes.c_void_p, 'cuEventCreate', 2), first.kernel('poke')
    with fails_with(INVALID_HANDLE):
        first.call('cuEventRecord', event, second.stream)
    with fails_with(INVALID_HANDLE):
        second.launch(poke, 1, second.allocate(4), ctypes.c_long(0))


@on_standin()
def test_a_destroyed_stream_is_found():
    device = Device(0)
    device.call('cuStreamDestroy_v2', device.stream)
    with fails_with(INVALID_HANDLE):
        device.synchronize()


@on_standin()
def test_nothing_works_after_fork():
    device = Device(0)
    child = os.fork()
    if child == 0:
        cuda, address = load('cuda'), ctypes.c_uint64()
        codes = {cuda.cuInit(0), cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4))}
        os._exit(0 if codes == {NOT_INITIALIZED} else 1)
    assert os.waitpid(child, 0)[1] == 0
    device.allocate(4)


# Kernels

@on_standin()
def test_threads_of_a_block_meet_at_barriers():
    device = Device(0)
    values = np.arange(256, dtype='float32')
    result, source = device.allocate(64), device.upload(values)
    device.launch(device.kernel('block_sum'), 256, result, source, shared=1024)
    assert device.read(result, 1)[0] == values.sum()
    device.launch(device.kernel('warp_sum'), 64, result)
    assert list(device.read(result, 3)) == [sum(range(32)), sum(range(32, 64)), 11]


def last_thread():
    device = Device(0)
    result = device.allocate(4)
    device.launch(device.kernel('last_thread'), 64, result)
    print(int(device.read(result, 1)[0]))


def test_the_order_of_threads_is_a_setting():
    assert int(run(last_thread).stdout) == 63
    assert int(run(last_thread, order='reverse').stdout) == 0
    shuffled = {int(run(last_thread, order='shuffle', seed=2).stdout) for _ in range(2)}
    assert len(shuffled) == 1 and not shuffled & {0, 63}


# Memory

@on_standin(memory='64M')
def test_memory_has_a_limit():
    device = Device(0)
    address = device.allocate(60 << 20)
    for nbytes in (8 << 20, 1 << 63):
        with fails_with(OUT_OF_MEMORY):
            device.allocate(nbytes)
    device.free(address)
    device.allocate(8 << 20)


@on_standin()
def test_the_peak_of_memory_counts_from_the_last_call():
    def peaks():
        return [out(ctypes.c_size_t, 'cudaOnCpuPeakMemory', ordinal).value for ordinal in (0, 1)]
    device = Device(0)
    peaks()
    before, other = peaks()
    address = device.allocate(60 << 20)
    assert peaks() == [before + (60 << 20), other]
    device.allocate(1 << 20)
    device.free(address)
    assert peaks() == [before + (61 << 20), other]
    assert peaks() == [before + (1 << 20), other]


@on_standin()
def test_a_write_after_the_end_is_a_sticky_error():
    device = Device(0)
    address, poke = device.allocate(256), device.kernel('poke')
    device.launch(poke, 1, address, ctypes.c_long(63))
    device.synchronize()
    device.launch(poke, 1, address, ctypes.c_long(64))
    with fails_with(ILLEGAL_ADDRESS):
        device.synchronize()
    with fails_with(ILLEGAL_ADDRESS):
        device.allocate(4)


@on_standin(guard=False)
def test_without_guard_a_write_after_the_end_is_not_found():
    device = Device(0)
    address = device.allocate(256)
    device.launch(device.kernel('poke'), 1, address, ctypes.c_long(64))
    device.synchronize()


@on_standin()
def test_a_kernel_cannot_use_freed_memory():
    device = Device(0)
    address, poke = device.allocate(4096), device.kernel('poke')
    device.free(address)
    device.launch(poke, 1, address, ctypes.c_long(0))
    with fails_with(ILLEGAL_ADDRESS):
        device.synchronize()


@on_standin()
def test_an_argument_of_another_device_is_an_error_of_the_first():
    first, second = Device(0), Device(1)
    first.launch(first.kernel('poke'), 1, second.allocate(4), ctypes.c_long(0))
    with fails_with(ILLEGAL_ADDRESS):
        first.synchronize()
    second.synchronize()


def poke_through_an_index():
    first, second = Device(0), Device(1)
    mine, other = first.allocate(4096), second.allocate(4096)
    first.launch(first.kernel('poke'), 1, mine, ctypes.c_long((other.value - mine.value) // 4))
    first.synchronize()


def test_a_kernel_cannot_touch_another_device_through_an_index(protection_keys):
    done = run(poke_through_an_index)
    assert done.returncode == 1 and 'another device\'s memory' in done.stderr, done.stderr


def read_on_the_host():
    ctypes.string_at(Device(0).allocate(64).value, 4)


def test_the_host_cannot_touch_memory_of_a_device(protection_keys):
    done = run(read_on_the_host)
    assert done.returncode == -signal.SIGSEGV and 'memory of device 0' in done.stderr, done.stderr


def test_without_protection_keys_the_rest_works():
    for function in (poke_through_an_index, read_on_the_host):
        done = run(function, pkeys=False)
        assert done.returncode == 0, done.stderr


def allocate_on_17_devices():
    for ordinal in range(17):
        Device(ordinal).allocate(4)


def test_a_lack_of_protection_keys_is_reported_once():
    done = run(allocate_on_17_devices, devices=17)  # there are 15 keys, or none
    assert done.returncode == 0 and done.stderr.count('has no protection key') == 1, done.stderr
    assert not run(allocate_on_17_devices, devices=17, quiet=1).stderr


@on_standin()
def test_a_division_by_zero_does_not_end_the_process():
    device = Device(0)
    device.launch(device.kernel('divide'), 1, device.allocate(4), ctypes.c_int(0))
    with fails_with(LAUNCH_FAILED):
        device.synchronize()


# The list of devices

def print_names():
    print(names_of_devices())


def test_names_of_devices():
    assert run(print_names, 3).stdout == str(['CPU stand-in'] * 3) + '\n'
    assert run(print_names, 3, names='Fast GPU;;Slow GPU').stdout == "['Fast GPU', 'CPU stand-in', 'Slow GPU']\n"


@on_standin(devices=3, cc='12.1', version=12080)
def test_number_capability_and_version():
    assert out(ctypes.c_int, 'cuDeviceGetCount').value == 3
    attributes = [out(ctypes.c_int, 'cuDeviceGetAttribute', attribute, 0).value for attribute in (75, 76)]
    assert attributes == [12, 1]
    assert out(ctypes.c_int, 'cuDriverGetVersion').value == 12080
