"""The add-on in several processes: the results, files and output of fit; checkpoints; data of each process."""
import json
import os
import signal

import keras
import numpy as np
import pytest
from support import keras_rank_jobs as rank_jobs
from support.keras_equivalence import check  # noqa: F401  chooses Keras's backend first
from support.launch import INTERPRETED, arrays, launch

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures('interpreted')]
JOBS = os.path.abspath(rank_jobs.__file__)


def history(path, rank=0):
    with open('%s.%d.json' % (path, rank)) as f:
        return json.load(f)


def assert_same(ours, theirs, tolerance):
    assert len(ours) == len(theirs) > 8
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same_history(ours, theirs, tolerance=1e-5):
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize('update_on', ['host', 'sharded'])
def test_fit_is_that_of_one_process(update_on, tmp_path):
    ranks, one = str(tmp_path / 'ranks'), str(tmp_path / 'one')
    done = launch(2, 'fit', ranks, 'a->cpu;b->cpu', job=JOBS, flags=INTERPRETED + ',mgpu.update_on=' + update_on)
    launch(1, 'fit', one, 'a->cpu;b->cpu', job=JOBS, flags=INTERPRETED)
    assert_same(arrays(ranks + '.0.npz'), arrays(one + '.0.npz'), 1e-5)
    for rank in range(2):
        assert_same_history(history(ranks, rank), history(one))
    assert_same(arrays(ranks + '.0.npz'), arrays(ranks + '.1.npz'), 0)
    assert done.stdout.count('Epoch 1/4') == 1
    with open(ranks + '.csv') as f, open(one + '.csv') as g:
        assert len(f.readlines()) == len(g.readlines()) == 5
    with open(ranks + '.csv') as log, open(ranks + '.own0.csv') as first, open(ranks + '.own1.csv') as second:
        assert log.read() == first.read() == second.read()
    table, first, second = [open(ranks + name).read() for name in ('.table.csv', '.table0.csv', '.table1.csv')]
    assert table == first == second and len(table.splitlines()) == 4
    assert 'the callback Both runs on each rank, since it writes, by open, and steers' in done.stderr
    assert {name for name in os.listdir(str(tmp_path)) if 'both' in name} == {'ranks.both0', 'ranks.both1', 'one.both0'}
    for name in ('.h5', '.best.h5', '.alone.h5', '.own0.h5', '.own1.h5'):
        keras.models.load_model(ranks + name)
    saved = keras.models.load_model(ranks + '.h5')
    of_saved = saved.get_weights() + saved.optimizer.get_weights()
    for ours, theirs in zip(of_saved, arrays(ranks + '.0.npz')):
        np.testing.assert_array_equal(ours, theirs)
    assert not [name for name in os.listdir(str(tmp_path)) if 'unfinished' in name]


@pytest.mark.slow
@pytest.mark.parametrize('update_on,spares', [('auto', 0), ('sharded', 0), ('auto', 1)])
def test_a_killed_fit_goes_on_from_its_last_checkpoint(update_on, spares, tmp_path):
    """Weights, optimizer state, order of samples, history and log are the same as without a kill."""
    killed, whole = str(tmp_path / 'killed'), str(tmp_path / 'whole')
    done = launch(2, 'checkpoint', killed, tmp_path / 'a.npz', 17, spares, job=JOBS,
                  options=['--restarts', '2', '--spares', str(spares)],
                  flags='floatX=float32,mgpu.update_on=' + update_on)
    assert ('by the spare processes' in done.stderr) == bool(spares)
    assert 'restart 1 of 2' in done.stderr and 'restart 2' not in done.stderr
    launch(1, 'checkpoint', whole, tmp_path / 'b.npz', -1, job=JOBS)
    (*ours, computed), (*theirs, all_) = arrays(killed + '.0.npz'), arrays(whole + '.0.npz')
    assert_same(ours, theirs, 1e-6)
    assert (computed, all_) == (28 - 16 + 1, 28)  # the batch of the checkpoint is reported again
    assert_same_history(history(killed), history(whole), 1e-6)
    with open(killed + '.csv') as f, open(whole + '.csv') as g:
        assert len(f.readlines()) == len(g.readlines()) == 5


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2])
def test_a_signal_to_one_rank_ends_a_fit_with_a_checkpoint(ranks, tmp_path):
    ended, whole = str(tmp_path / 'ended'), str(tmp_path / 'whole')
    for expected in 128 + signal.SIGTERM, 0:
        launch(ranks, 'checkpoint', ended, tmp_path / 'a.npz', 17, 0, int(signal.SIGTERM), job=JOBS, expected=expected)
    launch(1, 'checkpoint', whole, tmp_path / 'b.npz', -1, job=JOBS)
    (*ours, computed), (*theirs, all_) = arrays(ended + '.0.npz'), arrays(whole + '.0.npz')
    assert_same(ours, theirs, 1e-6)
    assert (computed, all_) == (28 - 18 + 1, 28)  # the batch after the signal ends, and is reported again
    assert_same_history(history(ended), history(whole), 1e-6)


def test_a_batch_of_data_of_each_process_counts_by_its_samples(tmp_path, contexts):
    """The last batch of an epoch is smaller than the others."""
    launch(2, 'epoch', tmp_path / 'ranks', options=['--sharded'], job=JOBS, flags=INTERPRETED)
    contexts('cpu', 1)
    model, losses = rank_jobs.parallel(seed=0, dropout=0.0, normalised=False), []
    batches = [0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10]
    for rows in batches:
        losses.append(model.train_on_batch(rank_jobs.X[rows], rank_jobs.Y[rows])[0])
    for rank in range(2):
        np.testing.assert_allclose(history(tmp_path / 'ranks', rank)['loss'],
                                   [np.average(losses, weights=list(map(len, batches)))], 1e-5)


@pytest.mark.slow
def test_each_process_feeds_its_own_data(tmp_path, contexts):
    path = str(tmp_path / 'ranks')
    launch(3, 'shard', path, options=['--sharded'], job=JOBS)
    contexts('cpu', 1)
    model = rank_jobs.parallel(seed=0, dropout=0.0, normalised=False)
    found = {'loss': [], 'mae': []}
    for _ in range(2):
        losses, sizes = [], []
        model.reset_metrics()
        for start in range(0, 29, 4):
            rows = [i for first, stop in rank_jobs.PARTS for i in range(first + start, min(first + start + 4, stop))]
            loss, mae = model.train_on_batch(rank_jobs.X[rows], rank_jobs.Y[rows], reset_metrics=False)
            losses.append(loss)
            sizes.append(len(rows))
        found['loss'].append(np.average(losses, weights=sizes))
        found['mae'].append(mae)
        rows = [i for first, _ in rank_jobs.PARTS for i in range(first, first + 9)]
        validated = model.evaluate(rank_jobs.X[rows], rank_jobs.Y[rows], verbose=0)
        for name, value in zip(('val_loss', 'val_mae'), validated):
            found.setdefault(name, []).append(value)
    scores = model.evaluate(rank_jobs.X, rank_jobs.Y, verbose=0)
    for rank in range(3):
        *ours, their_scores = arrays('%s.%d.npz' % (path, rank))
        assert_same(ours, rank_jobs.state(model), 1e-4)
        np.testing.assert_allclose(their_scores, scores, rtol=1e-4)
        assert_same_history(history(path, rank), found, 1e-4)
