"""NCCL between devices of one process: against NumPy, in the order of the streams, and its errors."""
import ctypes
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cuda_on_cpu.child import on_standin, run
from cuda_on_cpu.driver import ILLEGAL_ADDRESS, LAUNCH_FAILED, Device, Hold, call, fails_with, load

DTYPES = {'int8': 0, 'uint8': 1, 'int32': 2, 'uint32': 3, 'int64': 4, 'uint64': 5, 'float16': 6, 'float32': 7,
          'float64': 8}
OPS = {'sum': (0, np.add), 'prod': (1, np.multiply), 'max': (2, np.maximum), 'min': (3, np.minimum)}
CUDA_ERROR, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 1, 2, 4, 5
WRONG_RESULT, NEVER_ENDS = 100, 101


class Clique:
    """Some devices, each with a communicator."""

    def __init__(self, n=2):
        self.devices = [Device(i) for i in range(n)]
        self.comms = (ctypes.c_void_p * n)()
        call('ncclCommInitAll', self.comms, n, (ctypes.c_int * n)(*range(n)))

    def group(self, name, arguments):
        """Call a function for each device in a group; return the addresses of the results."""
        call('ncclGroupStart')
        try:
            for comm, device, each in zip(self.comms, self.devices, arguments):
                call(name, *each, ctypes.c_void_p(comm), device.stream)
        finally:
            call('ncclGroupEnd')

    def all_reduce(self, parts, op='sum'):
        """Return each device's result."""
        addresses = [device.upload(part) for device, part in zip(self.devices, parts)]
        self.group('ncclAllReduce', [(address, address, ctypes.c_size_t(part.size), DTYPES[part.dtype.name], OPS[op][0])
                                     for address, part in zip(addresses, parts)])
        return [device.read(address, part.shape, part.dtype)
                for device, address, part in zip(self.devices, addresses, parts)]


def parts_of(n, size, dtype, seed=0):
    rng = np.random.RandomState(seed)
    return [(rng.uniform(1, 9, size) if dtype[0] == 'u' else rng.uniform(-9, 9, size)).astype(dtype) for _ in range(n)]


@on_standin(devices=3, delay_us=300, nccl_delay_us=300)
def test_all_reduce_of_each_dtype():
    clique = Clique(3)
    for dtype in DTYPES:
        for op, (_, ufunc) in OPS.items():
            for size in (1, 1000, 200001) if op == 'sum' else (7,):
                parts = parts_of(3, size, dtype)
                first, *others = clique.all_reduce(parts, op)
                assert all((other == first).all() for other in others)
                tolerance = {'float16': 2e-2, 'float32': 1e-4, 'float64': 1e-12}.get(dtype, 0)
                np.testing.assert_allclose(first, ufunc.reduce(parts, dtype=dtype), tolerance, tolerance)


@on_standin()
def test_a_maximum_passes_over_nan():
    """NVIDIA's does so, too: a test fails if the package leaves a maximum to NCCL."""
    clique = Clique()
    parts = [np.array(each, 'float32') for each in ([np.nan, 1, np.nan], [2, np.nan, np.nan])]
    for op in 'max', 'min':
        for found in clique.all_reduce(parts, op):
            np.testing.assert_array_equal(found, [2, 1, np.nan])


@on_standin(delay_us=300)
def test_the_other_collectives():
    clique, n = Clique(), 2
    parts = parts_of(n, 10, 'float32')
    there = [device.upload(part) for device, part in zip(clique.devices, parts)]
    out = [device.upload(np.zeros(20, 'float32')) for device in clique.devices]
    clique.group('ncclAllGather', [(a, b, ctypes.c_size_t(10), 7) for a, b in zip(there, out)])
    assert all((device.read(b, 20) == np.concatenate(parts)).all() for device, b in zip(clique.devices, out))
    clique.group('ncclReduceScatter', [(a, b, ctypes.c_size_t(5), 7, 0) for a, b in zip(there, out)])
    both = [device.read(b, 5) for device, b in zip(clique.devices, out)]
    np.testing.assert_allclose(np.concatenate(both), sum(parts), 1e-6)
    clique.group('ncclReduce', [(a, b, ctypes.c_size_t(10), 7, 0, 1) for a, b in zip(there, out)])
    np.testing.assert_allclose(clique.devices[1].read(out[1], 10), sum(parts), 1e-6)
    clique.group('ncclBroadcast', [(a, a, ctypes.c_size_t(10), 7, 1) for a in there])
    assert all((device.read(a, 10) == parts[1]).all() for device, a in zip(clique.devices, there))


