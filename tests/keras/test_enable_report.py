"""Models that `enable()` leaves alone, its notes, their effects in strict mode and under verify, and the report."""
import warnings

import theano_mgpu as mgpu
from theano_mgpu.auto import report as report_module
from theano_mgpu.auto.divided_model import divided_model_of
from theano_mgpu.auto.report import SHOWN, Report
from theano_mgpu.keras import Checkpoint, Predictor, disable, enable, multi_gpu_model, verify
from theano_mgpu.utils.values import TOLERANCE

import keras
import numpy as np
import pytest
import theano
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential
from support.interrupts import interrupted_at_each_line
from support.keras_equivalence import QUICK, assert_equal, built, values
from support.keras_zoo import dense, head, noise, one_hot

X, Y = noise(43, 6).astype('float32'), one_hot(43).astype('float32')


@pytest.fixture(autouse=True)
def two_contexts(contexts, interpreted):
    contexts('cpu', 2)
    yield
    disable()


@pytest.fixture
def divided_without_measuring():
    """Divide each batch by a serial executor, and let a trial say which way would be faster."""
    with theano.configparser.change_flags(**{'mgpu.executor': 'serial'}):
        yield


def compiled(model, loss='categorical_crossentropy', **kwargs):
    model.compile('adam', loss, **dict({'mode': QUICK}, **kwargs))
    return model


def normalised():
    return Sequential([L.Dense(4, input_shape=(6,)), L.BatchNormalization(), head()])


def outside_the_batch(x):
    return K.sum(x, axis=0, keepdims=True)


# --- Which models --------------------------------------------------------------------------------

@pytest.mark.slow
def test_only_models_compiled_while_it_is_enabled(recwarn):
    before = compiled(dense())
    report = enable(always=True)
    during, never = compiled(dense()), dense()
    never.predict(X)
    disable()
    after = compiled(dense())
    for model in (before, during, after):
        model.fit(X, Y, verbose=0, batch_size=20)
    states = [divided_model_of(model) for model in (before, during, never, after)]
    assert [state is not None for state in states] == [False, True, True, False]
    assert [usage.name for usage in report.usages] == [never.name + ' predict', during.name + ' train']
    assert hasattr(during.train_function, 'function') and not hasattr(before.train_function, 'forward')
    compiled(during)  # again, now that it is disabled
    assert divided_model_of(during) is None
    during.fit(X, Y, verbose=0)


def test_one_door_serves_functions_and_models():
    """Models were left to plain Keras by `mgpu.enable`, and functions to plain Theano by `theano_mgpu.keras.enable`."""
    assert mgpu.enable is enable and mgpu.disable is disable
    report = mgpu.enable(gpus=1, always=True)
    x = K.placeholder((None, 6))
    assert np.allclose(K.function([x], [x * 2], mode=QUICK)([X])[0], 2 * X)
    compiled(dense()).train_on_batch(X, Y)
    assert [usage.samples for usage in report.usages] == [43, 43] and len(report.usages[1].contexts) == 1


def test_a_model_that_is_not_used_has_no_reason():
    report = enable(1, always=True)
    used, _ = compiled(dense()), compiled(dense())
    used.train_on_batch(X, Y)
    title, _, row = str(report).splitlines()
    assert title.startswith('1 of 1 function on 1 context')
    assert row.startswith(used.name) and row.endswith('there is one context')


def test_chosen_contexts(contexts):
    contexts('cpu', 3)
    enable([2, 'host0'], always=True)
    assert [c.name for c in divided_model_of(compiled(dense())).contexts] == ['host2', 'host0']
    enable(1, always=True)
    assert len(divided_model_of(compiled(dense())).contexts) == 1
    with pytest.raises(mgpu.ContextError, match='`gpus=4`, as many contexts must be mapped; there are 3'):
        enable(4, always=True)


def test_data_tensors_are_left_to_plain_keras():
    data = L.Input(tensor=K.variable(X))
    model = Model(data, head()(data))
    report = enable(always=True)
    with pytest.warns(mgpu.MgpuWarning, match='left to plain Keras.*reads its data from a tensor'):
        model.compile('sgd', 'categorical_crossentropy', target_tensors=K.variable(Y))
    assert divided_model_of(model) is None
    model.fit(steps_per_epoch=3, epochs=1, verbose=0)
    title, header, row, *_ = report.without_notes().splitlines()
    assert title.endswith('of 2 functions on 2 contexts (host0->cpu;host1->cpu)')  # one is a function of Theano
    assert row.split()[:2] == [model.name, 'host']
    assert 'left to plain Keras: ' in row and 'reads its data from a tensor' in row


def test_targets_that_are_tensors_are_left_to_plain_keras():
    enable(always=True)
    model = dense()
    with pytest.warns(mgpu.MgpuWarning, match='left to plain Keras.*the targets are tensors'):
        model.compile('sgd', 'categorical_crossentropy', target_tensors=K.variable(Y))
    assert divided_model_of(model) is None


