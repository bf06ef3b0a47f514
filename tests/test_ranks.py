"""Several processes through MPI: real jobs of real ranks, against one process; and what becomes of their faults."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import rank_data_jobs, rank_network
from support.devices import context_map
from support.launch import INTERPRETED, JOBS, alone, arrays, launch

pytestmark = pytest.mark.mpi


def assert_same(path, other, tolerance):
    pairs = list(zip(arrays(path), arrays(other)))
    assert len(pairs) == len(arrays(other)) > 3
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


# --- the same answer -----------------------------------------------------------------------------

@pytest.fixture(scope='module')
def one_context(tmp_path_factory):
    """What one process with one context computes, without dropout."""
    path = tmp_path_factory.mktemp('ranks') / 'one.npz'
    alone('train', path, 'a->cpu', 'plain')
    return path


@pytest.mark.parametrize('ranks,contexts', [
    (2, 'a->cpu;b->cpu;c->cpu;d->cpu'), pytest.param(2, 'a->cpu', marks=pytest.mark.slow),
    pytest.param(3, 'a->cpu', marks=pytest.mark.slow)])
def test_training_is_that_of_one_process_with_one_context(ranks, contexts, one_context, tmp_path):
    """Weights, optimizer state, running mean, count, outputs; batches with fewer samples than replicas among them."""
    launch(ranks, 'train', tmp_path / 'ranks.npz', contexts, 'plain')
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)


@pytest.mark.slow
def test_random_draws_are_those_of_one_process_with_as_many_contexts(tmp_path):
    alone('train', tmp_path / 'one.npz', 'a->cpu;b->cpu')
    done = launch(2, 'train', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', mpirun=True)
    assert_same(tmp_path / 'ranks.npz', tmp_path / 'one.npz', 1e-6)
    assert sorted(re.findall(r'rank (\d) trained on (\w)', done.stdout)) == [('0', 'a'), ('1', 'b')]


@pytest.mark.opencl
@pytest.mark.cuda
@pytest.mark.slow
def test_gpus(one_context, tmp_path):
    """Ranks on OpenCL (or CUDA) contexts."""
    launch(2, 'train', tmp_path / 'ranks.npz', context_map('gpu', 2), 'plain', 'compiled')
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('ranks,contexts', [(2, 2), (2, 4)])
@pytest.mark.parametrize('script,arguments', [
    ('keras_mnist', ['--epochs', '2', '--gpus']), ('mnist_cnn', ['--epochs', '2', '--contexts'])])
def test_the_published_scripts(script, arguments, ranks, contexts, tmp_path, monkeypatch):
    """Unchanged, with ragged epochs: in float64, since ReLU and max-pooling amplify float32's rounding."""
    (tmp_path / 'keras.json').write_text('{"backend": "theano", "floatx": "float64"}')
    monkeypatch.setenv('KERAS_HOME', str(tmp_path))
    flags = 'floatX=float64,contexts=%s' % ';'.join('h%d->cpu' % i for i in range(contexts))
    alone('script', tmp_path / 'one.npz', script, *arguments, 1, flags=flags)
    done = launch(ranks, 'script', tmp_path / 'ranks.npz', script, *arguments, contexts, flags=flags)
    assert_same(tmp_path / 'ranks.npz', tmp_path / 'one.npz', 1e-10)
    assert done.stdout.count('data: ') == 1


# --- two hosts -----------------------------------------------------------------------------------

def launch_on(hosts, *arguments, meanwhile=None):
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', '--hosts', ','.join(hosts.hosts), JOBS]
    return hosts.run(command + [str(argument) for argument in arguments], {'THEANO_FLAGS': 'floatX=float32'}, 300,
                     meanwhile)


def test_two_hosts(two_hosts, one_context, tmp_path):
    before = two_hosts.first.sent_bytes(), two_hosts.second.sent_bytes()
    done = launch_on(two_hosts, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain')
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)
    parameters = 4 * (6 * 16 + 16 + 16 * 3)
    for host, sent in zip((two_hosts.first, two_hosts.second), before):
        assert host.sent_bytes() - sent > len(rank_network.RAGGED) * 3 * parameters


