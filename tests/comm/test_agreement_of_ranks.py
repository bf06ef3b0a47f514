"""Bugs that were found and fixed, each under its symptom: several processes."""
import json
import os
import threading
import types

import theano_mgpu as mgpu
from theano_mgpu.comm import joining
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.comm.rank_0 import write_on_rank_0
from theano_mgpu.utils import rank_process

import numpy as np
import pytest
import theano
from support.comparison import assert_bitwise
from support.launch import INTERPRETED, alone, arrays, launch
from support.processes import python

pytestmark = pytest.mark.verified


@pytest.mark.mpi
def test_a_rank_reads_what_it_has_saved_and_not_a_former_file_or_none(tmp_path):
    """Ranks other than 0 died in load_model, as they did not wait for the file. Guarded writes need no other rank."""
    from support import keras_rank_jobs as rank_jobs
    path = str(tmp_path / 'm')
    launch(2, 'save_and_load', path, job=os.path.abspath(rank_jobs.__file__), flags=INTERPRETED)
    ours, theirs = (arrays('%s.%d.npz' % (path, rank)) for rank in range(2))
    assert_bitwise(ours, theirs)
    *_, lines, best, first, second, third, saved = ours
    assert lines == 3 and np.isfinite(best)
    for found, expected in ((first, 1), (second, 2), (third, 2), (saved, 2)):
        assert (found == expected).all()
    for rank in range(2):
        with open('%s.%d.json' % (path, rank)) as file:
            errors = json.load(file)
        assert len(errors) == 3 and all('m.nowhere/m.h5 could not be written' in error for error in errors)
    assert not [name for name in os.listdir(str(tmp_path)) if 'unfinished' in name]


def test_a_rank_that_saves_alone_says_whom_it_waits_for(monkeypatch):
    ranks = Communicator()  # without MPI, whose other rank would have to hang
    ranks.rank, ranks.size, ranks.hosts = 1, 2, ['one', 'two']
    ranks.mailbox = types.SimpleNamespace(has_gone_on=lambda rank: False, take=lambda: None)
    monkeypatch.setattr(theano.config.mgpu, 'timeout', 1)
    with pytest.raises(mgpu.RankError, match=r'rank 1 \(host two\) has waited 1 s for rank 0 \(host one\) to write m'):
        write_on_rank_0(ranks, 'm.h5', lambda: None)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('flag', [
    'overlap=True', 'overlap=False', 'update_on=sharded'])
