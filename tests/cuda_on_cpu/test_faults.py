"""Faults that tests inject: by settings, and while a program runs."""
import ctypes

from cuda_on_cpu.child import on_standin
from cuda_on_cpu.driver import LAUNCH_FAILED, OUT_OF_MEMORY, CudaError, Device, call, fails_with

UNCORRECTABLE_ECC_ERROR = 214


def poke_until_failure(device, limit=10):
    """Return the number of kernels that ran before the device failed, and the error's code."""
    kernel, address = device.kernel('poke'), device.allocate(4)
    for count in range(limit):
        try:
            device.launch(kernel, 1, address, ctypes.c_long(0))
            device.synchronize()
        except CudaError as exc:
            return count, exc.code
    return limit, 0


def allocations_until_failure(device, limit=10):
    for count in range(limit):
        try:
            device.allocate(4)
        except CudaError as exc:
            assert exc.code == OUT_OF_MEMORY
            return count
    return limit


@on_standin(fail='1:2')
def test_fail_after_launches():
    first, second = Device(0), Device(1)
    assert poke_until_failure(second) == (2, LAUNCH_FAILED)
    with fails_with(LAUNCH_FAILED):
        second.allocate(4)
    assert poke_until_failure(first) == (10, 0)


@on_standin(fail='0:0:%d' % UNCORRECTABLE_ECC_ERROR)
def test_fail_with_a_code():
    assert poke_until_failure(Device(0)) == (0, UNCORRECTABLE_ECC_ERROR)


@on_standin(fail_alloc='1:3')
def test_fail_alloc():
    first, second = Device(0), Device(1)
    assert allocations_until_failure(second) == 3
    with fails_with(OUT_OF_MEMORY):
        second.allocate(4)  # until it is cancelled
    assert allocations_until_failure(first) == 10
    call('cudaOnCpuFailAllocAfter', 1, ctypes.c_long(-1))
    assert allocations_until_failure(second) == 10
    second.synchronize()  # the error is not sticky


@on_standin()
def test_fail_at_run_time_counts_from_the_call():
    device = Device(0)
    assert poke_until_failure(device) == (10, 0)
    call('cudaOnCpuFailAfter', 0, ctypes.c_long(3), 0)
    assert poke_until_failure(device) == (3, LAUNCH_FAILED)


@on_standin()
def test_a_fault_can_be_cancelled():
    device = Device(0)
    call('cudaOnCpuFailAfter', 0, ctypes.c_long(3), UNCORRECTABLE_ECC_ERROR)
    call('cudaOnCpuFailAfter', 0, ctypes.c_long(-1), 0)
    assert poke_until_failure(device) == (10, 0)


@on_standin()
def test_fail_alloc_at_run_time_counts_from_the_call():
    device = Device(1)
    assert allocations_until_failure(device) == 10
    call('cudaOnCpuFailAllocAfter', 1, ctypes.c_long(2))
    assert allocations_until_failure(device) == 2


@on_standin()
def test_a_device_that_does_not_exist():
    for name, arguments in (('cudaOnCpuFailAfter', (2, ctypes.c_long(0), 0)),
                            ('cudaOnCpuFailAllocAfter', (2, ctypes.c_long(0)))):
        with fails_with(101):
            call(name, *arguments)
