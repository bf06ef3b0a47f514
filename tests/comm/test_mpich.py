"""MPICH, from PyPI: ranks that its mpiexec starts, and an mpi4py that belongs to another MPI than the launcher."""
import os
import re
import subprocess
import sys

import theano_mgpu  # noqa: F401

import numpy as np
import pytest
from support import mpich
from support.launch import INTERPRETED, JOBS, alone, arrays

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
MPIRUN = ['mpirun', '--allow-run-as-root', '--oversubscribe']


@pytest.fixture(scope='module', autouse=True)
def installed():
    mpich.install()


def run(launcher, *words, env=None):
    """Run a Python program in two processes; return the CompletedProcess."""
    return subprocess.run([*map(str, launcher), '-n', '2', sys.executable, *map(str, words)], text=True, timeout=120,
                          capture_output=True, env=dict(env or os.environ, THEANO_FLAGS=INTERPRETED))


def test_training_under_mpich_equals_one_process(tmp_path):
    path, one = tmp_path / 'ranks.npz', tmp_path / 'one.npz'
    done = run([mpich.MPIEXEC], JOBS, 'train', path, 'a->cpu', 'plain', env=mpich.environment())
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r'rank (\d) trained', done.stdout)) == ['0', '1']
    assert 'freeing' not in done.stderr  # MPICH says so of requests that are left over
    alone('train', one, 'a->cpu', 'plain', flags=INTERPRETED)
    for ours, theirs in zip(arrays(path), arrays(one)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('launcher,env,message', [
    ([mpich.MPIEXEC], {}, r'mpiexec of MPICH or Intel MPI started 2 processes, but the MPI library of mpi4py, Open MPI '
     r"v\S+, finds 1: each would train by itself. Start them with Open MPI's mpirun or theano-mgpu launch; or install"),
    (MPIRUN, mpich.ENVIRONMENT, r"Open MPI's mpirun started 2 processes, but the MPI library of mpi4py, MPICH Version: "
     r'\S+, cannot connect them: each would train by itself. Start them with the mpiexec of that library; or install')],
    ids=['mpiexec of MPICH', 'mpirun of Open MPI'])
def test_an_mpi4py_of_another_mpi(launcher, env, message, tmp_path):
    """MPICH ended the process in MPI_Init."""
    env = dict(os.environ, **env)
    done = run(launcher, JOBS, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain', env=env)
    assert done.returncode and re.search('MgpuError: ' + message, done.stderr), done.stderr
    assert 'internal_Init' not in done.stderr and not (tmp_path / 'ranks.npz').exists()
    text, _, remedy = message.partition('. ')
    doctor = run(launcher, '-m', 'theano_mgpu', 'doctor', env=env).stdout
    assert re.search(r'job +FAIL +%s\n +remedy: %s' % (text, remedy), doctor), doctor
