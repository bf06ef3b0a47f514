"""Shares by the measured speeds of devices: they settle, change with the speeds, and leave the results as they are."""
import re

import theano_mgpu as mgpu
from theano_mgpu.devices.launcher import Shard
from theano_mgpu.plan import Machine, Shares
from theano_mgpu.runtime.batch import Split
from theano_mgpu.runtime.speeds import AGAIN, Speeds

import cuda_on_cpu
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.modes import PYTHON
from support.standin import launched, run
from theano.configparser import change_flags

on_stand_in = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')


def split_of(shards, samples, lengths):
    return Split(shards, [shards], samples, lengths, not shards, None, None, None, (), ())


class Splits:
    """A splitter that only has shares."""

    def __init__(self, shares):
        self.shares = shares

    def use(self, shares, measured):
        self.shares = shares


class Job:
    """A number of ranks whose replicas take some time for a sub-batch of some samples.

    Parameters
    ----------
    replicas : tuple of int
        Replicas of each rank.
    seconds : list of callable
        ``seconds[i](samples)`` of each replica.
    """

    def __init__(self, replicas, seconds, **shares):
        self.seconds = list(seconds)
        self.ranks = [Splits(Shares(Machine(rank, replicas), adapts=True, **shares)) for rank in range(len(replicas))]
        self.speeds = [Speeds('net', splits) for splits in self.ranks]

    def step(self, *lengths):
        reports, batches = [], []
        for splits, speeds in zip(self.ranks, self.speeds):
            shares, rank = splits.shares, splits.shares.machine.rank
            own = lengths[rank] if shares.is_sharded else lengths[0]
            shards = [Shard(*work) for each in shares.rounds(own) for work in each]
            batch = split_of(shards, sum(lengths), lengths if shares.is_sharded else shares.lengths(own))
            timed, first = speeds.timed(batch), sum(shares.machine.replicas[:rank])
            samples = sum(stop - start for each in batch.shards if each.replica == timed
                          for start, stop in [each.span])
            seconds = self.seconds[first + timed](samples) if timed is not None else 0
            batches.append(batch)
            reports.append(speeds.report(batch, timed, seconds))
        assert len(set(map(len, reports))) == 1  # ranks send each other as many numbers
        for batch, speeds in zip(batches, self.speeds):
            speeds.note(batch, reports if reports[0] else [])
        assert len({splits.shares.weights for splits in self.ranks}) == 1
        return self.ranks[0].shares.sizes(lengths)

    def steps(self, number, *lengths):
        for _ in range(number):
            sizes = self.step(*lengths)
        return sizes


def linear(per_sample, fixed=0.0):
    return lambda samples: fixed + per_sample * samples


@pytest.mark.parametrize('replicas', [(2,), (1, 1)])
@pytest.mark.parametrize('seconds,sizes', [
    ([linear(1e-3), linear(3e-3)], [96, 32]), ([linear(1e-3), linear(1.1e-3)], [64, 64]),
    ([linear(2e-3, .01), linear(1e-3, .01)], [43, 85])])
def test_all_replicas_work_equally_long(replicas, seconds, sizes):
    found = Job(replicas, seconds).steps(200, 128)
    times = [each(samples) for each, samples in zip(seconds, found)]
    assert max(times) <= 1.15 * min(times) and abs(found[0] - sizes[0]) <= 6


def test_shares_follow_a_speed_that_changes_and_ignore_batches_of_another_size():
    job = Job((2,), [linear(1e-3), linear(1e-3)])
    assert job.steps(100, 64) == [32, 32]
    job.seconds[1] = linear(2e-3)  # another program computes there, too
    for _ in range(150):
        job.step(64)
        job.step(10)  # the last batch of an epoch
    assert 41 <= job.step(64)[0] <= 45
    job.seconds[1] = linear(1e-3)
    assert job.steps(300, 64)[0] < 36


def test_a_single_long_step_changes_nothing():
    """A median does not follow one value in five."""
    job = Job((2,), [linear(1e-3), linear(1e-3)])
    for number in range(400):
        job.seconds[0] = linear(1e-2 if number % 100 == 40 else 1e-3)
        assert job.step(64) == [32, 32]


def test_a_device_that_takes_too_long_for_any_sample_gets_none_and_is_tried_again():
    job = Job((2,), [linear(1e-4), linear(1e-4, 1.)])
    assert job.steps(100, 64) == [64, 0]
    job.seconds[1] = linear(1e-4)
    assert job.steps(AGAIN + 400, 64)[1] > 28


