"""Logical shards: the same bits on any number of contexts, processes and devices, with any shares of a batch."""
import theano_mgpu as mgpu
from theano_mgpu.errors import ContextError, GraphError
from theano_mgpu.plan import Machine, Shares

import cuda_on_cpu
import numpy as np
import pytest
import theano
import theano.tensor as T
from hypothesis import given
from hypothesis import strategies as st
from models import adam, sgd
from support.launch import INTERPRETED, alone, arrays, launch
from support.modes import PYTHON
from support.small_models import shared
from support.standin import run
from support.strategies import examples
from theano.configparser import change_flags
from theano.sandbox.rng_mrg import MRG_RandomStreams

RAGGED = 13, 16, 5, 8, 1, 16, 3


def logical(number=4, **flags):
    return change_flags(**{'mgpu.logical_shards': number, **flags})


class Net:
    """A net with dropout, batch normalisation, Adam, and outputs that are a maximum, rows and a product; or without."""

    def __init__(self, mode=PYTHON, updates=adam, plain=False, **options):
        rng = np.random.RandomState(3)
        x, labels = T.matrix('x'), T.ivector('labels')
        self.params = [shared(rng.randn(6, 33) * .3, 'w1'), shared(rng.randn(33, 3) * .3, 'w2')]
        hidden = T.dot(x, self.params[0])
        if not plain:
            hidden *= MRG_RandomStreams(7).binomial((x.shape[0], 33), p=.8, dtype='float32')
            hidden = (hidden - hidden.mean(0)) / T.sqrt(hidden.var(0) + .1)
        scores = T.nnet.softmax(T.dot(T.tanh(hidden), self.params[1]))
        loss = T.nnet.categorical_crossentropy(scores, labels).mean()
        outputs = [scores] if plain else [scores.max(), scores, T.prod(1 + scores, axis=0), labels.sum()]
        self.step = mgpu.training_function([x, labels], loss, self.params, updates, outputs, mode=mode, **options)

    def train(self, sizes=RAGGED):
        returned = []
        for i, n in enumerate(sizes):
            rng = np.random.RandomState(i)
            returned += self.step(rng.randn(n, 6).astype('float32'), rng.randint(0, 3, n).astype('int32'))
        return returned

    def everything(self, sizes=RAGGED):
        """Train; return all outputs, weights, the state of Adam and of the random stream."""
        returned = self.train(sizes)
        return returned + [each.variable.get_value() for each in self.step.variables()]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs) > 3
    for one, other in zip(ours, theirs):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope='module')
def of_one_context():
    mgpu.init('a->cpu')
    with logical():
        return Net().everything()


@pytest.mark.slow_but_with('2-flags3')
@pytest.mark.filterwarnings('ignore:mgpu.logical_shards=4 leaves 4 of the 8 replicas')
@pytest.mark.parametrize('n, flags', [(2, {}), (3, {}), (8, {'mgpu.executor': 'threads'}), (2, {'mgpu.shares': '3:1'}),
                                      (3, {'mgpu.shares': '1:3:2', 'mgpu.overlap': 'True'})])
def test_any_number_of_contexts_gives_the_same_bits(n, flags, of_one_context, contexts):
    contexts('cpu', n)
    with logical(**flags):
        assert_same_bits(Net().everything(), of_one_context)


@pytest.mark.slow_with('16')
@pytest.mark.parametrize('number', [13, 16])
def test_runs_of_shards_that_begin_anywhere(number, contexts):
    """Two nodes of one level may wait on a context for their neighbours on others: they need memory of their own."""
    x, rows = T.matrix('x'), np.random.RandomState(0).randn(40, 6).astype('float32')
    found = []
    for n in (1, 3, 5, 7):
        contexts('cpu', n)
        w = shared(np.ones((6, 4)), 'w')
        with logical(number):
            step = mgpu.training_function([x], (T.tanh(T.dot(x, w)) ** 2).mean(), [w],
                                          sgd, mode=PYTHON)
        found.append([*[step(rows) for _ in range(3)], w.get_value()])
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.slow_with('flags0')
@pytest.mark.parametrize('flags', [{}, {'mgpu.update_on': 'host'}])
def test_gradients_of_large_layers_are_added_as_products(flags, contexts):
    """A shard of a large layer makes no gradient of the weights, but the two matrices whose product it is."""
    x, w = T.matrix('x'), shared(np.random.RandomState(1).randn(150, 300) * .1, 'w')
    start, found = w.get_value(), []
    for n in (1, 2, 3):
        contexts('cpu', n)
        w.set_value(start)
        with logical(5, **flags):
            step = mgpu.training_function([x], (T.tanh(T.dot(x, w)) ** 2).mean(), [w], sgd, mode=PYTHON)
        found.append([step(np.random.RandomState(i).randn(i, 150).astype('float32')) for i in RAGGED]
                     + [w.get_value()])
        shapes = [variable.type.broadcastable for variable in step.functions[0].maker.fgraph.outputs]
        assert shapes.count((False, False)) == 2  # and not one
    for other in found[1:]:
        assert_same_bits(other, found[0])
    contexts('cpu', 1)
    w.set_value(start)
    plain = mgpu.training_function([x], (T.tanh(T.dot(x, w)) ** 2).mean(), [w], sgd, mode=PYTHON)
    for i in RAGGED:
        plain(np.random.RandomState(i).randn(i, 150).astype('float32'))
    np.testing.assert_allclose(found[0][-1], w.get_value(), rtol=1e-4, atol=1e-6)


