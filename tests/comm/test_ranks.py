"""Several processes through MPI: real jobs of real ranks, against one process."""
import json
import re
import sys
import time

import numpy as np
import pytest
from support import rank_network
from support.devices import context_map
from support.launch import INTERPRETED, JOBS, alone, arrays, launch

pytestmark = pytest.mark.mpi


def assert_same(path, other, tolerance):
    pairs = list(zip(arrays(path), arrays(other)))
    assert len(pairs) == len(arrays(other)) > 3
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope='module')
def one_context(tmp_path_factory):
    """Return the results of one process with one context, without dropout."""
    path = tmp_path_factory.mktemp('ranks') / 'one.npz'
    alone('train', path, 'a->cpu', 'plain')
    return path


FOUR = 'a->cpu;b->cpu;c->cpu;d->cpu'
WAYS = {'four contexts': (FOUR, 'mgpu.update_on=auto'), 'sharded': ('a->cpu', 'mgpu.update_on=sharded'),
        'overlap': ('a->cpu', 'mgpu.overlap=True')}


@pytest.fixture(scope='module')
def two_ranks(tmp_path_factory):
    """Train on two ranks in each way, in one job; return a dict from the way to its results, and the output."""
    folder = tmp_path_factory.mktemp('ranks')
    paths = {way: folder / ('%d.npz' % i) for i, way in enumerate(WAYS)}
    words = [['then', 'train', paths[way], contexts, 'plain', flag] for way, (contexts, flag) in WAYS.items()]
    return paths, launch(2, *sum(words, [])[1:]).stdout


@pytest.mark.slow_but_with('sharded')
@pytest.mark.parametrize('way', ['four contexts', 'sharded'])
def test_training_on_two_ranks_is_that_of_one_process_with_one_context(way, two_ranks, one_context):
    """Weights, optimizer state, running mean, count and outputs agree, also after batches of few samples."""
    assert_same(two_ranks[0][way], one_context, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('ranks,contexts,update_on', [
    (2, 'a->cpu', 'auto'), (3, 'a->cpu', 'sharded'), (3, 'a->cpu', 'auto'), (2, FOUR, 'sharded'),
    (2, 'a->cpu;b->cpu;c->cpu', 'sharded')])  # one context, and two
def test_training_is_that_of_one_process_with_one_context(ranks, contexts, update_on, one_context, tmp_path):
    flags = 'floatX=float32,mgpu.update_on=' + update_on
    launch(ranks, 'train', tmp_path / 'ranks.npz', contexts, 'plain', flags=flags)
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)


def noted(path, rank):
    with open('%s.%d' % (path, rank)) as f:
        return json.load(f)


@pytest.mark.slow
def test_each_rank_has_its_part_of_a_divided_state(tmp_path):
    """A state that is saved with a sharded update is loaded with a whole one, too; both go on alike, bit by bit."""
    file, file_of_device = tmp_path / 'state.npz', tmp_path / 'device.npz'
    first, device, sharded, last = paths = [tmp_path / ('%d.npz' % i) for i in range(4)]
    launch(2, 'divided', first, file, 'sharded', 'then', 'divided', device, file, 'device',
           'then', 'divided', sharded, file, 'sharded', 'then', 'divided', last, file_of_device, 'device',
           flags=INTERPRETED)
    assert not set(noted(first, 0)) & set(noted(first, 1)) and len(noted(first, 0) + noted(first, 1)) == 6  # Adam's
    assert noted(last, 0) == noted(last, 1) == []
    for path in paths[1:]:
        for ours, theirs in zip(arrays(path), arrays(first)):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_divided_state_is_read_on_every_rank(tmp_path):
    launch(2, 'read_alone', tmp_path / 'met', flags=INTERPRETED)
    for rank in range(2):
        assert "rank 0 (host" in noted(tmp_path / 'met', rank) and \
            "reading a value of which each rank has a part (update_on='sharded')" in noted(tmp_path / 'met', rank)


def test_training_with_overlap_on_two_ranks(two_ranks, one_context):
    """Gradients are exchanged on another thread while others are computed."""
    paths, stdout = two_ranks
    assert_same(paths['overlap'], one_context, 1e-5)
    assert 'pieces: 3, a thread exchanges: True' in stdout


@pytest.mark.slow
@pytest.mark.parametrize('ranks,contexts,flags', [(3, FOUR, ''), (2, 'a->cpu', ',mgpu.micro_batches=2')])
def test_training_with_overlap(ranks, contexts, flags, one_context, tmp_path):
    done = launch(ranks, 'train', tmp_path / 'ranks.npz', contexts, 'plain',
                  flags='floatX=float32,mgpu.overlap=True' + flags)
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)
    assert 'pieces: 3, a thread exchanges: True' in done.stdout


@pytest.mark.slow
def test_random_draws_are_those_of_one_process_with_as_many_contexts(tmp_path):
    alone('train', tmp_path / 'one.npz', 'a->cpu;b->cpu')
    done = launch(2, 'train', tmp_path / 'ranks.npz', 'a->cpu;b->cpu', mpirun=True)
    assert_same(tmp_path / 'ranks.npz', tmp_path / 'one.npz', 1e-6)
    assert sorted(re.findall(r'rank (\d) trained on (\w)', done.stdout)) == [('0', 'a'), ('1', 'b')]


@pytest.mark.opencl
@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize('flags', ['', ',mgpu.update_on=sharded', ',mgpu.overlap=True'])
def test_gpus(flags, one_context, tmp_path):
    """The ranks compute on OpenCL (or CUDA) contexts."""
    launch(2, 'train', tmp_path / 'ranks.npz', context_map('gpu', 2), 'plain', 'compiled',
           flags='floatX=float32' + flags)
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('ranks,contexts', [(2, 2), (2, 4)])
@pytest.mark.parametrize('script,arguments', [
    ('mnist_cnn', ['--epochs', '2', '--gpus']), ('theano_cnn', ['--epochs', '2', '--contexts'])])
