"""`mgpu.Predictor`: whole batches, each on the replica that is free first."""
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import theano_mgpu as mgpu
from theano_mgpu.errors import BatchError, GraphError, MgpuError, MgpuWarning, PredictionError

import numpy as np
import pytest
import theano
import theano.tensor as T
from common import data, dense_model
from conftest import context_map
from theano.sandbox.rng_mrg import MRG_RandomStreams

SIZES = [0, 1, 2, 31, 32, 33, 200, 1777]
FAST = theano.Mode(optimizer='fast_compile')


@pytest.fixture(scope='module')
def model():
    return dense_model()


@pytest.fixture(scope='module')
def plain(model):
    return theano.function(model.inputs[:1], model.probabilities, mode=FAST)


def sums(_, **options):
    """The sums of rows, times a shared variable."""
    x, w = T.matrix('x'), theano.shared(np.float32(1), name='w')
    return mgpu.Predictor([x], x.sum(axis=1) * w, mode=FAST, **options), w


def rows(n, value=1.0):
    return np.full((n, 3), value, theano.config.floatX)


# --- the same answer -----------------------------------------------------------------------------

@pytest.mark.parametrize('per_context', [1, 2])
def test_any_number_of_samples(contexts, kind, per_context, model, plain):
    contexts(kind, 2)
    with mgpu.Predictor(model.inputs[:1], model.probabilities, replicas_per_context=per_context,
                        mode=FAST) as predictor:
        assert len(predictor.replicas) == 2 * per_context
        for n in SIZES:
            x, _ = data(n, 7, seed=n)
            for batch_size in (None, 32, 7)[:3 if n < 300 else 1]:
                found = predictor.predict(x, batch_size=batch_size)
                assert found.shape == (n, 4)
                if n:  # Theano's own function fails for none
                    np.testing.assert_allclose(found, plain(x), rtol=1e-6, atol=1e-7)


def test_several_inputs_and_outputs(contexts, kind):
    contexts(kind, 2)
    a, b, scale = T.matrix('a'), T.matrix('b'), T.vector('scale')
    whole = theano.function([a, b, scale], [a * b, (a + b).sum(axis=1) * scale[0]], mode=FAST)
    x, y, s = data(50, 3)[0], data(50, 3, seed=1)[0], np.array([3, 4], 'float32')
    with mgpu.Predictor([a, b, scale], [a * b, (a + b).sum(axis=1) * scale[0]], broadcast=[scale],
                        mode=FAST) as predictor:
        batches = [[x[:9], y[:9], s], {'b': y[9:], 'scale': s, 'a': x[9:]}]
        for found in (predictor.predict(x, y, s, batch_size=9),
                      [np.concatenate(parts) for parts in zip(*predictor.map(batches))]):
            for ours, theirs in zip(found, whole(x, y, s)):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.cuda
def test_map_is_in_order(contexts, kind):
    contexts(kind, 2)
    predictor, _ = sums(contexts)
    with predictor:
        sizes = np.random.RandomState(0).randint(1, 50, 40)
        found = list(predictor.map(rows(n, n) for n in sizes))
        assert [len(part) for part in found] == list(sizes)
        np.testing.assert_array_equal(np.concatenate(found), np.repeat(3.0 * sizes, sizes))
        assert sum(replica.calls for replica in predictor.replicas) == 40


def test_arrays_on_disk_and_lists(cpu2, tmp_path):
    np.save(str(tmp_path / 'x.npy'), rows(70, 2))
    with sums(cpu2)[0] as predictor:
        np.testing.assert_array_equal(predictor.predict(np.load(str(tmp_path / 'x.npy'), mmap_mode='r')), [6] * 70)
        np.testing.assert_array_equal(predictor.predict([[1, 2, 3], [4, 5, 6]]), [6, 15])
    i = T.ivector('i')
    with mgpu.Predictor([i], i + 1, mode=FAST) as predictor, pytest.raises(BatchError, match='cannot take'):
        predictor.predict([1.5, 2.5])  # which a cast would make 1 and 2


def test_two_maps_at_a_time(cpu2):
    with sums(cpu2)[0] as predictor:
        pairs = list(zip(predictor.map(rows(2, i) for i in range(9)), predictor.map(rows(2, -i) for i in range(9))))
    assert [(a[0], b[0]) for a, b in pairs] == [(3 * i, -3 * i) for i in range(9)]


