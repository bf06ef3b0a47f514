"""`mgpu.Predictor`: consecutive batches that are computed together, each with the outputs that it has alone."""
import itertools
import warnings

import theano_mgpu as mgpu
from theano_mgpu.errors import BatchError, GraphError, MgpuWarning

import numpy as np
import pytest
import theano
import theano.tensor as T
from hypothesis import given
from hypothesis import strategies as st
from support.prediction import FAST, rows, sums
from support.small_models import data, dense_model
from support.strategies import examples
from theano.sandbox.rng_mrg import MRG_RandomStreams

SIZES = [0, 1, 2, 31, 32, 33, 200, 1777]


@pytest.fixture(scope='module')
def model():
    return dense_model()


@pytest.fixture(scope='module')
def plain(model):
    return theano.function(model.inputs[:1], model.probabilities, mode=FAST)


@pytest.mark.slow_with('gpu')
def test_any_number_of_samples(contexts, kind, model, plain):
    contexts(kind, 2)
    with mgpu.Predictor(model.inputs[:1], model.probabilities, mode=FAST) as predictor:
        assert len(predictor.replicas) == 2
        for n in SIZES:
            x, _ = data(n, 7, seed=n)
            for batch_size in (None, 32, 7)[:3 if n < 300 else 1]:
                found = predictor.predict(x, batch_size=batch_size)
                assert found.shape == (n, 4)
                if n:  # Theano's own function fails for none
                    np.testing.assert_allclose(found, plain(x), rtol=1e-6, atol=1e-7)


@pytest.mark.slow_with('gpu')
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
        @examples(10)
        @given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
        def check_one(sizes):
            outputs = list(predictor.map(rows(n, n) for n in sizes))
            assert [len(part) for part in outputs] == sizes
            np.testing.assert_array_equal(np.concatenate(outputs), np.repeat(3.0 * np.array(sizes), sizes))
        check_one()


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
    """Training and prediction do not disturb each other, nor their weights."""
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
        assert found == [3] * 4 + [30] * 8  # the batches of a group are computed together
        np.testing.assert_array_equal(predictor.predict(rows(100)), [30] * 100)


@pytest.mark.slow_with('gpu')
def test_large_weights_are_not_taken_for_memory_that_the_script_edits(contexts, kind):
    contexts(kind, 2)
    x, w = T.matrix('x'), theano.shared(np.ones((3, 500000), theano.config.floatX))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with mgpu.Predictor([x], T.dot(x, w)[:, :2], mode=FAST) as predictor:
            for value in (1, 2):
                w.set_value(np.full((3, 500000), value, theano.config.floatX))
                predictor.refresh()
                np.testing.assert_array_equal(predictor.predict(rows(70)), np.full((70, 2), 3.0 * value))


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


@pytest.mark.slow_with('gpu')
def test_random_numbers_are_those_of_the_batch(contexts, kind):
    """Plain Theano draws the same, batch after batch; the user's stream stays where it is."""
    x, stream = T.matrix('x'), MRG_RandomStreams(3)
    drawn = x + stream.uniform((x.shape[0], 3))
    found = []
    for n in (1, 2):
        contexts(kind, n)
        state = stream.state_updates[0][0].get_value()
        with mgpu.Predictor([x], drawn, mode=FAST) as predictor:
            first, second = predictor.predict(rows(60), batch_size=8), predictor.predict(rows(60), batch_size=8)
            ops = [str(node.op) for node in predictor._function.functions[0].maker.fgraph.apply_nodes]
            assert any('GPUA_mrg_uniform' in op for op in ops) == (kind == 'gpu')
        np.testing.assert_array_equal(state, stream.state_updates[0][0].get_value())
        assert len(np.unique(np.concatenate([first, second]))) > 350
        found.append([first, second])
    np.testing.assert_array_equal(*found)
    contexts('cpu', 1)
    f = theano.function([x], drawn, mode=FAST)
    for of_call in found[0]:
        np.testing.assert_allclose(of_call, np.concatenate([f(rows(n)) for n in [8] * 7 + [4]]), rtol=1e-6)


def test_a_script_that_computes_test_values(cpu2):
    x, stream = T.matrix('x'), MRG_RandomStreams(3)
    with theano.configparser.change_flags(compute_test_value='raise'):
        x.tag.test_value = rows(2)
        with mgpu.Predictor([x], x + stream.uniform((2, 3)), mode=FAST) as predictor:
            assert predictor.predict(rows(2)).shape == (2, 3)


def test_draws_that_are_optimised_away_cost_nothing(cpu2):
    x, training = T.matrix('x'), T.iscalar('training')
    drawn = T.switch(training, x * MRG_RandomStreams(3).uniform((x.shape[0], 3)), x)
    with mgpu.Predictor([x], drawn, givens={training: np.int32(0)}, mode=FAST) as predictor:
        np.testing.assert_array_equal(predictor.predict(rows(40)), rows(40))
        assert not predictor._function.updated  # private: no result shows a state that is computed in vain