def test_the_published_scripts(script, arguments, ranks, contexts, tmp_path, monkeypatch):
    """The scripts run unchanged, with ragged epochs; in float64, since ReLU and max-pooling amplify rounding."""
    (tmp_path / 'keras.json').write_text('{"backend": "theano", "floatx": "float64"}')
    monkeypatch.setenv('KERAS_HOME', str(tmp_path))
    flags = 'floatX=float64,contexts=%s' % ';'.join('h%d->cpu' % i for i in range(contexts))
    alone('script', tmp_path / 'one.npz', script, *arguments, 1, flags=flags)
    done = launch(ranks, 'script', tmp_path / 'ranks.npz', script, *arguments, contexts, flags=flags)
    assert_same(tmp_path / 'ranks.npz', tmp_path / 'one.npz', 1e-10)
    assert done.stdout.count('data: ') == 1


def launch_on(hosts, *arguments, meanwhile=None):
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', '--hosts', ','.join(hosts.hosts), JOBS]
    return hosts.run(command + [str(argument) for argument in arguments], {'THEANO_FLAGS': 'floatX=float32'}, 300,
                     meanwhile)


def test_two_hosts(two_hosts, one_context, tmp_path):
    """The exchange takes a noticeable part of the first steps: then it overlaps with the computation."""
    before = two_hosts.first.sent_bytes(), two_hosts.second.sent_bytes()
    done = launch_on(two_hosts, 'train', tmp_path / 'ranks.npz', 'a->cpu', 'plain', 'watched')
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / 'ranks.npz', one_context, 1e-5)
    assert done.stderr.count('gradients are exchanged while the next ones are computed, because that takes ') == 1
    assert 'pieces: 3, a thread exchanges: True' in done.stdout
    parameters = 4 * (6 * 16 + 16 + 16 * 3)
    for host, sent in zip((two_hosts.first, two_hosts.second), before):
        assert host.sent_bytes() - sent > len(rank_network.RAGGED) * 3 * parameters


@pytest.mark.slow
@pytest.mark.parametrize('how,code,message', [
    ('raise', 1, 'rank 1 of 2 (host {host}, process'), ('kill', 137, 'on node {address} exited on signal 9'),
    ('cable', 205, 'lost communication')])
def test_what_ends_a_rank_on_another_host(how, code, message, two_hosts, tmp_path):
    mark = tmp_path / 'mark'

    def pull():
        while not mark.exists():
            time.sleep(0.1)
        two_hosts.connect(False)
    done = launch_on(two_hosts, 'fail', 'sleep' if how == 'cable' else how, mark,
                     meanwhile=pull if how == 'cable' else None)
    assert time.time() - mark.stat().st_mtime < 60
    assert done.returncode == code, done.stderr
    assert message.format(host=two_hosts.second.name, address=two_hosts.second.address) in done.stderr


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_one_rank_compiles_and_the_others_find_it(tmp_path):
    launch(3, 'compile_once', tmp_path / 'found', flags='floatX=float32,base_compiledir=%s' % (tmp_path / 'compiled'))
    found = []
    for rank in range(3):
        with open('%s.%d' % (tmp_path / 'found', rank)) as f:
            found.append(json.load(f))
    assert found[0]['compiled'] and found[1]['compiled'] == found[2]['compiled'] == []


@pytest.mark.parametrize('ranks,contexts', [
    (2, 'a->cpu'), pytest.param(3, 'a->cpu;b->cpu;c->cpu;d->cpu;e->cpu;f->cpu', marks=pytest.mark.slow)])
def test_batches_are_dealt_to_all_ranks(ranks, contexts, tmp_path):
    """All ranks have rank 0's batches, weights and order; each returns the result of `predict`."""
    path = str(tmp_path / 'predicted')
    launch(ranks, 'predict', path, contexts)
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
    assert sum(of_rank['calls'] > 0 for of_rank in told) > 1

    found = np.array(told[0]['found'])
    with_first, with_second = (np.tile(np.tanh(data[:200].dot(w)), (20, 1)).reshape(found.shape)
                               for w in (first, second))
    changed = [np.allclose(batch, new, rtol=1e-4) for batch, new in zip(found, with_second)]
    assert changed == sorted(changed) and not any(changed[:8]) and changed[-1]
    np.testing.assert_allclose(found[np.logical_not(changed)], with_first[np.logical_not(changed)], rtol=1e-4)

    ok, (index, message, cause), also_ok = told[0]['errors']
    assert (ok, index, also_ok) == (5, 1, 7) and 'batch 1 failed on context' in message
    assert told[0]['message'].startswith('0 batch 0 failed') and 'one map at a time' in told[0]['message']
    assert all(of_rank['message'].startswith('0 batch 0 failed') for of_rank in told)


@pytest.mark.slow
def test_a_rank_that_keeps_a_batch(tmp_path):
    done = launch(2, 'hang', 'nowhere', flags=INTERPRETED + ',mgpu.timeout=2', expected=None)
    assert done.returncode != 0
    assert re.search(r'rank 0 .* in call .* of predict .*, has waited 2 s for rank 1', done.stderr)


@pytest.mark.opencl
@pytest.mark.slow
def test_prediction_on_gpus(tmp_path):
    path = str(tmp_path / 'predicted')
    launch(2, 'predict', path, context_map('gpu', 2), flags='floatX=float32')
    data, first, _, _, outputs, _ = arrays(path + '.0.npz')
    np.testing.assert_allclose(outputs, np.tanh(data.dot(first)), rtol=1e-5, atol=1e-6)