@pytest.mark.slow
@pytest.mark.parametrize('how,code,message', [
    ('raise', 1, 'rank 1 of 2 (host {host}, process'), ('kill', 137, 'on node {address} exited on signal 9'),
    ('cable', 205, 'lost communication')])
def test_what_ends_a_rank_on_another_host(how, code, message, two_hosts):
    def pull():
        while len([pid for pid in two_hosts.second.pids() if 'rank_jobs' in command_of(pid)]) < 1:
            time.sleep(0.1)
        time.sleep(10)
        two_hosts.connect(False)
    began = time.time()
    done = launch_on(two_hosts, 'fail', 'sleep' if how == 'cable' else how, meanwhile=pull if how == 'cable' else None)
    failed = re.search(r'failing at (\S+)', done.stdout)
    assert time.time() - (float(failed.group(1)) if how != 'cable' else began + 10) < (10 if how != 'cable' else 60)
    assert done.returncode == code, done.stderr
    assert message.format(host=two_hosts.second.name, address=two_hosts.second.address) in done.stderr


def command_of(pid):
    try:
        with open('/proc/%d/cmdline' % pid) as f:
            return f.read()
    except OSError:  # it has ended
        return ''


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_one_rank_compiles_and_the_others_find_it(tmp_path):
    launch(3, 'compile_once', tmp_path / 'found', flags='floatX=float32,base_compiledir=%s' % (tmp_path / 'compiled'))
    found = []
    for rank in range(3):
        with open('%s.%d' % (tmp_path / 'found', rank)) as f:
            found.append(json.load(f))
    assert found[0]['compiled'] and found[1]['compiled'] == found[2]['compiled'] == []


# --- each rank its own data ----------------------------------------------------------------------

def test_ranks_that_feed_their_own_data_may_end_early(tmp_path, contexts):
    """Rank 1 has no data at all, rank 2 less than rank 0."""
    launch(3, 'shard', tmp_path / 'ranks.npz', 4, 0, 2, flags=INTERPRETED)
    contexts('cpu', 1)
    network = rank_network.Network(dropout=False, seed=0)
    batches = list(network.batches())
    for number in range(4):
        parts = [batches[number * 3 + rank] for rank, n in enumerate((4, 0, 2)) if number < n]
        network.step(*map(np.concatenate, zip(*parts)))
    for ours, theirs in zip(arrays(tmp_path / 'ranks.npz'), network.values()):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_samples_that_meet_and_have_states_may_be_on_several_ranks(tmp_path):
    """Ranks feed 3 and 2 samples of a batch, at the end 3 and none; a rate comes with each call."""
    launch(2, 'coupled_shards', tmp_path / 'ranks', flags=INTERPRETED)
    alone('coupled_shards', tmp_path / 'one', flags=INTERPRETED)
    first, last = arrays(tmp_path / 'ranks.0.npz'), arrays(tmp_path / 'ranks.1.npz')
    one = arrays(tmp_path / 'one.0.npz')
    np.testing.assert_allclose(first[:3], one[:3], rtol=1e-10)                           # losses
    np.testing.assert_allclose(last[:2], one[:2], rtol=1e-10)
    for number in range(2):                                                              # states
        np.testing.assert_allclose(np.concatenate([first[3 + number], last[2 + number]]), one[3 + number], rtol=1e-10)
    np.testing.assert_allclose(first[5], one[5], rtol=1e-10)
    np.testing.assert_array_equal(last[-1], last[3])
    for weights in (first[-2], last[-2]):
        np.testing.assert_allclose(weights, one[-2], rtol=1e-10)


