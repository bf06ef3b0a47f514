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
    env = cuda_on_cpu.environment(devices, base, **settings)
    env['THEANO_FLAGS'] = ','.join(filter(None, ['floatX=float32', 'contexts=', flags]))
    done = subprocess.run([sys.executable, '-c', PRELUDE + code], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()
