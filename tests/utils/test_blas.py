"""The BLAS of a process: its threads, and its version."""
import os
import subprocess
import sys
import textwrap

from theano_mgpu.utils import blas

import numpy as np
import pytest
import theano
import theano.tensor as T
from threadpoolctl import threadpool_limits


@pytest.mark.needs_compiler
def test_the_library_that_theano_links_is_told_with_its_threads():
    x = T.matrix('x')
    theano.function([x], T.dot(x, x))(np.ones((3, 3), theano.config.floatX))
    if not any('openblas' in name for name in blas.loaded()):
        pytest.skip('the BLAS here is not OpenBLAS')
    for number in (2, 1):
        with threadpool_limits(number, user_api='blas'):
            for text in blas.loaded().values():
                assert text.endswith('threads=%d' % number)


@pytest.mark.parametrize('siblings,chosen,variable,expected', [
    (2, 4, None, 2), (3, 4, None, 1), (9, 4, None, 1), (1, 4, None, 4),
    (2, 3, None, 3), (2, 4, 'OMP_NUM_THREADS', 4)])
def test_processes_share_the_cores(siblings, chosen, variable, expected, monkeypatch):
    """A number that the user has chosen, by threadpoolctl or in the environment, stays."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: set(range(4)))
    monkeypatch.setattr(blas, '_siblings', lambda: siblings)
    for name in list(os.environ):
        if name.endswith('_NUM_THREADS'):
            monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, '4')
    with threadpool_limits(chosen, user_api='blas'):
        blas.share_cores()
        assert all(text.endswith('threads=%d' % expected) for text in blas.loaded().values())


@pytest.mark.slow
def test_processes_of_another_kind_do_not_count():
    """A parent starts three processes: the commands of two differ in a number alone."""
    child = 'import sys; from theano_mgpu.utils import blas; input(); print(blas._siblings())  # %d'
    parent = textwrap.dedent("""
        import subprocess, sys
        codes = ['input()', sys.argv[1] % 1, sys.argv[1] % 2]
        started = [subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, text=True) for code in codes]
        for each in started[::-1]:
            each.communicate('\\n')
    """)
    done = subprocess.run([sys.executable, '-c', parent, child], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ['2', '1']