def test_a_smaller_size_counts_once_it_is_common():
    job = Job((2,), [linear(1e-3), linear(3e-3)])
    job.step(1000)  # one long batch, such as of a prediction
    assert job.speeds[0].timed is not None and job.steps(10, 64) == [32, 32]
    assert job.speeds[0].is_settled  # a choice by time need not wait
    assert job.steps(100, 64)[0] in (47, 48, 49)


def test_a_step_that_fails_leaves_no_trace():
    """A rank that has failed before its first stage has not asked which replica to time."""
    job, other = Job((2,), [linear(1e-3)] * 2), Job((2,), [linear(1e-3)] * 2)
    for each in (job, other):
        each.steps(3, 64)
    job.speeds[0].timed(split_of([Shard(0, (0, 100))], 100, [100]))
    assert vars(job.speeds[0])['_samples'] == 64
    for _ in range(4):
        assert job.step(64) == other.step(64)
        assert job.speeds[0]._turns == other.speeds[0]._turns


@pytest.mark.opencl
@pytest.mark.parametrize('flags', [{'deterministic': 'more'}, {'mgpu.shares': 'equal'}])
def test_shares_stay_equal_where_results_would_depend_on_them(flags, contexts):
    contexts('gpu', 2)
    x = T.matrix()
    assert mgpu.function([x], x.sum()).plan.shares.adapts
    with change_flags(**flags):
        assert not mgpu.function([x], x.sum()).plan.shares.adapts


@pytest.mark.opencl
def test_a_function_that_is_not_divided_has_no_shares(contexts):
    contexts('gpu', 2)
    x = T.matrix()
    with pytest.warns(mgpu.MgpuWarning, match='runs whole'):
        assert not mgpu.function([x], x[::-1]).plan.shares.adapts
    contexts('gpu', 1)
    assert not mgpu.function([x], x.sum()).plan.shares.adapts


def test_a_wrong_value_of_the_flag_is_an_error(contexts):
    contexts('cpu', 2)
    x = T.matrix()
    with change_flags(**{'mgpu.shares': 'fast'}), pytest.raises(mgpu.GraphError, match="such as 3:1, not 'fast'"):
        mgpu.function([x], x.sum())


def test_ranks_with_samples_of_their_own_divide_these():
    seconds = [linear(1e-3), linear(1e-3), linear(2e-3), linear(1e-3)]
    sizes = Job((2, 2), seconds, is_sharded=True).steps(200, 60, 30)
    assert sizes[:2] == [30, 30] and sizes[2] + sizes[3] == 30 and sizes[2] <= 11


def test_a_rank_whose_data_has_ended_does_not_count():
    job = Job((1, 1), [linear(1e-3), linear(2e-3)], is_sharded=True)
    assert job.steps(50, 40, 0) == [40, 0]


SHARES = '1:1:1', '3:1:1', '1:7:2'


@pytest.fixture(scope='module')
def results_of_shares():
    """Return the results of a network by the flag mgpu.shares: normalised, masked, with random numbers and rows."""
    def results(shares):
        rng = np.random.RandomState(3)
        x, mask = T.matrix('x'), T.vector('mask')
        w, gamma, mean, variance = [theano.shared(value.astype('float32')) for value in (
            rng.randn(6, 5), np.ones(5), np.zeros(5), np.ones(5))]
        streams = theano.tensor.shared_randomstreams.RandomStreams(5)
        h = T.dot(x, w)
        normal = T.nnet.bn.batch_normalization_train(h, gamma, T.zeros_like(gamma), axes=(0,), running_mean=mean,
                                                     running_var=variance)
        out = T.tanh(normal[0]) * streams.binomial(normal[0].shape, p=.7)
        loss = T.sum(mask * T.sqr(out).sum(axis=1)) / T.sum(mask) + abs(h).max()
        updates = [(v, v - .1 * g) for v, g in zip((w, gamma), theano.grad(loss, [w, gamma]))] + [(mean, normal[3])]
        with change_flags(**{'mgpu.shares': shares}) if shares else change_flags():
            make = mgpu.function if shares else theano.function
            mode = None if any(context.kind != 'cpu' for context in mgpu.contexts()) else PYTHON
            step = make([x, mask], [loss, out, mask * T.arange(mask.shape[0])], updates=updates, mode=mode)
        assert not shares or step.plan.shares.n_replicas == 3
        data = np.random.RandomState(7)
        found = []
        for size in (20, 20, 7, 3, 2, 1):
            found += step(data.randn(size, 6).astype('float32'), (data.randint(0, 2, size) + .01).astype('float32'))
        return found + [v.get_value() for v in (w, gamma, mean)]
    return results