def test_options_that_contexts_do_not_take():
    enable(always=True)
    with pytest.warns(mgpu.MgpuWarning, match='left to plain Keras.*does not take profile'):
        model = compiled(dense(), profile=False)
    assert np.isfinite(model.train_on_batch(X, Y))


def test_outputs_that_are_no_samples_are_those_of_the_whole_batch():
    report = enable(always=True)
    a = L.Input((6,))
    model = Model(a, L.Lambda(outside_the_batch, output_shape=(6,))(a))
    for batch in (X, X[:1], X[:2]):
        np.testing.assert_allclose(model.predict_on_batch(batch), batch.sum(axis=0, keepdims=True), rtol=1e-5)
    assert len(model.predict_function.function.contexts) == 2 and not report.notes


def test_the_add_ons_own_models_and_keras_own_function():
    """`multi_gpu_model` and Predictor work as ever; a script that calls Keras's `multi_gpu_model` gets ours."""
    enable(always=True)
    model = compiled(dense())
    parallel = keras.utils.multi_gpu_model(model, gpus=2)
    assert parallel.template is model
    own = multi_gpu_model(built(dense), gpus=1)
    for each, n in ((parallel, 2), (own, 1)):
        compiled(each).fit(X, Y, verbose=0)
        assert len(each.contexts) == n
    with Predictor(model) as predictor:
        np.testing.assert_allclose(predictor.predict(X), model.predict(X), rtol=1e-4)
    disable()
    with pytest.raises(ValueError, match='TensorFlow'):
        keras.utils.multi_gpu_model(model, gpus=2)


def test_a_checkpoint_needs_contexts(tmp_path):
    path = str(tmp_path / 'c.npz')
    with pytest.raises(mgpu.MgpuError, match='over contexts.*left to plain Keras.*"theano-mgpu run SCRIPT"'):
        compiled(dense()).fit(X, Y, verbose=0, callbacks=[Checkpoint(path)])
    enable(always=True)
    model = compiled(dense())
    model.fit(X, Y, verbose=0, callbacks=[Checkpoint(path)])
    assert np.load(path)['extra/batches'] == 2


# --- Messages ------------------------------------------------------------------------------------

def ordered():
    return Sequential([L.Lambda(lambda x: theano.scan(lambda a, h: a + h, x, K.zeros((6,)))[0], name='ordered',
                                input_shape=(6,)), head()])


