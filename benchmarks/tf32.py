#!/usr/bin/env python
"""Products of float32 matrices on a CUDA device as TF32 (`mgpu.tf32=True`), against float32.

cuBLAS keeps its mode for a process, so each side is a process of its own; they take turns. The ratio is the median
over the rounds of the ratio within a round. Examples:

  python benchmarks/tf32.py
  python benchmarks/tf32.py --sizes 512 2048 --device cuda1
"""
import os
import subprocess
import sys

from turns import make_parser, ratio

SIDE = '''
import sys, time
import theano_mgpu as mgpu, numpy as np
from pygpu import blas, gpuarray
from theano.gpuarray.type import get_context
mgpu.init('dev0->' + sys.argv[1])
context, rng = get_context('dev0'), np.random.RandomState(0)
for line in sys.stdin:
    n, repeats = map(int, line.split())
    a, b = [gpuarray.array(rng.rand(n, n).astype('float32'), context=context) for _ in range(2)]
    c = gpuarray.zeros((n, n), 'float32', context=context)
    blas.gemm(1.0, a, b, 0.0, c, overwrite_c=True)
    c.sync()
    began = time.perf_counter()
    for _ in range(repeats):
        blas.gemm(1.0, a, b, 0.0, c, overwrite_c=True)
    c.sync()
    exact = np.asarray(a).astype('float64') @ np.asarray(b)
    print((time.perf_counter() - began) / repeats, abs(np.asarray(c) - exact).max() / abs(exact).max(), flush=True)
'''


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--sizes', type=int, nargs='+', default=[1024, 4096], metavar='N', help='rows and columns')
    parser.add_argument('--repeats', type=int, default=50, help='products of a turn (default %(default)s)')
    parser.add_argument('--device', default='cuda0')
    return parser.parse_args()


def side(tf32, device):
    """Return a process that times products on demand."""
    flags = 'mgpu.tf32=%s,contexts=,%s' % (tf32, os.environ.get('THEANO_FLAGS', ''))
    return subprocess.Popen([sys.executable, '-c', SIDE, device], env=dict(os.environ, THEANO_FLAGS=flags), text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def asked(process, n, repeats):
    """Return the seconds of a product, and its largest error relative to the largest number."""
    process.stdin.write('%d %d\n' % (n, repeats))
    process.stdin.flush()
    return tuple(map(float, process.stdout.readline().split()))


def main():
    arguments = parse_arguments()
    sides = [side(tf32, arguments.device) for tf32 in (True, False)]
    for n in arguments.sizes:
        rows = [[asked(each, n, arguments.repeats) for each in sides] for _ in range(arguments.rounds)]
        ours, theirs = zip(*rows)
        print('%d x %d: TF32 / float32 %s; largest relative errors %.1e and %.1e'
              % (n, n, ratio([s for s, _ in ours], [s for s, _ in theirs]), ours[0][1], theirs[0][1]), flush=True)
    for each in sides:
        each.communicate()
    return 0


if __name__ == '__main__':
    sys.exit(main())
