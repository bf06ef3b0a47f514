"""Contexts of the CPU whose parts processes compute: programs, since a process that has opened a GPU forks none."""
import pytest
from support import forked_cases
from support.launch import launch
from support.processes import python
from support.search_path import ROOT, search_path

CASES = ['exact', 'data_sets', 'drawn', 'killed', 'fails', 'interrupted', 'files', 'forked', 'updates', 'threads',
         'waiting', 'busy', 'generators', 'own_op', 'handled', 'children_of_the_script', 'state_of_the_script',
         'abandoned', 'full', 'limits', 'orphans', 'chosen', 'cores', 'left']


@pytest.mark.slow_but_with('fails', 'left', 'updates', 'full', 'state_of_the_script', 'handled',
                           'children_of_the_script', 'killed', 'limits')
@pytest.mark.parametrize('case', CASES)
def test_parts_that_processes_compute(case):
    python('-c', 'from support import forked_cases\nforked_cases.%s()' % case, flags='floatX=float32',
           PYTHONPATH=search_path(ROOT / 'tests', ROOT / 'benchmarks'), OMP_NUM_THREADS=None, KERAS_BACKEND='theano',
           CUDA_VISIBLE_DEVICES='')


@pytest.mark.slow
@pytest.mark.mpi
def test_the_contexts_of_a_rank_are_processes():
    assert launch(2, job=forked_cases.__file__).stdout.count('fine') == 1  # rank 0 prints