@pytest.mark.slow
def test_what_runs_on_one_context_is_said_once_of_each_model_at_the_users_line():
    report = enable(always=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        models = [compiled(ordered()) for _ in range(2)]
        for model in models + models[:1]:
            model.fit(X, Y, verbose=0)
            compiled(model).fit(X, Y, verbose=0)
    said = [w for w in caught if issubclass(w.category, mgpu.MgpuWarning)]
    assert len(said) == 2 and said[0].filename == __file__
    assert 'runs whole on host0->cpu, since it cannot be computed in parts: ' in str(said[0].message)
    assert 'it loops over samples' in str(said[0].message)
    assert report.notes == [str(w.message) for w in said]
    title, header, *rows = report.without_notes().splitlines()  # "theano-mgpu run" prints these, long after the notes
    assert header.split()[-1] == 'WHY'
    assert all('cannot be computed in parts: ' in row and 'it loops over samples' in row for row in rows)
    assert [note.split()[0] for note in report.notes] == [model.name for model in models]


def test_what_mixes_samples_is_exact_and_nothing_is_said():
    report = enable(always=True)
    centred = Sequential([L.Lambda(lambda x: x - K.mean(x, axis=0), output_shape=(6,), input_shape=(6,))])
    np.testing.assert_allclose(centred.predict(X, batch_size=50), X - X.mean(axis=0), rtol=1e-4, atol=1e-6)
    compiled(normalised()).fit(X, Y, verbose=0)
    assert not report.notes


def test_strict():
    enable(strict=True, always=True)
    assert np.isfinite(compiled(normalised()).train_on_batch(X, Y))
    with pytest.raises(mgpu.GraphError, match='runs whole on host0->cpu'):
        compiled(ordered()).fit(X, Y, verbose=0)


def test_one_reason_is_said_once_of_all_functions_of_a_model():
    """The same note came for train, test and predict, and again in the summary."""
    said = []
    report = enable(always=True, tell=said.append)
    model = compiled(ordered())
    model.fit(X, Y, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X)
    assert len(said) == 1 and said[0] in str(report) and said[0] not in report.without_notes()


def test_models_of_multi_gpu_model_are_counted():
    """A script that trained through `multi_gpu_model` was told that no Keras model ran."""
    report = enable()
    parallel = multi_gpu_model(dense())
    compiled(parallel).fit(X, Y, verbose=0, batch_size=20)
    parallel.predict(X)
    assert [(usage.name.split()[1], usage.samples) for usage in report.usages] == [('train', 43), ('predict', 43)]
    assert all(usage.contexts == mgpu.contexts() for usage in report.usages)
    assert '2 of 2 functions on 2 contexts' in str(report)


# --- Verification reports -------------------------------------------------------------------------

@pytest.mark.slow
def test_verify_prints_a_report_of_each_model_and_changes_nothing(capsys):
    states = []
    for checks in (True, False):
        enable(verify=checks, always=True)
        model, other = compiled(built(dense), metrics=['accuracy']), compiled(built(dense), 'mse')
        for each in (model, other):
            history = each.fit(X, Y, batch_size=10, epochs=1, shuffle=False, verbose=0).history
            states.append((values(each.weights + each.optimizer.weights), history))
    text = capsys.readouterr().err
    assert text.count('one step on one device and 2 contexts') == 2 == text.count('same answer')
    assert model.name.rpartition('_')[0] in text
    for (found, history), (expected, expected_history) in zip(states[:2], states[2:]):
        assert_equal(found, expected, 0)
        assert history == expected_history


def test_a_report_of_a_subclassed_model(capsys):
    class Subclassed(Model):
        def __init__(self):
            super().__init__()
            self.out = head()

        def call(self, x):
            return self.out(x)
    enable(verify=True, always=True)
    model = compiled(Subclassed())
    model.fit(X, Y, verbose=0)
    assert 'same answer' in capsys.readouterr().err
    assert verify(model, X, Y).passed


def test_models_that_do_not_train_get_a_report_of_what_they_do(capsys):
    enable(verify=True, always=True)
    generator, tested = built(dense), compiled(built(dense))
    state = Sequential([L.SimpleRNN(3, stateful=True, batch_input_shape=(6, 5, 4))])
    expected = generator.predict_on_batch(X)
    generator.predict(X, batch_size=10)
    first = capsys.readouterr().err
    assert first.count('one prediction on one device and 2 contexts') == 1 and 'output  ' in first
    assert 'same answer' in first
    np.testing.assert_allclose(generator.predict_on_batch(X), expected, rtol=1e-6)
    tested.evaluate(X, Y, verbose=0)
    tested.predict(X)
    tested.fit(X, Y, verbose=0)
    second = capsys.readouterr().err
    assert second.count('one evaluation on one device') == 1 == second.count('one step on one device')
    assert second.count('same answer') == 2
    state.predict(noise(6, 5, 4), batch_size=6)
    once = K.get_value(state.layers[0].states[0])
    state.reset_states()
    state.predict_on_batch(noise(6, 5, 4))
    np.testing.assert_array_equal(K.get_value(state.layers[0].states[0]), once)


def test_strict_makes_an_error_of_a_report_that_fails(monkeypatch):
    monkeypatch.setitem(TOLERANCE, 'float32', 0)
    enable(strict=True, verify=True, always=True)
    with pytest.raises(mgpu.GraphError, match='does not give the same answer'):
        compiled(built(dense)).fit(X, Y, verbose=0)


# --- The report ----------------------------------------------------------------------------------

def test_the_report():
    report = enable(always=True)
    assert not report
    model = compiled(dense(), metrics=['accuracy'])
    model.fit(X, Y, batch_size=10, verbose=0, validation_split=0.3)
    compiled(model).fit(X, Y, batch_size=10, verbose=0)
    model.predict(X[:7])
    title, header, *rows = str(report).splitlines()
    assert report and title == '3 of 3 functions on 2 contexts (host0->cpu;host1->cpu)'
    assert header.split() == ['FUNCTION', 'WHERE', 'BATCHES', 'SAMPLES', 'SAMPLES/S', 'WHY']
    cells = [row.split() for row in rows]
    assert [row[:6] for row in cells] == [[model.name, *others] for others in (
        ['train', 'host0', 'host1', '8', '73'], ['test', 'host0', 'host1', '2', '13'],
        ['predict', 'host0', 'host1', '1', '7'])]
    assert float(cells[0][6].replace(',', '')) > 0 and [row[7:] for row in cells] == [['divided']] * 3
    assert cells[2][6] == '-'


def test_many_functions_are_not_all_listed():
    report = Report()
    for number in range(SHOWN + 5):
        report.usage('model_%d' % number).add(1000, 0.5)
    assert str(report).endswith('and 5 more functions') and 'model_%d ' % (SHOWN - 1) in str(report)


def test_ctrl_c_at_any_line_leaves_a_report_that_counts_on():
    """A call that was counted by half raised a KeyError in every later one."""
    report = Report()

    def after(number):
        report.usage('model').add(1000, 0.5)
        assert 'model' in str(report)
        report.usages.clear()
    assert interrupted_at_each_line(lambda: report.usage('model').add(10, 0.5), [report_module], after) > 3
