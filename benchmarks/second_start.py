#!/usr/bin/env python
"""Seconds of the whole process of an unchanged Theano script that has run before, in turns.

The sides are plain Theano 1.0.5, which only finds the names that NumPy 1.24 has removed; plain Theano with the fixes of
theano_mgpu, but without kept graphs; and the script under `theano-mgpu run`. A first start of each side, which does not
count, fills the folder of compiled code; plain Theano has another one. Shown are seconds of the clock, and in brackets
seconds of the processor. Examples:

  python benchmarks/second_start.py
  python benchmarks/second_start.py fixes 'run:a->cpu' 'run --always:a->cpu;b->cpu' --rounds 11
"""
import contextlib
import functools
import os
import resource
import subprocess
import sys
import tempfile
import time

from turns import make_parser, ratio, spread, take_turns

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LENET = 'tests/programs/theano_scripts/convolutional_mlp.py --size 28 --filters 20 50 --batch 20 --train 20 --hidden' \
    ' 500 --epochs 1'
RUN = '''import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name='__main__')'''
REMOVED = '''import builtins, numpy
for name in ('bool', 'int', 'float', 'complex', 'object', 'str'):
    setattr(numpy, name, getattr(builtins, name))
'''


def seconds(side, folder, script):
    """Return the seconds of the clock and of the processor that one process takes."""
    kind, _, contexts = side.partition(':')
    words = {'plain': ['-c', REMOVED + RUN], 'fixes': ['-c', 'import theano_mgpu\n' + RUN]}.get(kind) or \
        ['-m', 'theano_mgpu', *kind.split(), '-q', '--contexts', contexts]
    flags = 'floatX=float32,blas.ldflags=-lopenblas,base_compiledir=' + os.path.join(folder, str(kind == 'plain'))
    flags += ',mgpu.keep_graphs=False' * (kind == 'fixes') + ',mgpu.keep_graphs=True' * kind.startswith('run')
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words, *script.split()], check=True, cwd=HERE, stdout=subprocess.DEVNULL,
                   env=dict(os.environ, PYTHONPATH=HERE, THEANO_FLAGS=flags))
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('sides', nargs='*', default=['plain', 'fixes', 'run:a->cpu', 'run:a->cpu;b->cpu'],
                        help="'plain', 'fixes', 'run:MAP' or 'run --always:MAP'; ratios are to the first one")
    parser.add_argument('--script', default=LENET, help='with its arguments (default: the LeNet of the tests)')
    parser.add_argument('--folder', help='of compiled code (default: a new one, which is removed)')
    arguments = parser.parse_args()
    with contextlib.nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as folder:
        calls = {side: functools.partial(seconds, side, folder, arguments.script) for side in arguments.sides}
        for side in arguments.sides:
            print('%s: first start: %.1f s' % (side, calls[side]()[0]), flush=True)
        measured = take_turns(calls, arguments.rounds)
    first = list(zip(*measured[arguments.sides[0]]))
    for side in arguments.sides:
        clock, processor = zip(*measured[side])
        print('%s: %s s (%s); / %s: %s (%s)' % (side, spread(clock), spread(processor), arguments.sides[0],
                                                ratio(clock, first[0]), ratio(processor, first[1])))


if __name__ == '__main__':
    main()