@pytest.mark.cuda
def test_while_a_step_trains_on_the_same_devices(contexts, kind):
    """The replicas have contexts of their own: neither disturbs the other, and the weights are those taken over."""
    contexts(kind, 2)
    x, w = T.matrix('x'), theano.shared(np.ones((7, 3), 'float32'), name='w')
    y, batch = T.dot(x, w), data(32, 7)[0]
    step = mgpu.training_function([x], (y ** 2).mean(), [w], lambda gradients: {w: w - 0.1 * gradients[0]})
    with mgpu.Predictor([x], y) as predictor:
        before = predictor.predict(batch)
        for _, outputs in zip(range(20), predictor.map(itertools.repeat(batch))):
            step(batch)
            np.testing.assert_array_equal(outputs, before)
        predictor.refresh()
        after = predictor.predict(batch)
        np.testing.assert_allclose(after, batch.dot(w.get_value()), rtol=1e-5, atol=1e-6)
        assert abs(after).max() < abs(before).max() / 2


# --- weights -------------------------------------------------------------------------------------

def test_refresh_takes_over_new_weights(contexts, kind):
    contexts(kind, 2)
    predictor, w = sums(contexts, prefetch=2)
    with predictor, warnings.catch_warnings():
        warnings.simplefilter('error')
        found = []
        for number, output in enumerate(predictor.map(rows(1) for _ in range(12))):
            found.append(float(output[0]))
            if number == 3:
                w.set_value(np.float32(10))
                predictor.refresh()
        # At most prefetch + replicas had been read before.
        assert found[:4] == [3] * 4 and found[8:] == [30] * 4 and found == sorted(found)
        np.testing.assert_array_equal(predictor.predict(rows(100)), [30] * 100)


def test_changed_weights_are_warned_of_once(cpu2):
    predictor, w = sums(cpu2)
    with predictor:
        update = theano.function([], updates={w: w + 1})
        for change in (lambda: w.set_value(np.float32(7)), update):
            with warnings.catch_warnings():
                warnings.simplefilter('error')
                predictor.predict(rows(2))
            change()
            with pytest.warns(MgpuWarning, match=r'until refresh\(\) is called') as caught:
                predictor.predict(rows(2))
            assert caught[0].filename == __file__
            with warnings.catch_warnings():
                warnings.simplefilter('error')
                predictor.predict(rows(2))
            predictor.refresh()
        assert predictor.predict(rows(1)) == 24


def test_random_numbers_are_those_of_the_batch(contexts, kind):
    """The same for one replica and for several, other ones for each batch, and the user's stream stays where it is."""
    x, stream = T.matrix('x'), MRG_RandomStreams(3)
    drawn = x + stream.uniform((x.shape[0], 3))
    found = []
    for n in (1, 2):
        contexts(kind, n)
        state = stream.state_updates[0][0].get_value()
        with mgpu.Predictor([x], drawn, mode=FAST) as predictor:
            first, second = predictor.predict(rows(60), batch_size=8), predictor.predict(rows(60), batch_size=8)
        np.testing.assert_array_equal(state, stream.state_updates[0][0].get_value())
        assert len(np.unique(np.concatenate([first, second]))) > 350
        found.append([first, second])
    np.testing.assert_array_equal(*found)
    contexts('cpu', 1)
    np.testing.assert_allclose(found[0][0][:8], theano.function([x], drawn, mode=FAST)(rows(8)), rtol=1e-6)


def test_draws_that_are_optimised_away_cost_nothing(cpu2):
    x, training = T.matrix('x'), T.iscalar('training')
    drawn = T.switch(training, x * MRG_RandomStreams(3).uniform((x.shape[0], 3)), x)
    with mgpu.Predictor([x], drawn, givens={training: np.int32(0)}, mode=FAST) as predictor:
        before = predictor._states
        np.testing.assert_array_equal(predictor.predict(rows(40)), rows(40))
        assert predictor._draws == [False] and predictor._states is before


# --- who computes what, and when -----------------------------------------------------------------

def slow_down(replica, seconds):
    run = replica.run
    replica.run = lambda job: (time.sleep(seconds), run(job))[1]


def test_the_free_replica_is_next(cpu2):
    """One replica takes ten times as long as the other, and gets about a tenth of the batches."""
    with sums(cpu2)[0] as predictor:
        for replica, seconds in zip(predictor.replicas, (0.05, 0.005)):
            slow_down(replica, seconds)
        found = [float(output[0]) for output in predictor.map(rows(1, i) for i in range(60))]
        assert found == [3.0 * i for i in range(60)]
        slow, fast = (replica.calls for replica in predictor.replicas)
    assert slow + fast == 60 and 1 <= slow < fast / 2


