"""Several processes that feed their own data, against one process."""
import numpy as np
import pytest
import theano
import theano.tensor as T
from support import rank_data_jobs, rank_network
from support.launch import INTERPRETED, alone, arrays, launch

pytestmark = pytest.mark.mpi


@pytest.mark.slow
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


@pytest.fixture(scope='module')
def in_one_job(tmp_path_factory):
    """Run jobs on two ranks and in one process; return a function from a job to the arrays of each, and the output."""
    folder = tmp_path_factory.mktemp('data')

    def words(start):
        return ['coupled_shards', folder / ('coupled_shards_' + start),
                'then', 'refused', folder / ('refused_' + start)]
    done = launch(2, *words('ranks'), flags=INTERPRETED)
    alone(*words('one'), flags=INTERPRETED)
    return lambda job: [arrays(folder / (job + name)) for name in ('_ranks.0.npz', '_ranks.1.npz', '_one.0.npz')], done


@pytest.mark.slow
def test_samples_that_meet_and_have_states_may_be_on_several_ranks(in_one_job):
    """Ranks feed 3 and 2 samples of a batch, at the end 3 and none; a rate comes with each call."""
    results, _ = in_one_job
    first, last, one = results('coupled_shards')
    np.testing.assert_allclose(first[:3], one[:3], rtol=1e-10)                           # losses
    np.testing.assert_allclose(last[:2], one[:2], rtol=1e-10)
    for number in range(2):                                                              # states
        np.testing.assert_allclose(np.concatenate([first[3 + number], last[2 + number]]), one[3 + number], rtol=1e-10)
    np.testing.assert_allclose(first[5], one[5], rtol=1e-10)
    np.testing.assert_array_equal(last[-1], last[3])
    for weights in (first[-2], last[-2]):
        np.testing.assert_allclose(weights, one[-2], rtol=1e-10)


@pytest.mark.slow_but_with('ends early')
@pytest.mark.parametrize('calls', [
    (4, 4), (4, 3), (4, 4, 'host'), (4, 3, 'host')],
    ids=['slices nothing at last', 'ends early', 'slices nothing at last, on the host', 'ends early, on the host'])
def test_ranks_may_slice_batches_from_their_own_parts_of_a_data_set(calls, tmp_path):
    """Rank 0 has 14 samples, 4 a batch; rank 1 has 9, and has used them up before the last batch."""
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


def test_what_cannot_be_computed_in_parts_is_computed_by_each_rank(in_one_job):
    results, done = in_one_job
    *of_ranks, expected = results('refused')
    for *ours, error in of_ranks:
        assert 'each process has samples of its own' in str(error) and 'Cholesky' in str(error)
        for one, other in zip(ours, expected):
            np.testing.assert_allclose(one, other, rtol=1e-10)
    assert 'runs whole on a->cpu' in done.stderr