def test_a_failure_of_one_rank_late_in_a_step_is_one_of_all(flag, tmp_path):
    """The other ranks had new weights, and went on if the script caught the error: 0.2467 against 0.2127."""
    launch(2, 'late_failures', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10,mgpu.' + flag)
    for rank in range(2):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert len(found['met']) == 9
        for place, kind, unchanged in found['met']:
            assert kind == 'MemoryError' and unchanged, (rank, place, kind)
        assert all(found['same']) and len(found['same']) > 3


@pytest.mark.mpi
def test_a_compile_error_on_the_first_rank_is_one_of_all(tmp_path):
    """The others waited for the first rank for ever; and float16 was an error of mpi4py's, "KeyError: 'e'"."""
    launch(2, 'compile_errors', tmp_path / 'met', flags=INTERPRETED + ',mgpu.timeout=10')
    own = 'MemoryError: no memory left'
    for rank in range(2):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        assert [text.partition('\n')[0] for text in found['met']] == [own, own]  # a note may follow
        x = np.arange(12, dtype='float32').reshape(4, 3) / 8
        expected = 1 - 0.1 * 2 * (x ** 2).sum(axis=0) / 12
        np.testing.assert_allclose(found['w'], expected, rtol=2e-3)
        assert found['dtype'] == 'float16'


@pytest.mark.slow
@pytest.mark.mpi
def test_garbage_that_one_rank_has_collected_and_another_one_has_not_makes_no_difference(tmp_path):
    """"RankError: the ranks do different things. rank 0: sharing values; rank 1: compiling in turn"."""
    launch(2, 'collect', tmp_path / 'found.npz', flags=INTERPRETED)
    found, passed = arrays(tmp_path / 'found.npz')
    np.testing.assert_array_equal(found, np.ones((4, 3)))
    assert passed


@pytest.mark.slow
@pytest.mark.mpi
def test_two_threads_that_train_over_ranks_at_once_end_the_job():
    """One thread failed with MPI_ERR_REQUEST, and the exit code was 0."""
    done = launch(2, 'fail', 'threads', flags=INTERPRETED + ',mgpu.timeout=10', expected=1)
    assert 'MPI_ERR' not in done.stderr
    assert done.stderr.count(') failed:') in (1, 2)  # each rank has two threads; the first to fail ends the other
    assert 'one thread' in done.stderr


@pytest.mark.mpi
def test_launch_in_a_process_that_has_initialised_mpi(tmp_path):
    """A notebook had imported mpi4py: mpirun ended at once with code 1, and said nothing."""
    (tmp_path / 'job.py').write_text('print("a rank")')
    program = ('import subprocess, sys\nfrom mpi4py import MPI\n'
               'sys.exit(subprocess.call([sys.executable, "-m", "theano_mgpu", "launch", "-n", "2", "job.py"]))')
    assert python('-c', program, folder=tmp_path).stdout.count('a rank') == 2


ONE_THREAD = '''
import mpi4py
mpi4py.rc.thread_level = 'serialized'
import theano_mgpu as mgpu, theano, theano.tensor as T
mgpu.init('dev0->cpu')
x, w = T.matrix('x'), theano.shared(0.0, name='w')
mgpu.training_function([x], (w * x).sum(), [w], lambda gradients: {w: w - gradients[0]})
'''


@pytest.mark.slow
@pytest.mark.mpi
def test_overlap_with_an_mpi_for_one_thread_is_an_error(tmp_path):
    """Two threads used MPI at the same time, although a script had started it for one."""
    script = tmp_path / 'script.py'
    script.write_text(ONE_THREAD)
    done = launch(2, job=str(script), flags=INTERPRETED + ',mgpu.overlap=True', expected=1)
    assert 'MPI was started without MPI_THREAD_MULTIPLE' in done.stderr
    launch(2, job=str(script), flags=INTERPRETED)


def assert_ranks_give_the_answer_of_one_process(tmp_path, *job, flags=''):
    alone(job[0], tmp_path / 'one.npz', *job[1:], flags=INTERPRETED)
    launch(2, job[0], tmp_path / 'ranks.npz', *job[1:], flags=INTERPRETED + ',mgpu.timeout=20' + flags)
    for ours, theirs in zip(arrays(tmp_path / 'ranks.npz'), arrays(tmp_path / 'one.npz')):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('kind', ['norm', 'integers'])
def test_overlap_adds_each_sum_once_and_one_at_a_time(kind, tmp_path):
    """An early gradient was added twice by steps of several stages: 0.4924 in place of 0.5146, and no message.

    Without gradients to wait for, a sum of integers was exchanged while a thread was adding: MPI_ERR_TRUNCATE.
    """
    assert_ranks_give_the_answer_of_one_process(tmp_path, 'early_sums', kind, flags=',mgpu.overlap=True')


DIVIDED_UPDATES = {'reshaped': ('sharded', 9, 1), 'two_functions': ('sharded',), 'slices': ('sharded',)}


@pytest.fixture(scope='module')
def sharded_updates(tmp_path_factory):
    """Run jobs in one process, and on two ranks; return a function from a job to the results of both."""
    folder = tmp_path_factory.mktemp('divided')

    def words(start):
        jobs = [['then', job, '%s/%s_%s.npz' % (folder, start, job), *rest] for job, rest in DIVIDED_UPDATES.items()]
        return sum(jobs, [])[1:]
    alone(*words('alone'), flags=INTERPRETED)
    launch(2, *words('ranks'), flags=INTERPRETED + ',mgpu.timeout=20')
    return lambda job: [arrays('%s/%s_%s.npz' % (folder, start, job)) for start in ('ranks', 'alone')]


@pytest.mark.slow_with('reshaped')
@pytest.mark.mpi
@pytest.mark.parametrize('job', list(DIVIDED_UPDATES))
def test_a_sharded_update_is_that_of_one_process(job, sharded_updates):
    """A change of 4 columns to 9 failed; after a change to 1, one rank had one column, the other one 4 of them.

    A second function over the same state ended with IndexError: list index out of range, and one with a slice beside a
    list with AttributeError: 'Variable' object has no attribute 'ndim'.
    """
    for ours, theirs in zip(*sharded_updates(job)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


RANKS_DIFFER = """
import numpy as np
import theano_mgpu as mgpu
import keras, theano, theano.tensor as T

n, X = 2 if mgpu.rank() else 9, np.ones((9, 4), 'float32')
model = keras.Sequential([keras.layers.Dense(2, input_shape=(4,))])
model.compile('sgd', 'mse')
x = T.matrix('x')
doubled, total = theano.function([x], 2 * x, name='doubled'), theano.function([x], x.sum(), name='total')
divided, predictor = mgpu.function([x], 3 * x, name='divided'), mgpu.Predictor([x], 4 * x, name='predictor')


def differ(call):
    try:
        print(call(X[:n]))
    except mgpu.RankError as error:
        print(error)


differ(model.predict)
differ(lambda x: model.evaluate(x, x[:, :2], verbose=0))
differ(lambda x: model.fit(x, x[:, :2], verbose=0))
differ(model.predict_on_batch)
differ(doubled)
differ(divided)
differ(predictor.predict)
print(float(total(X[:n])), np.ndim(model.train_on_batch(X[:n], X[:n, :2])))  # all ranks take the batch of rank 0
print(model.predict(X.astype('float64') if n == 9 else X).shape)
print(model.predict(X).shape, doubled(X).shape, divided(X).shape, predictor.predict(X).shape)
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_that_are_given_different_numbers_of_samples_name_them(tmp_path):
    """"ValueError: could not broadcast input array from shape (9,2) into shape (2,2)"; or the rows of rank 0."""
    (tmp_path / 'script.py').write_text(RANKS_DIFFER)
    done = launch(2, '--always', tmp_path / 'script.py', job='run', flags=INTERPRETED + ',mgpu.timeout=10')
    *errors, scalars, types, after = done.stdout.splitlines()
    assert len(errors) == 7
    for name, error in zip(['sequential_1'] * 3 + ['predict_function', 'doubled', 'divided', 'predictor'], errors):
        host = os.uname().nodename
        assert error.startswith('%s was given batches of different lengths on the ranks: rank 0 (host %s) 9 samples, '
                                'rank 1 (host %s) 2 samples. Give each rank the whole batch' % (name, host, host))
    assert (scalars, types, after) == ('36.0 0', '(9, 2)', '(9, 2) (9, 4) (9, 4) (9, 4)')


ANOTHER_CALL = {  # what rank 0 and rank 1 do, and the beginning of the error
    'another loop': ('model.evaluate(X, X[:, :2])', 'model.predict(X)', 'the ranks'),
    'another function': ('f(X)', 'g(X)', 'the ranks do different things'),
    'no call, then the end': ('f(X)', '', 'rank 1 (host {host}) ended while others go on'),
    'no call': ('f(X)', 'time.sleep(60)', 'rank 0 (host {host}), in call 1 of f (number 0), has waited')}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('case', ANOTHER_CALL)
def test_ranks_whose_calls_differ_are_a_rank_error(case, tmp_path):
    *calls, beginning = ANOTHER_CALL[case]
    (tmp_path / 'script.py').write_text(RANKS_DIFFER.partition('def differ')[0].replace('divided, ', 'f, ').replace(
        "name='divided'", "name='f'") + 'import time\ng = mgpu.function([x], 5 * x)\n%s if n == 9 else %s\n'
        % tuple(call or 'None' for call in calls))
    done = launch(2, '--always', tmp_path / 'script.py', job='run', flags=INTERPRETED + ',mgpu.timeout=5', expected=1)
    assert 'RankError: ' + beginning.format(host=os.uname().nodename) in done.stderr


NAMELESS = """
import time
import numpy as np
import theano_mgpu as mgpu
from theano_mgpu.comm import mpi
import theano, theano.tensor as T

x, w, rank = T.matrix(), theano.shared(np.ones(3, 'float32')), mgpu.rank()
X, theta = theano.shared(np.random.RandomState(0).rand(100, 3).astype('float32')), T.vector('theta')
inputs = [T.scalar('number %d' % i) for i in range(40)]
step = mgpu.training_function([x], T.dot(x, w).sum(), [w], lambda gradients: {w: w - gradients[0]})
many = mgpu.function([x, *inputs], x.sum() * sum(inputs))
density = theano.function([theta], T.dot(X[:60], theta).sum())
rows = np.ones((8, 3), 'float32')


def late(done):
    time.sleep(1)
    yield 1e6  # the others have come after the last look, and the limit is over
    yield from poll(done)


def caught(call, *arguments):
    try:
        call(*arguments)
    except mgpu.RankError as error:
        print(error)


density(rows[0])
poll, mpi.poll = mpi.poll, late if rank == 0 else mpi.poll
caught(step, rows)
mpi.poll = poll
caught(many, rows, *range(39), rank)
X.set_value(X.get_value() + rank)
caught(density, rows[0])
w.set_value(np.full(3, rank, 'float32'))
caught(step, rows)
"""


@pytest.mark.mpi
def test_what_differs_between_ranks_is_named_as_in_the_script(tmp_path):
    """"has waited 600 s for , which did not come" in a step that went on; "which differ in :", where it was none of the
    first 32 inputs; and "Subtensor{:int64:}.0 on rank 1 alone".
    """
    script = tmp_path / 'script.py'
    script.write_text(NAMELESS)
    done = launch(2, '--always', script, job='run', flags=INTERPRETED + ',traceback.limit=8')
    number, data, weights = done.stdout.splitlines()
    assert 'differ in number 39: rank 0' in number
    assert '%s, line 13: density = ' % script in data and 'Subtensor' not in data
    assert 'the variable of "%s, line 8: x, w, rank = ' % script in weights and 'TensorType' not in weights


def test_a_start_of_mpi_that_takes_long_names_no_rank_if_all_have_come(monkeypatch):
    """"rank 0 has waited 30 s for rank  to import theano_mgpu"."""
    said, has_started = [], threading.Event()
    monkeypatch.setattr(joining, 'ranks_here', lambda: {0: True, 1: True})
    monkeypatch.setattr(joining, 'size', lambda: 2)
    monkeypatch.setattr(joining, 'LOOK', 1e-3)
    monkeypatch.setattr(joining, 'NOTED', 1e-3)
    monkeypatch.setattr(rank_process, 'say', lambda text: said.append(text) or has_started.set())
    joining._watch(has_started)
    assert len(said) == 1 and 'has waited 0 s for MPI to connect the ranks' in said[0]