def bytes_received(n):
    """Return the bytes that each device has received from others."""
    numbers = [ctypes.c_size_t() for _ in range(n)]
    for i, number in enumerate(numbers):
        call('ncclOnCpuReceived', i, ctypes.byref(number))
    return [number.value for number in numbers]


@on_standin(devices=3, delay_us=300, nccl_delay_us=300)
def test_messages():
    """Each device sends to each, also to itself, in one group with a broadcast; messages of a pair keep their order.
    """
    n, sizes = 3, (5, 200001, 1)  # one is longer than a slot
    clique = Clique(n)
    parts = {(a, b): parts_of(len(sizes), sizes[(a + b) % n], 'float32', a * n + b) for a in range(n) for b in range(n)}
    there = {pair: [clique.devices[pair[0]].upload(part) for part in each] for pair, each in parts.items()}
    out = {pair: [clique.devices[pair[1]].upload(0 * part) for part in each] for pair, each in parts.items()}
    values = parts_of(1, 1000, 'float32')
    sent = [device.upload(values[0] * (i == 2)) for i, device in enumerate(clique.devices)]
    call('ncclGroupStart')
    for rank, (comm, device) in enumerate(zip(clique.comms, clique.devices)):
        rest = ctypes.c_void_p(comm), device.stream
        if rank == 1:  # the order of messages and collectives in a group does not matter
            call('ncclBroadcast', sent[rank], sent[rank], ctypes.c_size_t(1000), 7, 2, *rest)
        for i in range(len(sizes)):
            for other in range(n):
                call('ncclRecv', out[other, rank][i], ctypes.c_size_t(sizes[(other + rank) % n]), 7, other, *rest)
        for other in range(n):
            for address in there[rank, other]:
                call('ncclSend', address, ctypes.c_size_t(sizes[(other + rank) % n]), 7, other, *rest)
        if rank != 1:
            call('ncclBroadcast', sent[rank], sent[rank], ctypes.c_size_t(1000), 7, 2, *rest)
    call('ncclGroupEnd')
    for (source, target), each in parts.items():
        for part, address in zip(each, out[source, target]):
            np.testing.assert_array_equal(clique.devices[target].read(address, part.shape), part)
    for device, address in zip(clique.devices, sent):
        np.testing.assert_array_equal(device.read(address, 1000), values[0])
    assert bytes_received(n) == [4 * sum(3 * sizes[(a + b) % n] for a in range(n) if a != b) + 4000 * (b != 2)
                                 for b in range(n)]


def send_one(clique, size, received_size=None):
    """Send a vector from device 0 to device 1 in a group; return the addresses of both."""
    (first, second), n = clique.devices, received_size or size
    there, out = first.upload(np.ones(size, 'float32')), second.upload(np.zeros(n, 'float32'))
    call('ncclGroupStart')
    try:
        call('ncclSend', there, ctypes.c_size_t(size), 7, 1, ctypes.c_void_p(clique.comms[0]), first.stream)
        call('ncclRecv', out, ctypes.c_size_t(n), 7, 0, ctypes.c_void_p(clique.comms[1]), second.stream)
    finally:
        call('ncclGroupEnd')
    return there, out


@on_standin()
def test_errors_of_messages():
    clique = Clique()
    call('ncclOnCpuFailAfter', ctypes.c_long(1), SYSTEM_ERROR)
    _, out = send_one(clique, 5)
    assert (clique.devices[1].read(out, 5) == 1).all()
    with fails_with(SYSTEM_ERROR):
        send_one(clique, 5)
    call('ncclOnCpuFailAfter', ctypes.c_long(0), WRONG_RESULT)
    _, out = send_one(clique, 5)
    assert not np.allclose(clique.devices[1].read(out, 5), 1)
    there, _ = send_one(clique, 5)
    arguments = there, ctypes.c_size_t(5), 7, 1, ctypes.c_void_p(clique.comms[0]), clique.devices[0].stream
    with fails_with(INVALID_ARGUMENT):
        call('ncclSend', *arguments[:3], 2, *arguments[4:])
    send_one(clique, 5, 6)
    with fails_with(LAUNCH_FAILED):
        clique.devices[1].synchronize()