@pytest.fixture(scope='module')
def plain_results(results_of_shares):
    return results_of_shares(None)


@pytest.mark.slow_but_with('cpu-3:1:1')
@pytest.mark.parametrize('kind,shares', [(kind, shares) for kind in ('cpu', 'gpu') for shares in SHARES])
def test_any_shares_give_the_results_of_one_device(kind, shares, contexts, results_of_shares, plain_results):
    contexts(kind, 3)
    for found, expected in zip(results_of_shares(shares), plain_results):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5)


def test_shares_of_gpus(gpu2):
    x, rows = T.fmatrix(), np.arange(24, dtype='float32').reshape(8, 3)
    with change_flags(**{'mgpu.shares': '3:1'}):
        f = mgpu.function([x], [x * 2, x.sum()])
    doubled, total = f(rows)
    np.testing.assert_array_equal(doubled, rows * 2)
    assert total == rows.sum() and re.search('shares +3:1', str(f.plan))


def test_the_plan_names_the_shares(contexts):
    contexts('cpu', 2)
    x = T.matrix()
    with change_flags(**{'mgpu.shares': '3:1'}):
        f = mgpu.function([x], x.sum())
    assert 'shares    3:1         mgpu.shares=3:1' in str(f.plan)
    assert 'the contexts share the processor' in str(mgpu.function([x], x.sum()).plan)


NET = '''
import theano, theano.tensor as T
from models import adam
rng = np.random.RandomState(0)
weights = [theano.shared((rng.randn(*size) / size[0] ** .5).astype('float32'))
           for size in ((64, 500), (500, 500), (500, 3))]
x = h = T.matrix('x')
for w in weights:
    h = T.tanh(T.dot(h, w))
loss = T.sqr(h).mean()
others = [theano.shared(w.get_value()) for w in weights]
step = mgpu.training_function([x], loss, weights, adam, name='net')
plain = theano.clone(loss, dict(zip(weights, others)))
reference = theano.function([x], plain, updates=list(dict(adam(theano.grad(plain, others), others)).items()))
for size in [400] * 40 + [37, 400, 2, 1]:
    batch = rng.randn(size, 64).astype('float32')
    np.testing.assert_allclose(step(batch), reference(batch), rtol=1e-3)
splitter = step.built.splitter
print(splitter.shares.sizes([400]), [each.what for each in splitter.changes()],
      all(np.allclose(a.get_value(), b.get_value(), 1e-2, 1e-4) for a, b in zip(weights, others)))
'''


def sizes_of(line):
    return [int(size) for size in line[1:line.index(']')].split(',')], line[line.index(']') + 2:]


@pytest.mark.slow
@pytest.mark.parametrize('collectives', ['host', 'nccl'])
@pytest.mark.needs_compiler
@on_stand_in
def test_a_slow_device_gets_fewer_samples(collectives):
    line, = run("mgpu.init('dev0->cuda0;dev1->cuda1')\n" + NET, flags='mgpu.collectives=' + collectives,
                slowness='8;1')
    (slow, fast), rest = sizes_of(line)
    assert 1 <= slow < fast and slow + fast == 400 and rest == "['shares'] True", line


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.needs_compiler
@on_stand_in
def test_a_slow_rank_gets_fewer_samples(tmp_path):
    line, = launched(2, NET, tmp_path, 2, slowness='1;8')
    (fast, slow), rest = sizes_of(line)
    assert 1 <= slow < fast and slow + fast == 400 and rest == "['shares'] True", line


RANKS = '''
import theano, theano.tensor as T
x = T.matrix('x')
try:
    mgpu.function([x], x.sum())
except mgpu.ContextError as error:
    print(error)
'''


@pytest.mark.mpi
@pytest.mark.needs_compiler
@on_stand_in
def test_ranks_with_other_flags_are_an_error(tmp_path):
    code = '''
import os
if os.environ['OMPI_COMM_WORLD_RANK'] == '1':
    import theano
    theano.config.mgpu.shares = 'equal'
''' + RANKS
    line, = launched(2, code, tmp_path, 2)
    assert line.startswith('the ranks have different flags mgpu.shares, or deterministic: rank 0 has mgpu.shares=auto')
