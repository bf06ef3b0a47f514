"""The rules of the driver that the stand-in keeps: order, events, errors, memory."""
import ctypes
import functools
import os
import signal
import threading
import time

import numpy as np
import pytest

from cuda_on_cpu.child import clean_environment, on_standin, run
from cuda_on_cpu.driver import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    KERNELS,
    LAUNCH_FAILED,
    NOT_INITIALIZED,
    NOT_READY,
    OUT_OF_MEMORY,
    PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED,
    PEER_ACCESS_UNSUPPORTED,
    Calls,
    CudaError,
    Device,
    Hold,
    call,
    calls,
    compile_source,
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


# What waits

def pinned(device, nbytes=4):
    return device.out(ctypes.c_void_p, 'cuMemAllocHost_v2', ctypes.c_size_t(nbytes))


def waits_for(hold, call, *arguments):
    """Return whether a call ends only after a kernel that the host holds."""
    hold.flag.value = 0
    threading.Timer(.1, hold.release).start()
    call(*arguments)
    return hold.flag.value == 1


def waits_of_frees():
    """Print which calls of device 0 wait for a kernel of device 1."""
    first, second = Device(0), Device(1)
    memory, locked = first.allocate(4), pinned(first)
    module = first.out(ctypes.c_void_p, 'cuModuleLoadData', compile_source(KERNELS))
    if out(ctypes.c_int, 'cuDeviceCanAccessPeer', 0, 1).value:
        first.call('cuCtxEnablePeerAccess', second.context, 0)
    address = second.allocate(4)
    for name, *arguments in (('cuMemFree_v2', memory), ('cuMemFreeHost', locked), ('cuModuleUnload', module),
                             ('cuMemAllocHost_v2', ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4))):
        print(int(waits_for(Hold(second, address), first.call, name, *arguments)), end='')


@pytest.mark.slow
def test_a_free_waits_for_the_peers_of_a_device():
    assert run(waits_of_frees).stdout == '0000'
    assert run(waits_of_frees, peer='all').stdout == '1111'
    assert run(waits_of_frees, peer='all', strict_free=0).stdout == '0000'


@on_standin()
def test_a_launch_waits_for_a_free_of_another_device():
    first, second = Device(0), Device(1)
    memory, target, poke = first.allocate(4), second.allocate(4), second.kernel('poke')
    hold = Hold(first, first.allocate(4))
    frees = threading.Thread(target=first.free, args=(memory,))
    frees.start()
    time.sleep(.1)  # it waits for the kernel by now
    launches = threading.Thread(target=second.launch, args=(poke, 1, target, ctypes.c_long(0)))
    launches.start()
    launches.join(.3)
    assert launches.is_alive() and frees.is_alive()
    hold.release()
    launches.join()
    assert second.read(target, 1)[0] == 1


@on_standin()
def test_a_large_copy_from_pageable_memory_waits_for_its_stream():
    device = Device(0)
    address, locked = device.allocate(4), pinned(device, 1 << 17)
    target = device.allocate(1 << 17)
    hold = Hold(device, address)
    for source, size in ((np.empty(1 << 16, 'int8').ctypes.data, 1 << 16), (locked.value, 1 << 17)):
        device.call('cuMemcpyHtoDAsync_v2', target, ctypes.c_void_p(source), ctypes.c_size_t(size), device.stream)
    assert waits_for(hold, device.upload, np.empty(1 << 17, 'int8'))


@on_standin(pageable_rate=10, copy_rate=1000000)
def test_copies_of_pageable_memory_have_a_rate_of_their_own():
    device, values = Device(0), np.zeros(200000, 'int8')
    began = time.monotonic()
    address = device.upload(values)
    assert time.monotonic() - began >= .02
    began = time.monotonic()
    device.read(address, 200000, 'int8')
    assert time.monotonic() - began >= .02


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


# Access to other devices