@pytest.mark.parametrize('calls', [(4, 4), (4, 3)], ids=['slices nothing at last', 'ends early'])
def test_ranks_may_slice_batches_from_their_own_parts_of_a_data_set(calls, tmp_path):
    """Rank 0 has 14 samples, 4 a batch, and rank 1 has 9: it is through with them before the last batch."""
    launch(2, 'sharded_slices', tmp_path / 'ranks', *calls, options=['--sharded'], flags=INTERPRETED)
    found = [arrays(tmp_path / ('ranks.%d.npz' % rank)) for rank in range(2)]
    x, w = T.matrix('x', 'float64'), theano.shared(np.eye(4), 'w')
    outputs, updates, _ = rank_data_jobs.sliced({}, x, w)
    step = theano.function([x], outputs, updates=updates, mode=rank_network.PYTHON)
    first, last = np.split(rank_data_jobs.SLICED, [14])
    for i in range(4):
        cost, rows = step(np.concatenate([part[i * 4:(i + 1) * 4] for part in (first, last)]))
        own = len(first[i * 4:(i + 1) * 4])
        for rank, expected in enumerate((rows[:own], rows[own:])):
            if i < calls[rank]:
                np.testing.assert_allclose(found[rank][2 * i], cost, rtol=1e-12)
                np.testing.assert_allclose(found[rank][2 * i + 1], expected, rtol=1e-12)
    for each in found:
        np.testing.assert_allclose(each[-1], w.get_value(), rtol=1e-12)


def test_what_cannot_be_computed_in_parts_is_computed_by_each_rank(tmp_path):
    done = launch(2, 'refused', tmp_path / 'ranks', flags=INTERPRETED)
    alone('refused', tmp_path / 'one', flags=INTERPRETED)
    expected = arrays(tmp_path / 'one.0.npz')
    for rank in range(2):
        *ours, error = arrays(tmp_path / ('ranks.%d.npz' % rank))
        assert 'each process has samples of its own' in str(error) and 'CumOp' in str(error)
        for one, other in zip(ours, expected):
            np.testing.assert_allclose(one, other, rtol=1e-10)
    assert 'runs whole on a->cpu' in done.stderr


# --- faults --------------------------------------------------------------------------------------

def test_ranks_that_disagree_are_told_so_at_once(tmp_path):
    launch(2, 'disagree', tmp_path / 'met', flags=INTERPRETED)
    for rank in range(2):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        met = {name: (kind, text) for name, kind, text in found['met']}
        assert met['lengths'][0] == 'BatchError' and '7 samples, rank 1 (host' in met['lengths'][1]
        assert met['data'][0] == 'BatchError' and 'different batches of 7 samples' in met['data'][1]
        assert met['functions'][0] == 'RankError' and 'in call 1 of predict' in met['functions'][1]
        assert met['model'][0] == 'RankError' and 'w2 float32(16, 3)' in met['model'][1]
        assert met['weights'][0] == 'RankError' and 'those that were set (here: w1)' in met['weights'][1]
        assert met['after all'] == ('nothing', '')
        assert found['unchanged']
        kind, text = met['replica']
        if rank:
            assert kind == 'ReplicaError' and 'no memory left' in text
        else:
            assert kind == 'RankError' and re.match(r'rank 1 \(host .*\) failed in this step', text)


@pytest.mark.parametrize('how,code,message', [
    ('raise', 1, 'rank 1 of 2 (host {host}, process'), ('kill', 137, 'exited on signal 9 (Killed)'),
    ('replica', 1, 'MemoryError: no memory left'),
    ('output', 1, 'ValueError: the data of step 5 are bad'),
    pytest.param('hook', 1, 'ValueError: the data of step 5 are bad', marks=pytest.mark.slow),
    pytest.param('sleep', 1, 'has waited 2 s for rank 1 (host {host})', marks=pytest.mark.slow),
    pytest.param('exit', 1, 'rank 1 (host {host}) ended while others go on', marks=pytest.mark.slow),
    pytest.param('raise everywhere', 1, 'rank 0 of 2 (host {host}, process', marks=pytest.mark.slow),
    pytest.param('segfault', 139, 'Fatal Python error: Segmentation fault', marks=pytest.mark.slow)])