@pytest.mark.parametrize('prefetch', [0, 3])
def test_back_pressure(cpu2, prefetch):
    """No more batches are alive than prefetch + replicas, whoever is slow: reader, replica or consumer."""
    alive, most = [0], [0]

    def gone():
        alive[0] -= 1

    def batches():
        for i in range(30):
            batch = rows(2, i)
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(batch, gone)
            yield batch
            del batch

    with sums(cpu2, prefetch=prefetch)[0] as predictor:
        slow_down(predictor.replicas[0], 0.01)
        for number, output in enumerate(predictor.map(batches())):
            time.sleep(0.002)
            assert output[0] == 3 * number
    assert most[0] <= prefetch + 2
    assert most[0] > prefetch


TEN_GB = '''
import sys
import theano_mgpu as mgpu
import numpy as np
import theano.tensor as T
mgpu.init(sys.argv[1])
x = T.fmatrix('x')
MB = 1 << 20

def peak():
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith('VmHWM'))

def batches(n):
    for i in range(n):
        yield np.full((8192, 1024), i % 7, 'float32')  # 32 MB

with mgpu.Predictor([x], x[:, 5], prefetch=2) as predictor:
    list(predictor.map(batches(len(predictor.replicas))))
    before = peak()
    for i, outputs in enumerate(predictor.map(batches(320))):
        assert outputs[0] == i % 7 and len(outputs) == 8192
    print(i + 1, (peak() - before) // MB)
'''


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='reads /proc')
def test_ten_gigabytes_pass_through(kind):
    """Two replicas and two batches read ahead: four batches of 32 MB, one of which was in memory before."""
    done = subprocess.run([sys.executable, '-c', TEN_GB, context_map(kind, 2)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    n, megabytes = map(int, done.stdout.split())
    assert n == 320 and megabytes <= 4 * 32 + 16


def test_an_endless_reader_that_is_given_up(cpu2):
    read = itertools.count()
    with sums(cpu2)[0] as predictor:
        outputs = predictor.map(rows(1, i) for i in read)
        assert [float(next(outputs)[0]) for _ in range(5)] == [0, 3, 6, 9, 12]
        outputs.close()
        assert next(read) <= 5 + 4
        assert len(predictor.predict(rows(100))) == 100


def test_batches_that_nobody_waits_for_are_not_computed(cpu2):
    with sums(cpu2, prefetch=10)[0] as predictor:
        replicas = predictor.replicas
        for replica in replicas:
            slow_down(replica, 0.05)
        outputs = predictor.map(rows(1) for _ in range(100))
        next(outputs)
        outputs.close()
    assert sum(replica.calls for replica in replicas) <= 4


def test_outputs_do_not_wait_for_the_reader(cpu2):
    """A finished batch is yielded before the next one is read."""
    times = []

    def batches():
        for _ in range(4):
            yield rows(1)
            time.sleep(0.2)
            times.append(time.monotonic())

    with sums(cpu2)[0] as predictor:
        predictor.predict(rows(1))
        for number, _ in enumerate(predictor.map(batches())):
            if number == 0:
                assert len(times) <= 1


# --- faults --------------------------------------------------------------------------------------

def faulty(n, bad):
    return (rows(2, i) if i != bad else np.ones((2, 4, 4)) for i in range(n))


def test_a_failing_batch_raises_with_its_index(contexts, kind):
    contexts(kind, 2)
    with sums(contexts)[0] as predictor:
        outputs = predictor.map(faulty(20, bad=7))
        found = list(itertools.islice(outputs, 7))
        assert [float(output[0]) for output in found] == [3.0 * i for i in range(7)]
        with pytest.raises(PredictionError, match='batch 7 failed on context .*->.*: BatchError: input x') as caught:
            next(outputs)
        assert caught.value.index == 7 and isinstance(caught.value.__cause__, BatchError)
        assert caught.value.context in predictor.contexts
        with pytest.raises(StopIteration):
            next(outputs)
        assert len(predictor.predict(rows(5))) == 5


def test_a_failing_batch_in_its_place(contexts, kind):
    contexts(kind, 2)
    with sums(contexts)[0] as predictor:
        found = list(predictor.map(faulty(20, bad=7), on_error='yield'))
        assert isinstance(found[7], PredictionError) and found[7].index == 7
        assert [float(found[i][0]) for i in range(20) if i != 7] == [3.0 * i for i in range(20) if i != 7]


def test_a_batch_of_too_many_arrays(cpu2):
    with sums(cpu2)[0] as predictor:
        found = list(predictor.map([rows(1), [rows(1), rows(1)], {'y': rows(1)}, rows(1)], on_error='yield'))
        assert [isinstance(output, PredictionError) for output in found] == [False, True, True, False]
        assert "2 arrays were given for the inputs ['x']" in str(found[1])
        assert "arrays for ['y'] were given" in str(found[2])
        assert found[1].context is None and isinstance(found[1].__cause__, BatchError)


def test_a_reader_that_fails(cpu2):
    """What it gave before is computed and yielded first."""
    def batches():
        yield rows(1)
        yield rows(1, 2)
        raise OSError('disk')

    found = []
    with sums(cpu2)[0] as predictor, pytest.raises(OSError, match='disk'):
        for replica in predictor.replicas:
            slow_down(replica, 0.05)
        for output in predictor.map(batches()):
            found.append(float(output[0]))
    assert found == [3, 6]


def test_close_gives_everything_back(contexts, kind):
    contexts(kind, 2)
    before = threading.active_count()
    predictor, _ = sums(contexts)
    with predictor:
        predictor.predict(rows(100))
        names = [context.name for context in predictor.contexts]
        gone = [weakref.ref(replica.function) for replica in predictor.replicas]
    gc.collect()
    assert threading.active_count() == before and not any(ref() for ref in gone)
    for use in (lambda: predictor.predict(rows(1)), lambda: predictor.map([])):
        with pytest.raises(MgpuError, match='this Predictor is closed'):
            use()
    predictor.close()
    with sums(contexts)[0] as again:
        assert [context.name for context in again.contexts] == names


def test_one_that_is_forgotten_ends_its_threads(cpu2):
    before = threading.active_count()
    predictor, _ = sums(cpu2)
    predictor.predict(rows(100))
    names = {context.name for context in predictor.contexts}
    del predictor
    gc.collect()
    for _ in range(100):
        if threading.active_count() <= before:  # fewer, where one of another test has ended meanwhile
            break
        time.sleep(0.05)
    assert threading.active_count() <= before
    with sums(cpu2)[0] as again:
        assert {context.name for context in again.contexts} == names


def test_two_predictors_never_share_a_context(contexts, kind):
    contexts(kind, 2)
    with sums(contexts)[0] as one, sums(contexts)[0] as other:
        assert not set(one.contexts) & set(other.contexts) and not set(one.contexts) & set(mgpu.contexts())


def test_what_a_call_changes_is_refused(cpu2):
    count = theano.shared(0, name='count')
    count.default_update = count + 1
    x = T.matrix('x')
    with pytest.raises(GraphError, match=r'changes count \(default_update\).*mgpu.function'):
        mgpu.Predictor([x], x * count)


@pytest.mark.parametrize('name,value', [('replicas_per_context', 0), ('replicas_per_context', 1.5), ('prefetch', -1),
                                        ('prefetch', True)])
def test_bad_numbers(cpu2, name, value):
    with pytest.raises(ValueError, match='%s=%r: give a whole number' % (name, value)):
        sums(cpu2, **{name: value})


def test_bad_arguments(cpu2):
    a, b = T.matrix('a'), T.matrix('b')
    with mgpu.Predictor([a, b], a + b, mode=FAST) as predictor:
        with pytest.raises(BatchError, match='different lengths.*a has 2, b has 3'):
            predictor.predict(rows(2), rows(3))
        with pytest.raises(BatchError, match=r"1 arrays were given for the inputs \['a', 'b'\]"):
            predictor.predict(rows(2))
        with pytest.raises(ValueError, match='batch_size=0'):
            predictor.predict(rows(2), rows(2), batch_size=0)
        with pytest.raises(ValueError, match="on_error='ignore'"):
            predictor.map([], on_error='ignore')
    with mgpu.Predictor([a], a.sum(), mode=FAST) as predictor, pytest.raises(BatchError, match=r'shapes \(\) cannot'):
        predictor.predict(rows(2))
    with mgpu.Predictor([a], a[:1], mode=FAST) as predictor, pytest.raises(BatchError, match='2 rows for 60 samples'):
        predictor.predict(rows(60))


def test_progress(cpu2, capfd):
    with sums(cpu2)[0] as predictor:
        predictor.predict(rows(100), verbose=0)
        assert not capfd.readouterr().err
        predictor.predict(rows(100), verbose=1)
    shown = capfd.readouterr().err
    assert '100/100' in shown and 'samples/s' in shown


def test_contexts_that_are_named(contexts):
    contexts('cpu', 3)
    with sums(contexts, contexts=['host2', 'host0'])[0] as predictor:
        assert [context.name for context in predictor.contexts] == ['host2.1', 'host0.1']
    with sums(contexts, contexts=['host1'])[0] as predictor:
        assert len(predictor.predict(rows(70))) == 70


def test_the_users_own_name_is_not_taken(contexts):
    mgpu.init('a->cpu;a.1->cpu')
    with sums(contexts)[0] as predictor:
        assert [context.name for context in predictor.contexts] == ['a.2', 'a.1.1']
    mgpu.init(context_map('cpu', 2))