def copied(first, second, values):
    """Return values that were sent to the first device, and copied to the second one."""
    source, target = first.upload(values), second.allocate(values.nbytes)
    first.synchronize()
    second.call('cuMemcpyPeerAsync', target, second.context, source, first.context, ctypes.c_size_t(values.nbytes),
                second.stream)
    return second.read(target, len(values))


@on_standin(staged_rate=10)
def test_without_peer_access_a_copy_is_staged():
    first, second = Device(0), Device(1)
    assert out(ctypes.c_int, 'cuDeviceCanAccessPeer', 0, 1).value == 0
    with fails_with(PEER_ACCESS_UNSUPPORTED):
        second.call('cuCtxEnablePeerAccess', first.context, 0)
    values, began = np.arange(50000, dtype='float32'), time.monotonic()
    assert (copied(first, second, values) == values).all()
    assert time.monotonic() - began >= .02


@on_standin(peer='all')
def test_a_kernel_touches_the_memory_of_a_peer():
    first, second = Device(0), Device(1)
    assert out(ctypes.c_int, 'cuDeviceCanAccessPeer', 0, 1).value == 1
    assert out(ctypes.c_int, 'cuDeviceCanAccessPeer', 0, 0).value == 0
    first.call('cuCtxEnablePeerAccess', second.context, 0)
    with fails_with(PEER_ACCESS_ALREADY_ENABLED):
        first.call('cuCtxEnablePeerAccess', second.context, 0)
    address, mine, poke = second.allocate(4), first.allocate(4), first.kernel('poke')
    first.launch(poke, 1, address, ctypes.c_long(0))
    first.synchronize()
    assert second.read(address, 1)[0] == 1
    first.call('cuCtxDisablePeerAccess', second.context)
    with fails_with(PEER_ACCESS_NOT_ENABLED):
        first.call('cuCtxDisablePeerAccess', second.context)
    second.launch(second.kernel('poke'), 1, mine, ctypes.c_long(0))  # access has one direction
    with fails_with(ILLEGAL_ADDRESS):
        second.synchronize()
    first.launch(poke, 1, address, ctypes.c_long(0))
    with fails_with(ILLEGAL_ADDRESS):
        first.synchronize()


@on_standin(peer='broken')
def test_a_broken_path_between_peers_gives_wrong_bytes():
    first, second = Device(0), Device(1)
    values = np.arange(50000, dtype='float32')
    assert (copied(first, second, values) == values).all()  # staged
    second.call('cuCtxEnablePeerAccess', first.context, 0)
    assert (copied(first, second, values) != values).any()
    second.call('cuCtxDisablePeerAccess', first.context)
    assert (copied(first, second, values) == values).all()


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


@on_standin(devices=3, cc='7.5;9.0', memory='64M;;128M', sms='10')
def test_devices_differ():
    found = [[out(ctypes.c_int, 'cuDeviceGetAttribute', attribute, i).value for attribute in (75, 76, 16)]
             for i in range(3)]
    assert found == [[7, 5, 10], [9, 0, 10], [7, 0, 10]]
    assert [out(ctypes.c_size_t, 'cuDeviceTotalMem_v2', i).value >> 20 for i in range(3)] == [64, 2048, 128]


def print_buses_and_numbers():
    for i in range(out(ctypes.c_int, 'cuDeviceGetCount').value):
        bus, uuids = ctypes.create_string_buffer(32), [ctypes.create_string_buffer(16) for _ in range(2)]
        call('cuDeviceGetPCIBusId', bus, 32, i)
        for name, uuid in zip(('cuDeviceGetUuid', 'cuDeviceGetUuid_v2'), uuids):
            call(name, uuid, i)
        print(bus.value[5:7].decode(), *(uuid.raw.hex().strip('0') for uuid in uuids))


