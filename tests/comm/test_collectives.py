"""The host's all_reduce."""
import sys
import threading
import tracemalloc
import warnings

from theano_mgpu import MgpuWarning
from theano_mgpu.comm import host_sum
from theano_mgpu.comm.host_sum import add_by_numpy, all_reduce, all_reduce_each

import numpy as np
import pytest
import theano
from support.processes import python

LARGE = 3 * host_sum.SHARE // 4 + 5  # Elements: two float32 buffers are worth several threads and streamed stores.


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('shape', [(), (1,), (3, 4), (2, 65535), (5, 1, 7)])
@pytest.mark.parametrize('n', [1, 2, 5])
def test_sum(dtype, shape, n):
    rng = np.random.RandomState(0)
    buffers = [np.asarray(rng.randn(*shape), dtype) for _ in range(n)]
    expected = sum(buffer.astype('float64') for buffer in buffers)
    tolerance = {'float16': 1e-2, 'float32': 1e-5, 'float64': 1e-12}[dtype]
    out = np.empty(shape, dtype)
    all_reduce(buffers, out)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    all_reduce([out, *buffers], out)
    np.testing.assert_allclose(out, 2 * expected, rtol=tolerance, atol=tolerance)


def total(buffers, out=None):
    """Return the sum of buffers, in new memory or in `out`."""
    out = np.empty_like(buffers[0]) if out is None else out
    all_reduce(buffers, out)
    return out


@pytest.mark.parametrize('dtypes', [('float32',) * 3, ('float64',) * 3, ('float16',) * 3, ('>f4',) * 3, ('float32',)])
def test_sums_of_several_arrays_are_the_sums_of_each(dtypes):
    shapes = (), (0,), (1,), (5, 7), (40, 50), (3, 1)
    rng = np.random.RandomState(len(dtypes))
    lists = [[np.asarray(rng.randn(*shape), dtype) for shape in shapes] for dtype in dtypes]
    outs = [np.empty(shape, dtypes[0]) for shape in shapes]
    all_reduce_each(lists, outs)
    for out, *buffers in zip(outs, *lists):
        np.testing.assert_array_equal(out, total(buffers))


def random_buffers(size, n, dtype='float32'):
    rng = np.random.RandomState(size + n)
    return [rng.randn(size).astype(dtype) for _ in range(n)]


