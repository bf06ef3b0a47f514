"""Programs in processes of their own, on the CUDA stand-in."""
import os
import subprocess
import sys

import cuda_on_cpu

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRELUDE = '''
import sys
sys.path[:0] = [%r, %r]
import theano_mgpu as mgpu
import numpy as np
''' % (HERE, os.path.join(os.path.dirname(HERE), 'benchmarks'))


def run(code, devices=2, flags='', base=None, **settings):
    """Return the lines that a program prints in a fresh interpreter on stand-in devices."""
    return _lines([sys.executable, '-c', PRELUDE + code], ['contexts=', flags], devices, base, settings)


def launched(n_ranks, code, folder, devices, flags='', **settings):
    """Return the lines that rank 0 of a job prints; the ranks divide stand-in devices among them."""
    path = os.path.join(str(folder), 'program.py')
    with open(path, 'w') as file:
        file.write(PRELUDE + code)
    contexts = ';'.join('dev%d->cuda%d' % (i, i) for i in range(devices))
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', str(n_ranks), path]
    return _lines(command, ['contexts=' + contexts, flags], devices, None, settings)


def _lines(command, flags, devices, base, settings):
    env = cuda_on_cpu.environment(devices, base, **settings)
    env['THEANO_FLAGS'] = ','.join(filter(None, ['floatX=float32', *flags]))
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()