def test_devices_are_chosen_by_uuid():
    def chosen(devices):
        base = dict(clean_environment(), CUDA_VISIBLE_DEVICES=devices)
        return run(print_buses_and_numbers, 4, base=base, buses='5;;9;9', slices='0;0;1;1').stdout.splitlines()
    card, first, second = ('%s-000000%02d-0000-0000-0000-0000000000%02d' % each
                           for each in (('GPU', 5, 0), ('MIG', 9, 3), ('MIG', 9, 4)))
    assert chosen('%s,1,%s' % (second, card)) == ['09 9 900000000000000000000000' + '4', '02 2 2', '05 5 5']
    assert chosen('GPU-00000005, ' + first) == ['05 5 5', '09 9 900000000000000000000000' + '3']
    assert chosen('GPU-00000005,MIG-00000009,1') == ['05 5 5']  # the beginning of two: nothing after it


# Graphs

def captured(device, *work, mode=1):
    """Return a graph of calls on a device's stream, which are captured instead of run."""
    device.call('cuStreamBeginCapture_v2', device.stream, mode)
    for each in work:
        each()
    graph = ctypes.c_void_p()
    call('cuStreamEndCapture', device.stream, ctypes.byref(graph))
    executable = device.out(ctypes.c_void_p, 'cuGraphInstantiateWithFlags', graph, ctypes.c_ulonglong(0))
    call('cuGraphDestroy', graph)
    return executable


@on_standin(delay_us=300)
def test_a_graph_runs_at_each_launch():
    device = Device(0)
    poke = device.kernel('poke')
    array = device.upload(np.zeros(4, 'float32'))
    pinned = device.out(ctypes.c_void_p, 'cuMemAllocHost_v2', ctypes.c_size_t(8))
    numbers = np.frombuffer((ctypes.c_char * 8).from_address(pinned.value), 'float32')
    numbers[:] = 7, 8
    graph = captured(device, lambda: device.launch(poke, 1, array, ctypes.c_long(3)),
                     lambda: device.call('cuMemcpyHtoDAsync_v2', array, pinned, ctypes.c_size_t(8), device.stream))
    assert device.read(array, 4).tolist() == [0, 0, 0, 0]
    calls()
    for first in 1, 2:
        numbers[0] = first  # read at the launch
        device.call('cuGraphLaunch', graph, device.stream)
        assert device.read(array, 4).tolist() == [first, 8, 0, 1]
    assert calls()[:4] == (0, 0, 2, 0)
    device.call('cuGraphExecDestroy', graph)
    with fails_with(INVALID_HANDLE):
        device.call('cuGraphLaunch', graph, device.stream)


@on_standin()
def test_a_capture_refuses_calls_that_wait_or_change_memory():
    device, results = Device(0), []
    event = device.out(ctypes.c_void_p, 'cuEventCreate', 2)
    array = device.allocate(4)
    for refused in (lambda: device.allocate(4), lambda: device.free(array), device.synchronize,
                    lambda: device.call('cuEventQuery', event), lambda: device.call('cuCtxSynchronize')):
        with fails_with(CAPTURE_INVALIDATED):
            captured(device, functools.partial(check_refused, refused))
    # In another thread they are not refused, unless the capture is global.
    def allocate():
        try:
            device.allocate(4)
        except CudaError as error:
            results.append(error.code)

    def in_a_thread():
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    captured(device, in_a_thread)
    with fails_with(CAPTURE_INVALIDATED):
        captured(device, in_a_thread, mode=0)
    assert results == [CAPTURE_UNSUPPORTED]


def check_refused(function):
    with fails_with(CAPTURE_UNSUPPORTED):
        function()


@on_standin(fail='0:2')
def test_a_kernel_of_a_graph_fails_at_a_launch():
    device = Device(0)
    poke, array = device.kernel('poke'), device.upload(np.zeros(1, 'float32'))
    graph = captured(device, lambda: device.launch(poke, 1, array, ctypes.c_long(0)))
    for _ in range(2):
        device.call('cuGraphLaunch', graph, device.stream)
        device.synchronize()
    device.call('cuGraphLaunch', graph, device.stream)
    with fails_with(LAUNCH_FAILED):
        device.synchronize()