@on_standin()
def test_a_message_waits_for_its_other_end_until_it_is_aborted():
    """A thread that calls for both ends outside of a group would wait for itself, and is refused."""
    clique = Clique()
    clique.all_reduce(parts_of(2, 5, 'float32'))  # the first exchange of a rank waits on the host
    first, second = clique.devices
    address = first.upload(np.ones(5, 'float32'))
    call('ncclSend', address, ctypes.c_size_t(5), 7, 1, ctypes.c_void_p(clique.comms[0]), first.stream)
    with fails_with(INVALID_USAGE):
        call('ncclRecv', address, ctypes.c_size_t(5), 7, 0, ctypes.c_void_p(clique.comms[1]), second.stream)
    waiting = threading.Thread(target=first.synchronize, daemon=True)
    waiting.start()
    waiting.join(.3)
    assert waiting.is_alive()
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[0]))
    waiting.join(10)
    assert not waiting.is_alive()


@on_standin()
def test_a_message_from_memory_of_another_device_is_an_error():
    clique = Clique()
    address = clique.devices[0].upload(np.ones(5, 'float32'))
    call('ncclGroupStart')
    for rank, (comm, device) in enumerate(zip(clique.comms, clique.devices)):
        call(('ncclSend', 'ncclRecv')[rank], address, ctypes.c_size_t(5), 7, 1 - rank, ctypes.c_void_p(comm),
             device.stream)
    call('ncclGroupEnd')
    with fails_with(ILLEGAL_ADDRESS):
        clique.devices[1].synchronize()


@on_standin()
def test_a_free_between_the_parts_of_a_collective_blocks_it():
    """The free waits for the first device, which waits for the second one, whose launch waits for the free."""
    clique = Clique()
    clique.all_reduce(parts_of(2, 5, 'float32'))  # the first exchange of a rank waits on the host
    parts = [device.upload(np.ones(5, 'float32')) for device in clique.devices]
    memory = clique.devices[1].allocate(4)

    def reduce(rank):
        call('ncclAllReduce', parts[rank], parts[rank], ctypes.c_size_t(5), 7, 0, ctypes.c_void_p(clique.comms[rank]),
             clique.devices[rank].stream)
    reduce(0)
    threads = [threading.Thread(target=clique.devices[1].free, args=(memory,)),
               threading.Thread(target=reduce, args=(1,))]
    for thread in threads:
        thread.start()
        time.sleep(.1)
    assert all(thread.is_alive() for thread in threads)
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[0]))
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@on_standin()
def test_a_collective_is_in_the_order_of_the_streams():
    """The call returns while a device still computes what it is to send."""
    clique = Clique()
    first, second = [device.upload(np.ones(1, 'float32')) for device in clique.devices]
    hold = Hold(clique.devices[0], first)
    clique.group('ncclAllReduce', [(a, a, ctypes.c_size_t(1), 7, 0) for a in (first, second)])
    hold.release()
    assert clique.devices[1].read(second, 1)[0] == 43


@on_standin()
def test_errors():
    clique = Clique()
    comms = (ctypes.c_void_p * 2)()
    with fails_with(INVALID_USAGE):
        call('ncclCommInitAll', comms, 2, (ctypes.c_int * 2)(0, 0))
    call('ncclOnCpuFailAfter', ctypes.c_long(1), SYSTEM_ERROR)
    parts = parts_of(2, 5, 'float32')
    clique.all_reduce(parts)
    with fails_with(SYSTEM_ERROR):
        clique.all_reduce(parts)
    call('ncclOnCpuFailAfter', ctypes.c_long(0), WRONG_RESULT)
    assert not np.allclose(clique.all_reduce(parts)[0], sum(parts))
    address = clique.devices[0].upload(parts[0])
    for comm, device in zip(clique.comms, clique.devices):
        arguments = address, address, ctypes.c_size_t(5), 7, 0, ctypes.c_void_p(comm), device.stream
        if device is clique.devices[0]:
            call('ncclAllReduce', *arguments)
            continue
        with fails_with(INVALID_USAGE):  # one thread waits for itself, unless it calls in a group
            call('ncclAllReduce', *arguments)


