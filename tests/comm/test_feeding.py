"""Batches in several processes: each way of feeding gives all ranks rank 0's batches, the same as in one process."""
import json
import subprocess
import sys

import numpy as np
import pytest
from support.launch import INTERPRETED, environment
from support.search_path import PROGRAMS

pytestmark = pytest.mark.mpi
CASES = str(PROGRAMS / 'feeding_cases.py')
ASKING = str(PROGRAMS / 'asking_cases.py')


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


@pytest.mark.slow
@pytest.mark.parametrize('which,options', [
    ('few', ('--always',)), ('all', ('--always',)),
    ('all', ())])
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


def asked(path, workers, *command, flags=INTERPRETED, **environ):
    """Return the findings of each rank in the asking cases, a dict of lists; without a command one process finds them.
    """
    subprocess.run([sys.executable, *command, ASKING, path, str(workers)], check=True, timeout=300,
                   env=dict(environment(flags), **environ))
    found = []
    for rank in range(2 if command else 1):
        with open('%s.%d' % (path, rank)) as file:
            found.append({name: {'results': results} for name, results in json.load(file).items()})
    return found


@pytest.fixture(scope='module')
def asked_by_one(tmp_path_factory):
    """Return the findings of one process in the asking cases."""
    plain, = asked(str(tmp_path_factory.mktemp('one') / 'plain'), 0)
    return plain


@pytest.mark.slow
@pytest.mark.parametrize('options,flags', [
    (('--always',), ''), ((), ''), (('--always',), ',mgpu.update_on=sharded')])
def test_a_generator_calls_functions_as_in_one_process(options, flags, asked_by_one, tmp_path):
    """"RankError: the ranks do different things", whatever a Keras script did about it."""
    first, second = asked(str(tmp_path / 'ranks'), 0, *launched(*options), flags=INTERPRETED + flags)
    assert_same(first, asked_by_one, 1e-4)
    assert_same(second, first, 0)


@pytest.mark.slow
@pytest.mark.parametrize('options', [('--always',), ()])
def test_what_a_generator_has_called_in_its_thread_leaves_all_ranks_alike(options, tmp_path):
    """"MgpuError: two threads of rank 0 use functions over the ranks". Each run makes other batches ahead."""
    first, second = asked(str(tmp_path / 'ranks'), 1, *launched(*options))
    assert_same(second, first, 0)


REFUSED = """
import theano_mgpu as mgpu
import numpy as np
import theano.tensor as T
from keras import backend as K
from keras.layers import Dense
from keras.models import Sequential
x = T.matrix('x')
total = mgpu.function([x], x.sum())
model = Sequential([Dense(1, input_dim=2)])
model.compile('adam', 'mse')
def batches():
    for number in range(9):
        yield np.ones((2, 2)), np.ones((2, 1))
        CALL
model.fit_generator(batches(), 3, workers=0)
"""
CALLS = {'a function over the ranks': 'total(np.ones((2, 2)))',
         'a divided state is read': 'K.get_value(model.optimizer.weights[1])',
         'a divided state is set': 'K.set_value(model.optimizer.weights[1], np.zeros((2, 1)))'}


@pytest.mark.slow_but_with('a function over the ranks')
@pytest.mark.parametrize('call', CALLS)
def test_what_a_generator_cannot_call_is_refused_with_advice_for_its_script(call, tmp_path):
    script = tmp_path / 'train.py'
    script.write_text(REFUSED.replace('CALL', CALLS[call]))
    done = subprocess.run([sys.executable, *launched('--always'), str(script)], stderr=subprocess.PIPE, timeout=300,
                          universal_newlines=True, env=environment(INTERPRETED + ',mgpu.update_on=sharded'))
    assert done.returncode == 1 and 'computes alone what a generator or Sequence calls' in done.stderr, done.stderr
    assert 'before the loop, or in a callback' in done.stderr
