#!/usr/bin/env python
"""The sum of N host buffers, compared with the memory's bandwidth and with NumPy.

  ours    theano_mgpu.comm.host_sum.all_reduce into an existing buffer
  numpy   its way without a C++ compiler
  sum     the stacked buffers' sum(axis=0)

Bytes are those that the task itself reads and writes: N buffers and one result. A processor may move more: a store
that does not bypass the cache reads the line first. The memory's bandwidth is counted alike. Each round measures it by
compiled kernels on buffers of 100 MB: a sum that only reads, a copy, and a triad a = b + 3 * c; each with one thread
and with one thread a core; copy and triad with plain stores and with stores that bypass the cache. The bandwidth
belongs to the kernel with the highest median. Buffers that fit into a cache can therefore reach more than 1. MB are
2**20 bytes.

All take turns, some calls each. Ratios are taken within a round; the table shows their median over the rounds (lowest
to highest). "best" is the best round of ours against the best of the memory, which other programs on the machine
disturb least. Examples:

  python benchmarks/all_reduce.py
  python benchmarks/all_reduce.py --sizes 1 100 --buffers 2 --rounds 21 --dtype float64
"""
import ctypes
import functools
import os
import sys
import tempfile

from theano_mgpu.comm.host_sum import add_by_numpy, all_reduce
from theano_mgpu.utils.processor import threads as threads_here

import numpy as np
import theano
from theano.gof.cmodule import GCC_compiler
from turns import make_parser, seconds, spread, take_turns, write_json

MIB = 1 << 20
BANDWIDTH_BYTES = 100 * MIB

# Each thread takes the next chunk when it is free, as in all_reduce: a busy core slows both alike.
BANDWIDTH_SOURCE = r'''
#include <cstddef>
#include <emmintrin.h>
typedef float V __attribute__((vector_size(32)));  // of 64 bytes g++ keeps the parts in memory, without AVX-512

static inline void store(V *to, V value, bool stream) {
    if (stream)
        for (int j = 0; j < 2; ++j)
            _mm_stream_ps((float *)to + 4 * j, ((const __m128 *)&value)[j]);
    else
        *to = value;
}

// Kind 0: sum of b; 1: a = b; 2: a = b + 3 * c. Sizes are counted in vectors, a multiple of the chunk.
extern "C" float run(V *a, const V *b, const V *c, size_t size, int kind, int stream, int threads) {
    const size_t chunk = 8192;
    float total = 0;
    #pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+:total)
    for (size_t start = 0; start < size; start += chunk) {
        V sum[4] = {};
        for (size_t i = start; i < start + chunk; i += 4)
            for (int j = 0; j < 4; ++j)
                if (kind == 0)
                    sum[j] += b[i + j];
                else
                    store(a + i + j, kind == 1 ? b[i + j] : b[i + j] + 3 * c[i + j], stream);
        total += sum[0][0] + sum[1][0] + sum[2][0] + sum[3][0];
        _mm_sfence();
    }
    return total;
}
'''
KERNELS = [('sum', 0, 0), ('copy', 1, 0), ('copy', 1, 1), ('triad', 2, 0), ('triad', 2, 1)]


def parse_arguments():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--sizes', nargs='+', type=float, default=[1, 10, 100, 500], metavar='MB',
                        help='size of a buffer in units of 2**20 bytes (default 1 10 100 500)')
    parser.add_argument('--buffers', nargs='+', type=int, default=[2, 4, 8], metavar='N',
                        help='how many buffers (default 2 4 8)')
    parser.add_argument('--dtype', choices=['float16', 'float32', 'float64'], default='float32')
    parser.add_argument('--block', type=float, default=0.02, metavar='SECONDS',
                        help='a contender repeats its call for about this long in a round (default %(default)s)')
    parser.add_argument('--json', metavar='FILE')
    arguments = parser.parse_args()
    if min(arguments.sizes) <= 0 or min(arguments.buffers) < 1 or arguments.rounds < 1:
        parser.error('sizes, buffers and rounds are positive')
    if not theano.config.cxx:
        parser.error('a C++ compiler is needed; `theano-mgpu doctor` looks for one')
    return arguments


def free_bytes():
    """Return the bytes that programs may still take, as Linux estimates them."""
    with open('/proc/meminfo') as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith('MemAvailable'))