def use_after_abort():
    clique = Clique()
    for comm in clique.comms:
        call('ncclCommAbort', ctypes.c_void_p(comm))
    clique.all_reduce(parts_of(2, 5, 'float32'))


def use_after_one_abort():
    clique = Clique()
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[0]))
    clique.all_reduce(parts_of(2, 5, 'float32'))


def abort_beside_a_call():
    """A thread waits within a call for the other rank, which never comes."""
    device, comm = lonely_rank()
    address = device.upload(np.ones(5, 'float32'))
    threading.Thread(target=load('nccl').ncclAllReduce, daemon=True, args=(
        address, address, ctypes.c_size_t(5), 7, 0, comm, device.stream)).start()
    time.sleep(.2)
    call('ncclCommAbort', comm)
    print('aborted')


def lonely_rank():
    """Return a device, and the communicator of the first of two ranks; the second one has joined in a child process."""
    unique, comm, device = UniqueId(), ctypes.c_void_p(), Device(0)
    call('ncclGetUniqueId', ctypes.byref(unique))
    code = 'import sys; from cuda_on_cpu.test_nccl import join; join(sys.argv[1])'
    child = subprocess.Popen([sys.executable, '-c', code, bytes(unique).hex()], stdout=subprocess.PIPE)
    device.call('ncclCommInitRank', ctypes.byref(comm), 2, unique, 0)
    assert child.stdout.readline() == b'joined\n'
    child.wait()
    return device, comm


def join(unique):
    """Join as the second rank, and end."""
    comm = ctypes.c_void_p()
    Device(1).call('ncclCommInitRank', ctypes.byref(comm), 2, UniqueId.from_buffer_copy(bytes.fromhex(unique)), 1)
    print('joined', flush=True)


class UniqueId(ctypes.Structure):
    _fields_ = [('internal', ctypes.c_char * 128)]


def ends(body, **settings):
    """Return what a process prints that the stand-in ends."""
    done = run(body, **settings)
    assert done.returncode == -signal.SIGABRT, (done.returncode, done.stdout, done.stderr)
    return done.stderr


def test_a_communicator_that_was_aborted_may_not_be_used():
    for body in (use_after_abort, use_after_one_abort):
        assert 'a communicator is used after' in ends(body)


@pytest.mark.slow
def test_an_abort_ends_a_call_that_waits_for_a_rank_and_frees_what_it_uses():
    """The call needs some time to notice the abort."""
    done = run(abort_beside_a_call, nccl_abort_ms=1000)
    assert done.stdout == 'aborted\n' and done.returncode == 0, done.stderr
    assert 'a communicator is freed while a call uses it (rank 0)' in ends(abort_beside_a_call, nccl_abort_ms=0)


def free_memory(device):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device.call('cuMemGetInfo_v2', ctypes.byref(free), ctypes.byref(total))
    return free.value


@on_standin(memory='64M', nccl_memory='40M')
def test_the_first_exchange_takes_memory_that_the_last_abort_frees():
    """A second communicator on the same devices has too little memory."""
    clique = Clique()
    before = [free_memory(device) for device in clique.devices]
    parts = parts_of(2, 5, 'float32')
    for _ in range(2):
        clique.all_reduce(parts)
    assert [a - free_memory(device) >> 20 for a, device in zip(before, clique.devices)] == [40, 40]
    other = Clique()
    with fails_with(CUDA_ERROR):
        other.all_reduce(parts)
    for comm in clique.comms:
        assert free_memory(clique.devices[0]) < 30 << 20
        call('ncclCommAbort', ctypes.c_void_p(comm))
    np.testing.assert_allclose(other.all_reduce(parts)[0], sum(parts))


def hang(clique):
    """Have an exchange begin that does not end, and abort it."""
    addresses = [device.upload(np.ones(5, 'float32')) for device in clique.devices]
    clique.group('ncclAllReduce', [(a, a, ctypes.c_size_t(5), 7, 0) for a in addresses])
    waiting = [threading.Thread(target=device.synchronize, daemon=True) for device in clique.devices]
    for thread in waiting:
        thread.start()
        thread.join(.2)
        assert thread.is_alive()
    call('ncclGroupStart')
    for comm in clique.comms:
        call('ncclCommAbort', ctypes.c_void_p(comm))
    call('ncclGroupEnd')
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()