@pytest.mark.slow_but_with('False-16384-1-float32', 'True-16461-3-float32', 'True-16461-3-float64',
                           'True-16384-1-float64', 'True-16384-1-float32', 'False-16461-3-float32',
                           'False-16384-1-float64', 'False-16461-3-float64')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('size,n', [(host_sum.SMALLEST, 1), (host_sum.SMALLEST + 77, 3), (LARGE, 2),
                                    (LARGE // 4, 9)])
@pytest.mark.parametrize('in_place', [False, True])
def test_compiled_code_gives_numpys_bits(dtype, size, n, in_place):
    buffers = random_buffers(size, n, dtype)
    start = np.linspace(-1, 1, size).astype(dtype)
    out, expected = start.copy(), start.copy()
    assert host_sum.is_for_code(out, buffers)
    all_reduce([out] * in_place + buffers, out)
    add_by_numpy(expected, [expected] * in_place + buffers)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.slow_with('8')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('offset', [4, 8])
def test_any_place_in_memory(offset):
    """Streamed stores need multiples of 16 bytes; the bytes before and behind `out` are not touched."""
    whole, *buffers = random_buffers(LARGE, 3)
    before = whole.copy()
    part = slice(offset // 4, LARGE - 3)
    expected = np.empty_like(whole[part])
    buffers = [buffer[part] for buffer in buffers]
    assert host_sum.is_for_code(whole[part], buffers)
    all_reduce(buffers, whole[part])
    add_by_numpy(expected, buffers)
    assert whole[part].tobytes() == expected.tobytes()
    before[part] = expected
    assert whole.tobytes() == before.tobytes()


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_number_of_threads_does_not_change_a_bit(monkeypatch):
    buffers = random_buffers(LARGE, 4)
    results = set()
    for count in '1', '2', '16':
        monkeypatch.setenv('OMP_NUM_THREADS', count)
        results.add(total(buffers).tobytes())
    assert len(results) == 1


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_several_callers():
    jobs = [random_buffers(LARGE, n) for n in (2, 3)]
    expected = [total(job).tobytes() for job in jobs]
    outs = [np.empty(LARGE, 'float32') for _ in jobs]
    right = []

    def repeat(job, out, bits):
        right.append(all(total(job, out).tobytes() == bits for _ in range(5)))

    callers = [threading.Thread(target=repeat, args=each) for each in zip(jobs, outs, expected)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True, True]


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_pythons_lock_is_free_meanwhile():
    """The switch interval is so long that the lock changes hands only where it is released."""
    buffers = random_buffers(LARGE, 2)
    out = np.empty(LARGE, 'float32')
    started, turns = threading.Event(), []

    def call():
        started.set()
        for _ in range(500):
            if not turns:
                host_sum.add_by_code(out, buffers)
        turns.append('caller')

    assert host_sum.is_for_code(out, buffers)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        caller = threading.Thread(target=call)
        caller.start()
        started.wait()
        turns.append('main')
        caller.join()
    finally:
        sys.setswitchinterval(interval)
    assert turns == ['main', 'caller']


@pytest.mark.slow_with('float32-6291461')
@pytest.mark.parametrize('dtype,size', [('float32', LARGE), ('float64', 1 << 16),
                                        ('float32', 100)])
def test_nothing_is_allocated_again(dtype, size):
    buffers = random_buffers(size, 4, dtype)
    out = np.empty(size, dtype)
    all_reduce(buffers, out)
    tracemalloc.start()
    try:
        all_reduce(buffers[::-1], out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


def test_other_buffers_compile_nothing_again(monkeypatch):
    buffers = random_buffers(LARGE, 3)
    total(buffers)
    built = []
    monkeypatch.setattr(host_sum.native, 'build', lambda *arguments: built.append(arguments))
    total(buffers[:2])
    total(buffers[::-1])
    assert not built


@pytest.mark.slow
def test_without_a_compiler():
    buffers = random_buffers(LARGE, 2)
    expected = total(buffers)
    with theano.change_flags(cxx=''), warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not host_sum.is_for_code(expected, buffers)
        assert total(buffers).tobytes() == expected.tobytes()


@pytest.mark.needs_compiler
def test_with_a_broken_compiler():
    buffers = random_buffers(LARGE, 2)
    expected = total(buffers)
    with theano.change_flags(cxx='/nowhere/g++'):
        with pytest.warns(MgpuWarning, match='/nowhere/g.*doctor'):
            assert total(buffers).tobytes() == expected.tobytes()
        assert total(buffers).tobytes() == expected.tobytes()


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_code_is_built_once_for_all_processes(tmp_path):
    code = ('import numpy as np; from theano_mgpu.comm import host_sum\n'
            'x = np.ones(host_sum.SMALLEST); host_sum.all_reduce([x, x], y := x.copy()); print((y == 2).all())')
    built = []
    for _ in range(2):
        assert python('-c', code, flags='base_compiledir=%s' % tmp_path).stdout == 'True\n'
        path, = tmp_path.rglob('host_sum_*.so')
        built.append(path.stat().st_mtime_ns)
    assert built[0] == built[1]


@pytest.mark.parametrize('dtypes', [('float32', 'float64'), ('float64', 'float32'), ('>f4', 'float32'),
                                    ('float32', '>f4')])
def test_mixed_dtypes(dtypes):
    first, second = random_buffers(2 << 16, 2)
    buffers = [first.astype(dtypes[0]), second.astype(dtypes[1])]
    result = total(buffers)
    assert result.dtype == dtypes[0]
    np.testing.assert_allclose(result, first + second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('size', [6, LARGE // 8 * 2])
def test_what_cannot_be_summed(size):
    buffer = np.ones(size)
    with pytest.raises(ValueError, match='shapes'):
        total([buffer, buffer[1:]])
    with pytest.raises(ValueError, match='shapes'):
        all_reduce([buffer, buffer], np.empty((2, size // 2)))
    with pytest.raises(ValueError, match='one piece'):
        all_reduce([buffer, buffer], np.empty(2 * size)[::2])
    constant = np.zeros(size)
    constant.flags.writeable = False
    with pytest.raises(ValueError, match='read-only'):
        all_reduce([buffer, buffer], constant)
    assert not constant.any()


@pytest.mark.parametrize('orders', ['CC', 'FF', 'CF', 'FC'])
@pytest.mark.parametrize('shape', [(6, 5), (200, 301)])
def test_memory_orders(orders, shape):
    """Gradients of products come in Fortran order."""
    rng = np.random.RandomState(0)
    buffers = [np.asarray(rng.randn(*shape), order=order) for order in orders]
    expected = buffers[0] + buffers[1]
    np.testing.assert_allclose(total(buffers), expected)
    np.testing.assert_allclose(total(buffers, np.empty(shape)), expected)
    parts = [buffer[::2, ::2] for buffer in buffers]
    np.testing.assert_allclose(total(parts), expected[::2, ::2])


def test_one_buffer():
    buffer = np.arange(3.0)
    out = np.empty(3)
    assert (total([buffer], out) == buffer).all()


def test_half_precision_is_summed_in_single():
    """2048 + 1 is 2048 in float16: eight ones added one by one to it would be lost."""
    buffers = [np.array([2048.0], 'float16')] + [np.array([1.0], 'float16')] * 8
    assert total(buffers)[0] == 2056