def test_what_ends_one_rank_ends_all(how, code, message):
    done = launch(2, 'fail', how, options=['--timeout', '2'] if how == 'sleep' else [], expected=code,
                  flags=INTERPRETED)
    seconds = time.time() - float(re.search(r'failing at (\S+)', done.stdout).group(1))
    assert seconds < 10
    assert message.format(host=os.uname().nodename) in done.stderr
    assert done.stdout.startswith('rank 0 began\n') and 'rank 1 began' not in done.stdout
    hooks = how not in ('kill', 'segfault', 'hook')
    assert 'MPI_ABORT' not in done.stderr and done.stderr.count(') failed:') == hooks
    assert 'therefore given up' not in done.stderr
    if how == 'raise':
        assert 'ValueError: the data of step 5 are bad' in done.stderr and 'rank 1 began' in done.stderr


@pytest.mark.parametrize('where,message', [
    ('all_reduce', 'adding up what each rank has computed, has waited 1 s for data from rank 1'),
    ('agree', 'at the end of a step, has waited 1 s for rank 1 (host {host})'),
    pytest.param('gather_object', 'sharing values, has waited 10 s for rank 1', marks=pytest.mark.slow),
    pytest.param('meet', 'in call 2 of train (number 0), has waited 1 s for rank 1', marks=pytest.mark.slow),
    pytest.param('all_gather', 'gathering the rows of a batch, has waited 1 s for rank 1', marks=pytest.mark.slow),
    pytest.param('broadcast_object', 'sharing values, has waited 10 s for rank 1', marks=pytest.mark.slow),
    pytest.param('broadcast', 'sharing values, has waited 10 s for rank 1', marks=pytest.mark.slow),
    pytest.param('first_compiler', 'compiling in turn, has waited 10 s for rank 1', marks=pytest.mark.slow),
    pytest.param('prediction', 'has had a batch to compute for 1 s and does not answer', marks=pytest.mark.slow),
    pytest.param('end of prediction', 'has had a prediction to end for 1 s', marks=pytest.mark.slow),
    pytest.param('end', 'at its end, has waited 10 s for rank 1', marks=pytest.mark.slow),
    pytest.param('finalize', 'Timeout (0:00:01)!', marks=pytest.mark.slow)])
def test_a_stopped_rank_ends_the_job(where, message, tmp_path):
    """By SIGSTOP, as by a debugger or a machine that is out of memory; slow: ten times the limit where others may work.
    """
    done = launch(2, 'stopped', where, tmp_path / 'state.npz', options=['--timeout', '1'], expected=1,
                  flags=INTERPRETED)
    assert message.format(host=os.uname().nodename) in done.stderr


def test_a_killed_job_goes_on_from_its_last_checkpoint(tmp_path):
    done = launch(2, 'checkpoints', tmp_path / 'ranks.npz', tmp_path / 'ckpt.npz', 4, 11, options=['--restarts', '3'],
                  flags=INTERPRETED)
    assert 'exit code 137' in done.stderr and 'restart 1 of 3' in done.stderr and 'restart 2' not in done.stderr
    *ours, done_before = arrays(tmp_path / 'ranks.npz')
    assert done_before == 8
    alone('checkpoints', tmp_path / 'whole.npz', tmp_path / 'whole.ckpt.npz', 100, -1, flags=INTERPRETED)
    for a, b in zip(ours, arrays(tmp_path / 'whole.npz')):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize('delay', [0.0, 0.3, 0.7])
