"""MPI jobs of tests: run a job of rank_jobs.py on several ranks or in one process, and read its results."""
import os
import subprocess
import sys

import numpy as np

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'rank_jobs.py')
# Interpreted: compiling would take most of the time in tests of processes.
INTERPRETED = 'floatX=float32,cxx=,optimizer=fast_compile'


def environment(flags):
    """Return the environment of a program with flags of Theano; without a compiler, GPUs are hidden."""
    return dict(os.environ, THEANO_FLAGS=flags, **({'CUDA_VISIBLE_DEVICES': ''} if 'cxx=,' in flags else {}))


def launch(ranks, *arguments, options=(), flags='floatX=float32', expected=0, mpirun=False, job=JOBS,
           folder=None):
    """Run a job of rank_jobs.py to its end; return the CompletedProcess."""
    start = ['mpirun', '--allow-run-as-root', '--oversubscribe', '-n', str(ranks)] + list(options) if mpirun else \
        ['-m', 'theano_mgpu', 'launch', '-n', str(ranks)] + list(options)
    command = (start if mpirun else [sys.executable] + start) + ([sys.executable] if mpirun else [])
    done = subprocess.run(command + [job] + [str(argument) for argument in arguments], capture_output=True, text=True,
                          env=environment(flags), timeout=300, cwd=folder)
    assert done.returncode == expected or expected is None, '%s\n%s' % (done.returncode, done.stderr)
    return done


def alone(*arguments, flags='floatX=float32'):
    """Run a job of rank_jobs.py in one process, without MPI."""
    done = subprocess.run([sys.executable, JOBS] + [str(argument) for argument in arguments], capture_output=True,
                          text=True, env=dict(os.environ, THEANO_FLAGS=flags), timeout=300)
    assert done.returncode == 0, done.stderr


def arrays(path):
    with np.load(str(path)) as file:
        return [file[name] for name in file.files]


def command_of(pid):
    try:
        with open('/proc/%d/cmdline' % pid) as f:
            return f.read()
    except OSError:  # it has ended
        return ''
