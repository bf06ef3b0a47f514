"""Batches in several processes: each way of feeding gives all ranks rank 0's batches, the same as in one process."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support.launch import INTERPRETED, environment

pytestmark = pytest.mark.mpi
CASES = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', 'support', 'feeding_cases.py'))


def results(path, which, *command):
    """Return the findings of each rank, a list of dicts; without a command one process finds them."""
    subprocess.run([sys.executable, *command, CASES, path, which], check=True, timeout=600,
                   env=environment(INTERPRETED))
    found = []
    for rank in range(2 if command else 1):
        with open('%s.%d' % (path, rank)) as file:
            found.append(json.load(file))
    return found


def launched(*options):
    return ('-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--quiet') + options


def assert_same(ours, theirs, tolerance, without=()):
    assert set(ours) == set(theirs) and len(ours) > 4
    for name in set(ours) - set(without):
        assert set(ours[name]) == set(theirs[name]), name
        for key, values in theirs[name].items():
            np.testing.assert_allclose(ours[name][key], values, rtol=tolerance, atol=tolerance / 10, err_msg=name)


@pytest.mark.parametrize('which,options', [
    ('few', ('--always',)), pytest.param('all', ('--always',), marks=pytest.mark.slow),
    pytest.param('all', (), marks=pytest.mark.slow)])
def test_every_way_to_feed_a_model_gives_the_results_of_one_process(which, options, tmp_path):
    """The random state was set while a thread drew from it: "the ranks were given different batches"."""
    plain, = results(str(tmp_path / 'plain'), which)
    first, second = results(str(tmp_path / 'ranks'), which, *launched(*options))
    racing = ['racing threads']  # plain Keras does not repeat their order, either
    assert_same(first, plain, 1e-4, without=racing)
    assert_same(second, first, 0)


@pytest.mark.slow  # above, the ranks draw different numbers in callbacks
@pytest.mark.parametrize('which,options', [('few', ()), ('all', ('--always',)), ('all', ())])
def test_ranks_that_draw_numbers_of_their_own_train_on_the_batches_of_rank_0(which, options, tmp_path):
    """Ranks with batches of other lengths chose differently whether to divide them: "the ranks do different things"."""
    first, second = results(str(tmp_path / 'ranks'), which + ',unseeded', *launched(*options))
    assert_same(second, first, 0)