def test_without_logical_shards_bits_depend_on_the_number_of_contexts(of_one_context, contexts):
    """The comparison of bits above can fail."""
    contexts('cpu', 2)
    with pytest.raises(AssertionError):
        assert_same_bits(Net().everything(), of_one_context)


@pytest.mark.slow
def test_results_are_those_of_plain_theano(contexts):
    """Logical shards change no more than rounding does."""
    contexts('cpu', 2)
    with logical(5):
        ours = Net().everything()
    contexts('cpu', 1)
    for one, other in zip(ours, Net().everything()):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize('ranks, contexts_there, update_on', [
    (3, 'a->cpu', 'sharded'), *(pytest.param(2, contexts, 'auto', marks=pytest.mark.slow)
                                for contexts in ('a->cpu', 'a->cpu;b->cpu')),
    pytest.param(2, 'a->cpu;b->cpu;c->cpu;d->cpu', 'sharded', marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_same_bits(ranks, contexts_there, update_on, tmp_path):
    flags = INTERPRETED + ',mgpu.logical_shards=4,mgpu.update_on=' + update_on
    alone('train', tmp_path / 'one.npz', 'a->cpu', flags=flags)
    launch(ranks, 'train', tmp_path / 'ranks.npz', contexts_there, flags=flags)
    assert_same_bits(arrays(tmp_path / 'ranks.npz'), arrays(tmp_path / 'one.npz'))


@pytest.mark.slow
@pytest.mark.parametrize('updates, plain, update_on', [
    (sgd, True, 'device'), *((adam, False, where) for where in ('device', 'host', 'sharded'))])
def test_opencl_gpus_of_one_type_give_the_same_bits(updates, plain, update_on, contexts):
    """The shards of one device are added on this device, the shards of two devices partly on the host."""
    def trained():
        return Net('FAST_RUN', updates, plain, update_on=update_on).everything((8, 5, 1))
    with logical():
        contexts('gpu', 1)
        one = trained()
        contexts('gpu', 2, of_one_type=True)
        assert_same_bits(trained(), one)


ON_STANDIN = '''
import hashlib
import sys
sys.path.append(sys.path[0] + '/runtime')
from test_logical_shards import Net
for n in (1, 2, 4):
    mgpu.init(n)
    values = Net('FAST_RUN').everything((8, 5, 1))
    print(hashlib.md5(b''.join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest())
'''


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')
def test_cuda_devices_give_the_same_bits():
    of_each_number = run(ON_STANDIN, 4, 'mgpu.logical_shards=4')
    assert len(of_each_number) == 3 and len(set(of_each_number)) == 1


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_another_number_of_contexts(of_one_context, contexts, tmp_path):
    contexts('cpu', 2)
    with logical():
        net = Net()
        returned = net.train(RAGGED[:3])
        net.step.save(str(tmp_path / 'state.npz'))
        contexts('cpu', 3)
        other = Net()
        other.step.load(str(tmp_path / 'state.npz'))
    for i, n in enumerate(RAGGED[3:], 3):
        rng = np.random.RandomState(i)
        returned += other.step(rng.randn(n, 6).astype('float32'), rng.randint(0, 3, n).astype('int32'))
    assert_same_bits(returned + [each.variable.get_value() for each in other.step.variables()], of_one_context)


def test_numbers_of_a_whole_batch_are_drawn_once_a_replica(contexts):
    contexts('cpu', 2)
    with logical(8):
        step = Net().step
    first, *others = step.plan.stages
    assert first.once and not any(stage.once for stage in others)
    drawn = [node for part in first.parts for node in theano.gof.graph.io_toposort([], list(part.graphs))
             if 'mrg_uniform' in str(node.op)]
    assert len(drawn) == 1 and not any('mrg_uniform' in str(node.op) for stage in others for part in stage.parts
                                       for node in theano.gof.graph.io_toposort([], list(part.graphs)))


def test_replicas_without_shards_are_noted(contexts):
    contexts('cpu', 3)
    with logical(1), pytest.warns(mgpu.MgpuWarning, match='logical_shards=1 leaves 2 of the 3 replicas of a function'):
        net = Net()
    assert str(net.step.plan).startswith('a function: each batch in at most 1 logical shard, divided among 3 replicas')


def test_a_plan_shows_the_tree(contexts):
    contexts('cpu', 2)
    with logical(5):
        assert '((1 + 2) + (3 + 4)) + 5' in str(Net().step.plan)


def test_functions_of_a_script_are_divided_on_one_context_too(contexts):
    """The chooser between plain Theano and contexts would let a time decide on the bits."""
    contexts('cpu', 1)
    x, rows = T.matrix('x'), np.random.RandomState(0).randn(50, 40).astype('float32')
    sums = []
    with logical():
        try:
            for n in (1, 3):
                contexts('cpu', n)
                mgpu.enable()
                f = theano.function([x], (x ** 2).sum(), mode=PYTHON)
                sums.append(f(rows))
                assert f.mgpu_divided.source.step.n_replicas == n
            assert sums[0] == sums[1]
        finally:
            mgpu.disable()


def test_micro_batches_of_logical_shards_are_refused(cpu2):
    with logical(**{'mgpu.micro_batches': '2'}), pytest.raises(GraphError, match='takes the place of micro-batches'):
        Net()


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_with_different_numbers_of_shards_are_refused(tmp_path):
    done = launch(2, 'other_shards', flags=INTERPRETED, expected=None)
    assert done.returncode and 'mgpu.logical_shards is 4, 5 on the ranks 0 to 1' in done.stderr


@pytest.mark.slow
@pytest.mark.mpi
def test_samples_of_each_process_are_divided_alike(tmp_path):
    """Two processes with half of the samples each compute what one process does with all of them."""
    flags = INTERPRETED + ',mgpu.logical_shards=4'
    alone('halves', tmp_path / 'one.npz', flags=flags)
    launch(2, 'halves', tmp_path / 'two.npz', flags=flags + ',mgpu.data=sharded')
    assert_same_bits(arrays(tmp_path / 'two.npz'), arrays(tmp_path / 'one.npz'))
    done = launch(2, 'halves', tmp_path / 'two.npz', flags=INTERPRETED + ',mgpu.logical_shards=5,mgpu.data=sharded',
                  expected=None)
    assert done.returncode and 'choose a multiple of 2' in done.stderr


COUNT = st.integers(1, 9)


@pytest.mark.slow
@examples(200)
@given(st.integers(1, 60), COUNT, st.lists(COUNT, min_size=1, max_size=4), st.integers(1, 3))
def test_each_shard_is_computed_once(length, number, replicas, least):
    """The shards depend on the batch and their number alone."""
    expected = Shares(Machine(), logical_shards=number, least_samples=least).rounds(length)
    expected = sorted(span for each in expected for _, span in each)
    assert [start for start, _ in expected] == [0] + [stop for _, stop in expected[:-1]] and expected[-1][1] == length
    assert len(expected) == min(number, max(1, length // least))
    found, counts = [], []
    for rank in range(len(replicas)):
        shares = Shares(Machine(rank, tuple(replicas)), logical_shards=number, least_samples=least)
        own = sorted(span for each in shares.rounds(length) for _, span in each)
        assert sum(stop - start for start, stop in own) == shares.lengths(length)[rank]
        found += own
        counts.append(len(own))
    assert found == expected and shares.shards_of_ranks([length]) == tuple(counts)


@pytest.mark.slow
def test_devices_of_other_types_are_noted(contexts):
    mgpu.init('a->cpu;b->%s' % contexts('gpu', 1)[0].device)
    with logical(), pytest.warns(mgpu.MgpuWarning, match='several types'):
        Net()


def test_algorithms_that_are_chosen_by_time_are_refused():
    from theano_mgpu.runtime.consensus import check_algorithms
    with change_flags(**{'dnn.conv.algo_fwd': 'time_once'}), pytest.raises(ContextError, match='algo_fwd=time_once'):
        check_algorithms()