@pytest.mark.cuda
def test_a_batch_that_is_sent_ahead_has_its_own_length(gpu2):
    """Six samples after two batches of seven: each device would take its three samples for a batch."""
    x = T.matrix('x')
    with mgpu.Predictor([x], x / x.shape[0], mode=FAST) as predictor:
        found = predictor.predict(rows(20), batch_size=7)
    np.testing.assert_allclose(found, rows(20) / np.repeat([7, 6], [14, 6])[:, None], rtol=1e-6)


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


def test_contexts_that_are_named(contexts):
    contexts('cpu', 3)
    with sums(contexts, contexts=['host2', 'host0'])[0] as predictor:
        assert [context.name for context in predictor.contexts] == ['host2', 'host0']
    with sums(contexts, contexts=['host1'])[0] as predictor:
        assert len(predictor.predict(rows(70))) == 70


# Graphs of one input whose outputs for two batches differ from the outputs for both as one, and some that do not.
GRAPHS = {
    'rows': lambda x: T.tanh(x),
    'mean': lambda x: x.mean(),
    'centred': lambda x: x - x.mean(axis=0),
    'divided by the length': lambda x: x / x.shape[0],
    'another branch for long batches': lambda x: T.switch(x.shape[0] > 9, x, -x),
    'places': lambda x: x + T.arange(x.shape[0])[:, None],
    'first': lambda x: x[:1],
    'columns': lambda x: x.T,
    'reshaped': lambda x: x.reshape((x.shape[0], -1, 1)).repeat(2, axis=2).flatten(2),
    'several': lambda x: [2 * x, x.sum(axis=0), x.shape[0]],
}


@pytest.mark.slow_but_with('centred', 'columns', 'first', 'mean', 'rows')
@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.filterwarnings('ignore:predict runs whole')
def test_each_batch_has_the_outputs_that_it_has_alone(contexts, name):
    contexts('cpu', 3)
    x = T.matrix('x')
    outputs, data_ = GRAPHS[name](x), data(80, 4)[0]
    alone = theano.function([x], outputs, mode=FAST)
    with mgpu.Predictor([x], outputs, mode=FAST) as predictor:
        for sizes in ([5] * 9 + [4], [7, 7, 7, 8, 6, 7], [1] * 7, [2, 9, 1]):
            batches = np.split(data_[:sum(sizes)], np.cumsum(sizes)[:-1])
            for ours, batch in zip(predictor.map(iter(batches)), batches):
                ours, theirs = (each if isinstance(each, list) else [each] for each in (ours, alone(batch)))
                for one, other in zip(ours, theirs):
                    assert one.shape == other.shape
                    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_batches_of_other_types_and_shapes_are_apart(cpu2):
    x, scale = T.tensor3('x'), T.scalar('scale')
    batches = [[np.ones((2, 3, n), dtype), value]
               for n in (1, 1, 4) for dtype in ('float32', 'int8') for value in (1, 2)]
    with mgpu.Predictor([x, scale], x.sum(axis=2) * scale, mode=FAST) as predictor:
        found = list(predictor.map(batches))
    for outputs, (array, value) in zip(found, batches):
        np.testing.assert_array_equal(outputs, np.full((2, 3), array.shape[2] * value))


@pytest.mark.parametrize('samples', [1, 0])
def test_empty_batches_among_others(cpu2, samples):
    sizes = [samples, 0, 3, 0, 0, 2]
    with sums(cpu2)[0] as predictor:
        assert [len(outputs) for outputs in predictor.map(rows(n) for n in sizes)] == sizes


def test_a_group_is_one_step(cpu2):
    x = T.matrix('x')
    for outputs in (x * 2, x * x.shape[0]):
        with mgpu.Predictor([x], outputs, mode=FAST) as predictor:
            predictor.predict(rows(60), batch_size=10)
            assert predictor._function.calls == 3


def test_replicas_per_context_is_deprecated(cpu2):
    with pytest.warns(FutureWarning, match=r'replicas_per_context=2 \(replicas_per_gpu\) has no effect any more'):
        predictor, _ = sums(cpu2, replicas_per_context=2)
    assert len(predictor.replicas) == 2


@pytest.mark.slow_with('gpu')
def test_a_reader_may_read_variables_and_call_functions(contexts, kind):
    contexts(kind, 2)
    predictor, w = sums(contexts)
    double = theano.function([], updates={w: 2 * w})

    def batches():
        for _ in range(6):
            double()
            yield rows(1, w.get_value())
    with predictor:
        assert [float(output[0]) for output in predictor.map(batches())] == [6, 12, 24, 48, 96, 192]
