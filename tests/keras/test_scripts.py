"""Scripts like Keras's examples (programs/keras_scripts): unchanged, on two contexts, with the same seed."""
import os
import runpy
import sys

from theano_mgpu.keras import disable, enable

import numpy as np
import pytest
from support.processes import python
from support.search_path import PROGRAMS

FOLDER = str(PROGRAMS / 'keras_scripts')
SCRIPTS = sorted(name[:-len('.py')] for name in os.listdir(FOLDER) if name.endswith('.py'))
QUICK = ('mnist_mlp',)

pytestmark = pytest.mark.needs_compiler
each_script = pytest.mark.parametrize('name', [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
                                               for name in SCRIPTS])


def close_to(loss):
    """Return a value that equals losses within 1e-4, or within the ten-thousandth of a small loss."""
    return pytest.approx(loss, rel=0, abs=1e-4 * min(1.0, abs(loss)))


def path_of(name):
    return os.path.join(FOLDER, name + '.py')


@pytest.fixture
def final_loss(monkeypatch, capsys, contexts):
    """Return a function that runs a script, in plain Keras or on two contexts of a kind, and reads its last loss."""
    def run(name, *args, kind=None):
        report = None
        if kind:
            contexts(kind, 2)
            report = enable(always=True)
        monkeypatch.setattr(sys, 'argv', [path_of(name)] + list(args))
        try:
            runpy.run_path(path_of(name), run_name='__main__')
        finally:
            disable()
        if report is not None:
            assert report.usages and all(len(usage.contexts) == 2 for usage in report.usages)
        return loss_in(capsys.readouterr().out)
    return run


def loss_in(output):
    title, _, value = output.splitlines()[-1].partition(': ')
    assert title == 'Test loss'
    return float(value)


@each_script
def test_the_final_loss_is_that_of_one_device(name, final_loss):
    """Without dropout, or noise, only NumPy draws random numbers."""
    expected = final_loss(name, '0')
    assert np.isfinite(expected)
    assert final_loss(name, '0', kind='cpu') == close_to(expected)


@pytest.mark.opencl
@pytest.mark.slow
@pytest.mark.parametrize('name', SCRIPTS)
def test_on_two_gpus_too(name, final_loss):
    assert final_loss(name, '0', kind='gpu') == close_to(final_loss(name, '0'))


@pytest.mark.slow
@each_script
def test_with_dropout_it_is_reproducible(name, final_loss):
    """The first argument of each script is its dropout rate, or the noise of the variational autoencoder."""
    first, second = (final_loss(name, '0.3', kind='cpu') for _ in range(2))
    assert first == second and np.isfinite(first)


@pytest.mark.slow
def test_the_command_gives_the_same(own_draws, final_loss, tmp_path):
    done = python('-m', 'theano_mgpu', 'run', '--contexts', 'a->cpu;b->cpu', path_of('mnist_mlp'), '0', folder=tmp_path)
    assert loss_in(done.stdout) == close_to(final_loss('mnist_mlp', '0', kind='cpu'))
