"""The duties of any communicator, on one process alone and on the ranks of an MPI job."""
import json

from theano_mgpu.comm.communicator import Communicator

import pytest
from support.communicator_cases import CASES
from support.launch import INTERPRETED, launch


@pytest.mark.parametrize('name', CASES)
def test_alone(name):
    CASES[name](Communicator())


@pytest.mark.mpi
@pytest.mark.parametrize('ranks', [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_of_an_mpi_job(ranks, tmp_path):
    """All cases share one job, since its start takes longer than they do; the job ends by a time-out, with an error."""
    done = launch(ranks, 'conformance', tmp_path / 'failed', expected=None,
                  flags=INTERPRETED + ',mgpu.timeout=20')
    failed = []
    for rank in range(ranks):
        with open('%s.%d' % (tmp_path / 'failed', rank)) as file:
            failed += json.load(file)
    assert not failed, '\n'.join(failed + [done.stderr])
    assert done.returncode == 1 and 'ends the job, since it has lost the other ranks' in done.stderr
