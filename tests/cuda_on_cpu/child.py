"""Child processes that run tests on the stand-in.

A process reads the settings once, and a device that has failed stays failed, so that each test needs a process. This
module and most test modules do not import pytest, as each child would spend a third of its time on that.
"""
import functools
import importlib
import os
import subprocess
import sys

from cuda_on_cpu import FOLDER, environment


def clean_environment():
    """Return this process's variables without settings of the stand-in, which would change the outcome of a test."""
    return {name: value for name, value in os.environ.items()
            if name == 'CUDA_ON_CPU_CACHE' or not name.startswith(('CUDA_ON_CPU_', 'CUDA_VISIBLE_DEVICES'))}


def python(*arguments, devices=2, base=None, timeout=300, **settings):
    """Run Python on the stand-in.

    Parameters
    ----------
    *arguments : str
        Of the interpreter.
    devices : int
        Number of devices.
    base : dict, optional
        The variables to start from.
    timeout : float
        In seconds.
    **settings
        Of the stand-in, as in `cuda_on_cpu.environment`.

    Returns
    -------
    subprocess.CompletedProcess
        With stdout and stderr as text.
    """
    env = environment(devices, clean_environment() if base is None else base, **settings)
    env['PYTHONPATH'] = os.pathsep.join(filter(None, [os.path.dirname(FOLDER), env.get('PYTHONPATH')]))
    return subprocess.run([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=timeout)


def run(function, devices=2, **settings):
    """Call a function of a module, or the body of a test that `on_standin` has wrapped, in a child process."""
    code = 'import sys; from cuda_on_cpu.child import call_body; call_body(*sys.argv[1:])'
    return python('-c', code, function.__module__, function.__name__, devices=devices, **settings)


def call_body(module, name):
    function = getattr(importlib.import_module(module), name)
    getattr(function, '__wrapped__', function)()


def on_standin(devices=2, **settings):
    """Decorate a test: its body runs in a child process on the stand-in."""
    def decorate(body):
        @functools.wraps(body)
        def test():
            done = run(body, devices, **settings)
            assert done.returncode == 0, done.stdout + done.stderr
        return test
    return decorate