@on_standin(nccl_hang=True)
def test_an_exchange_hangs_although_all_ranks_have_come():
    hang(Clique())


@pytest.mark.slow
@on_standin()
def test_one_exchange_hangs():
    clique, parts = Clique(), parts_of(2, 5, 'float32')
    call('ncclOnCpuFailAfter', ctypes.c_long(1), NEVER_ENDS)
    clique.all_reduce(parts)
    hang(clique)


@on_standin(nccl_rate=1)
def test_a_collective_takes_as_long_as_its_bytes_do():
    clique, parts = Clique(), parts_of(2, 50000, 'float32')
    began = time.monotonic()
    clique.all_reduce(parts)
    assert time.monotonic() - began > .2


@on_standin()
def test_memory_of_another_device_is_an_error():
    clique = Clique()
    address = clique.devices[0].upload(np.ones(5, 'float32'))
    clique.group('ncclAllReduce', [(address, address, ctypes.c_size_t(5), 7, 0)] * 2)
    with fails_with(ILLEGAL_ADDRESS):
        clique.devices[1].synchronize()


@on_standin(fail='1:0')
def test_the_peers_of_a_lost_device_wait_until_they_are_aborted():
    clique = Clique()
    first, second = [device.upload(np.ones(5, 'float32')) for device in clique.devices]
    clique.group('ncclAllReduce', [(a, a, ctypes.c_size_t(5), 7, 0) for a in (first, second)])
    waiting = threading.Thread(target=clique.devices[0].synchronize, daemon=True)
    waiting.start()
    waiting.join(.3)
    assert waiting.is_alive()
    with fails_with(LAUNCH_FAILED):
        clique.devices[1].synchronize()
    error = ctypes.c_int(-1)
    call('ncclCommGetAsyncError', ctypes.c_void_p(clique.comms[0]), ctypes.byref(error))
    assert error.value == 0
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[0]))
    waiting.join(10)
    assert not waiting.is_alive()


@on_standin()
def test_an_aborted_rank_leaves_the_one_that_follows_intact():
    """The peer of an aborted rank, which comes later, said that they make different calls, and its device failed."""
    clique = Clique()
    holding = Hold(clique.devices[1], clique.devices[1].upload(np.zeros(1, 'float32')))
    for size in (5, 6, 7):  # the third has the slot of the first
        addresses = [device.upload(np.ones(size, 'float32')) for device in clique.devices]
        clique.group('ncclAllReduce', [(a, a, ctypes.c_size_t(size), 7, 0) for a in addresses])
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[0]))
    clique.devices[0].synchronize()
    holding.release()
    time.sleep(.2)  # the device takes the first piece, and waits for the second
    call('ncclCommAbort', ctypes.c_void_p(clique.comms[1]))
    clique.devices[1].synchronize()


@on_standin(sync=True)
def test_nothing_waits_for_itself_where_each_call_is_synchronous():
    parts = parts_of(2, 5, 'float64')
    np.testing.assert_allclose(Clique().all_reduce(parts)[0], sum(parts))


@on_standin()
def test_ranks_meet_by_an_id():
    devices, unique, comms = [Device(i) for i in range(2)], UniqueId(), (ctypes.c_void_p * 2)()
    call('ncclGetUniqueId', ctypes.byref(unique))
    call('ncclGroupStart')
    for rank, device in enumerate(devices):
        device.call('ncclCommInitRank', ctypes.byref(comms, rank * 8), 2, unique, rank)
    call('ncclGroupEnd')
    for name, expected in (('ncclCommCount', [2, 2]), ('ncclCommUserRank', [0, 1]), ('ncclCommCuDevice', [0, 1])):
        values = []
        for comm in comms:
            value = ctypes.c_int()
            call(name, ctypes.c_void_p(comm), ctypes.byref(value))
            values.append(value.value)
        assert values == expected, name
    assert load('nccl').ncclGroupEnd() == INVALID_USAGE