def test_a_kill_at_any_moment_leaves_a_whole_file(delay, tmp_path):
    """A checkpoint after each step: most of the time rank 0 is writing one."""
    file = tmp_path / 'ckpt.npz'
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', JOBS, 'checkpoints', tmp_path / 'r.npz', file,
               '1', '-1', '1000']
    job = subprocess.Popen(list(map(str, command)), env=dict(os.environ, THEANO_FLAGS='floatX=float32'),
                           stderr=subprocess.DEVNULL)
    while not file.exists():
        time.sleep(0.01)
    time.sleep(delay)
    for pid in os.listdir('/proc'):
        if pid.isdigit() and str(file) in command_of(int(pid)) and 'launch' not in command_of(int(pid)) \
                and 'mpirun' not in command_of(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
            break
    assert job.wait(60) == 137
    done = int(dict(np.load(str(file)))['extra/calls'])
    assert 0 < done < 6000
    rounds = done // 6 + 2
    launch(2, 'checkpoints', tmp_path / 'r.npz', file, 1, -1, rounds)
    launch(2, 'checkpoints', tmp_path / 'whole.npz', tmp_path / 'w.npz', 10 ** 6, -1, rounds)
    for ours, theirs in zip(arrays(tmp_path / 'r.npz')[:-1], arrays(tmp_path / 'whole.npz')):
        np.testing.assert_array_equal(ours, theirs)


# --- prediction ----------------------------------------------------------------------------------

@pytest.mark.parametrize('ranks,contexts,per_context', [
    (2, 'a->cpu', 1), pytest.param(3, 'a->cpu;b->cpu;c->cpu;d->cpu;e->cpu;f->cpu', 2, marks=pytest.mark.slow)])
def test_batches_are_dealt_to_all_ranks(ranks, contexts, per_context, tmp_path):
    """Rank 0's batches and weights; its order; the result of `predict` on each rank."""
    path = str(tmp_path / 'predicted')
    launch(ranks, 'predict', path, contexts, per_context)
    told = []
    for rank in range(ranks):
        with open('%s.%d.json' % (path, rank)) as f:
            told.append(json.load(f))
    data, first, second, after, outputs, sums = arrays(path + '.0.npz')
    np.testing.assert_allclose(outputs, np.tanh(data.dot(first)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, data.sum(axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after, np.tanh(data[:3].dot(second)), rtol=1e-5, atol=1e-6)
    for rank in range(1, ranks):
        np.testing.assert_array_equal(arrays('%s.%d.npz' % (path, rank))[4], outputs)
        assert not told[rank]['found'] and not told[rank]['read'] and not told[rank]['errors']
    # A rank that still compiles gets none; on a busy machine the others may be through by then.
    assert sum(sum(of_rank['calls']) > 0 for of_rank in told) > 1

    in_flight = sum(len(of_rank['calls']) for of_rank in told) + 2 * ranks
    found = np.array(told[0]['found'])
    with_first, with_second = (np.tanh(data[:200].dot(w)).reshape(found.shape) for w in (first, second))
    changed = [np.allclose(batch, new, rtol=1e-4) for batch, new in zip(found, with_second)]
    assert changed == sorted(changed) and not any(changed[:8]) and all(changed[8 + in_flight:]) and changed[-1]
    np.testing.assert_allclose(found[np.logical_not(changed)], with_first[np.logical_not(changed)], rtol=1e-4)

    ok, (index, message, cause), also_ok = told[0]['errors']
    assert (ok, index, also_ok) == (5, 1, 7) and 'batch 1 failed on context' in message
    assert told[0]['message'].startswith('0 batch 0 failed') and 'one map at a time' in told[0]['message']
    assert all(of_rank['message'].startswith('0 batch 0 failed') for of_rank in told)


def test_a_rank_that_keeps_a_batch(tmp_path):
    done = launch(2, 'hang', 'nowhere', flags=INTERPRETED + ',mgpu.timeout=2', expected=None)
    assert done.returncode != 0
    assert re.search(r'rank 1 \(host .*\) has had a batch to compute for 2 s and does not answer', done.stderr)


@pytest.mark.opencl
@pytest.mark.slow
def test_prediction_on_gpus(tmp_path):
    path = str(tmp_path / 'predicted')
    launch(2, 'predict', path, context_map('gpu', 2), flags='floatX=float32')
    data, first, _, _, outputs, _ = arrays(path + '.0.npz')
    np.testing.assert_allclose(outputs, np.tanh(data.dot(first)), rtol=1e-5, atol=1e-6)
