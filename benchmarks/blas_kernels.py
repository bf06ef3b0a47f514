#!/usr/bin/env python
"""Products of matrices by the kernels that `import theano_mgpu` chooses, where OpenBLAS does not know the processor.

A process has a library of a few lines before all others, by which OpenBLAS's own choice is Prescott, as on a processor
that is newer than OpenBLAS. It imports theano_mgpu. Others have kernels by OPENBLAS_CORETYPE, which theano_mgpu leaves.
All take turns; ratios are medians over the rounds (lowest to highest). Each computes by one thread.

  GF/s      10^9 additions and multiplications a second, in the fastest turn
  of NAME's time of a product, in parts of the time with the kernels NAME

Examples:

  python benchmarks/blas_kernels.py
  python benchmarks/blas_kernels.py --size 300 --rounds 41
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile

# OpenBLAS asks for its kernels by this function.
PRELOADED = """
#include <stdlib.h>
#include <string.h>
extern char *secure_getenv(const char *name);
char *getenv(const char *name) {
    char *value = secure_getenv(name);
    return value || strcmp(name, "OPENBLAS_CORETYPE") ? value : "Prescott";
}
"""
WORKER = """
import sys, time
import theano_mgpu
import numpy as np
from theano_mgpu.utils import blas
size, arrays = int(sys.argv[1]), {}
for dtype in 'float32', 'float64':
    arrays[dtype] = [np.random.RandomState(0).rand(size, size).astype(dtype) for _ in range(3)]
print(*{text.split()[2] for text in blas.loaded().values() if text.startswith('openblas')}, flush=True)
for line in sys.stdin:
    a, b, c = arrays[line.strip()]
    np.dot(a, b, c)
    start = time.perf_counter()
    for _ in range(3):
        np.dot(a, b, c)
    print((time.perf_counter() - start) / 3, flush=True)
"""
KERNELS = 'Haswell', 'Prescott'


def start(size, **environment):
    env = {name: value for name, value in os.environ.items() if not name.endswith('_CORETYPE')}
    return subprocess.Popen([sys.executable, '-c', WORKER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env=dict(env, OPENBLAS_NUM_THREADS='1', **environment))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=700, help='rows and columns of the matrices')
    parser.add_argument('--rounds', type=int, default=21)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, 'getenv.so')
        subprocess.run(['gcc', '-O1', '-shared', '-fPIC', '-x', 'c', '-', '-o', library], input=PRELOADED, text=True,
                       check=True)
        workers = {'theano_mgpu': start(args.size, LD_PRELOAD=library),
                   **{name: start(args.size, OPENBLAS_CORETYPE=name) for name in KERNELS}}
        print('theano_mgpu has chosen', [worker.stdout.readline().strip() for worker in workers.values()][0])
        for dtype in 'float32', 'float64':
            print(dtype)
            times = {name: [] for name in workers}
            for _ in range(args.rounds):
                for name, worker in workers.items():
                    worker.stdin.write(dtype + '\n')
                    worker.stdin.flush()
                    times[name].append(float(worker.stdout.readline()))
            for name in workers:
                ratios = {other: [a / b for a, b in zip(times[name], times[other])] for other in KERNELS}
                print('  %-12s %6.1f GF/s' % (name, 2e-9 * args.size ** 3 / min(times[name])), *(
                    " of %s's: %.2f (%.2f to %.2f)" % (other, statistics.median(each), min(each), max(each))
                    for other, each in ratios.items()))
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()


if __name__ == '__main__':
    main()