def aligned_ones(nbytes):
    whole = np.ones(nbytes // 4 + 16, 'float32')
    return whole[-whole.ctypes.data % 64 // 4:][:nbytes // 4]


class Bandwidth:
    """Kernels that show the memory's bandwidth."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            GCC_compiler.compile_str('bandwidth', BANDWIDTH_SOURCE, folder, py_module=False, hide_symbols=False,
                                     preargs=['-O3', '-fopenmp'] + GCC_compiler.compile_args())
            self.run = ctypes.CDLL(os.path.join(folder, 'bandwidth.so')).run
        self.run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_int] * 3
        self.run.restype = ctypes.c_float
        self.arrays = [aligned_ones(BANDWIDTH_BYTES) for _ in range(3)]

    def calls(self):
        """Return the kernels by name, each with the bytes that it moves."""
        pointers = [array.ctypes.data for array in self.arrays]
        return {'%s%s, %d threads' % (name, ' past the cache' * stream, threads): (
                    functools.partial(self.run, *pointers, BANDWIDTH_BYTES // 32, kind, stream, threads),
                    (kind + 1) * BANDWIDTH_BYTES)
                for name, kind, stream in KERNELS for threads in sorted({1, threads_here()})}


def contenders(stacked, out):
    buffers = list(stacked)
    return {'ours': lambda: all_reduce(buffers, out),
            'numpy': lambda: add_by_numpy(out, buffers),
            'sum': lambda: stacked.sum(axis=0)}


def rate(call, nbytes, block):
    """Return a function that repeats a call for about `block` seconds, and returns the bytes a second that it moves."""
    call()
    repeats = max(1, int(block / seconds(call)))
    return lambda: nbytes / seconds(call, repeats)


def compare(n, size, bandwidth, arguments):
    """Return a row of the table: bytes a second of each contender and of the memory, round by round."""
    items = int(size * MIB) // np.dtype(arguments.dtype).itemsize
    stacked = np.random.RandomState(0).rand(n, 1024).astype(arguments.dtype)
    stacked = np.tile(stacked, (1, -(-items // 1024)))[:, :items].copy()
    out = np.empty(items, arguments.dtype)
    moved = (n + 1) * out.nbytes
    calls = {name: (call, moved) for name, call in contenders(stacked, out).items()}
    names = list(calls)
    calls.update(bandwidth.calls())
    sides = {name: rate(call, nbytes, arguments.block) for name, (call, nbytes) in calls.items()}
    rounds = take_turns(sides, arguments.rounds, '%d x %g MB' % (n, size))
    kernel = max(set(calls) - set(names), key=lambda name: np.median(rounds[name]))
    return dict(n=n, size=size, dtype=arguments.dtype, kernel=kernel, memory=rounds[kernel],
                best=max(rounds['ours']) / max(max(rounds[name]) for name in set(calls) - set(names)),
                rounds={name: rounds[name] for name in names})


def cells(row):
    """Return the row as texts: GB/s of all, and ours against the memory and against NumPy's sum."""
    rounds = {name: np.array(values) / 1e9 for name, values in row['rounds'].items()}
    ours, memory = rounds['ours'], np.array(row['memory']) / 1e9
    numpy_ways = [rounds[name] for name in ('numpy', 'sum')]
    return (['%d' % row['n'], '%g' % row['size'], '%.1f (%.1f to %.1f)' % spread(ours), '%.1f' % np.median(memory),
             '%.2f (%.2f to %.2f)' % spread(ours / memory), '%.2f' % row['best']]
            + ['%.1f' % np.median(way) for way in numpy_ways]
            + ['%.1f' % np.median(ours / rounds['sum'])])


def main():
    arguments = parse_arguments()
    print('%s, %d threads at most, %d rounds, median (lowest to highest), GB/s'
          % (arguments.dtype, threads_here(), arguments.rounds))
    form = '| %2s | %5s | %-21s | %6s | %-20s | %4s | %6s | %6s | %10s |'
    print(form % ('N', 'MB', 'ours', 'memory', 'ours / memory', 'best', 'numpy', 'sum', 'ours/NumPy'))
    bandwidth, rows = Bandwidth(), []
    for n in arguments.buffers:
        for size in arguments.sizes:
            # The buffers, the result, and the array that sum(axis=0) makes.
            needed = (n + 2) * size * MIB
            if needed > free_bytes() / 3:
                print('%d x %g MB left out: %.1f GB are needed, above a third of the %.1f GB that are free'
                      % (n, size, needed / 1e9, free_bytes() / 1e9))
                continue
            rows.append(compare(n, size, bandwidth, arguments))
            print(form % tuple(cells(rows[-1])), flush=True)
    write_json(rows, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
