"""`theano_mgpu.keras.Predictor` against `keras.Model.predict`."""

from theano_mgpu.errors import ContextError, MgpuError, MgpuWarning, PredictionError
from theano_mgpu.keras import Predictor, multi_gpu_model
from theano_mgpu.utils import progress

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import backend as K
from keras import layers as L
from keras.models import Model, Sequential
from scipy import sparse
from support import keras_zoo as zoo
from support.keras_equivalence import COMPILED, QUICK  # chooses Keras's backend first
from support.strategies import examples

SIZES = [0, 1, 2, 31, 33, 250, 2049]


def masked_rnn():
    a = L.Input((None,))
    return Model(a, L.Dense(3)(L.LSTM(4)(L.Embedding(7, 4, mask_zero=True)(a))))


def normalised():
    """Return a model whose running averages are not the initial ones."""
    model = Sequential([L.Dense(5, input_shape=(6,)), L.BatchNormalization(), L.Activation('tanh'), L.Dropout(0.5),
                        L.Dense(3), L.BatchNormalization()])
    model.set_weights([abs(zoo.noise(*weight.shape)) for weight in model.get_weights()])
    return model


def convolution():
    return Sequential([L.Conv2D(3, 3, input_shape=(6, 6, 2)), L.MaxPooling2D(2), L.Dropout(0.5), L.Flatten(),
                       L.Dense(3)])


MODELS = {
    'several inputs and outputs': (zoo.functional, lambda n: [zoo.noise(n, 6), zoo.noise(n, 4)]),
    'shared layer': (zoo.shared_layer, lambda n: [zoo.noise(n, 6), zoo.noise(n, 6, seed=5)]),
    'nested': (zoo.nested, lambda n: zoo.noise(n, 6)),
    'rnn with mask': (masked_rnn, lambda n: zoo.tokens(n, 5)),
    'batch normalisation': (normalised, lambda n: zoo.noise(n, 6)),
    'convolution': (convolution, lambda n: zoo.noise(n, 6, 6, 2)),
}
QUICK_ONES = [('cpu', name) for name in MODELS if name not in ('rnn with mask', 'convolution')]
QUICK_ONES.append(('gpu', 'several inputs and outputs'))


def as_list(arrays):
    return arrays if isinstance(arrays, list) else [arrays]


def assert_equal(ours, theirs):
    assert type(ours) is type(theirs)
    ours, theirs = as_list(ours), as_list(theirs)
    assert [o.shape for o in ours] == [t.shape for t in theirs]
    for o, t in zip(ours, theirs):
        np.testing.assert_allclose(o, t, rtol=1e-6, atol=1e-6 * abs(t).max())


@pytest.fixture
def dense(cpu2):
    """Return a model on two contexts, its Predictor, and the predictions for 70 samples."""
    model, x = zoo.dense(), zoo.noise(70, 6)
    with Predictor(model) as predictor:
        yield model, predictor, x, model.predict(x)


@pytest.mark.slow_but_with('cpu-nested', 'cpu-shared layer')
@pytest.mark.needs_compiler
@pytest.mark.parametrize('kind,name', [
    pytest.param(kind, name, marks=[] if (kind, name) in QUICK_ONES else [pytest.mark.slow])
    for kind in ('cpu', 'gpu') for name in MODELS])
def test_any_number_of_samples(contexts, kind, name):
    contexts(kind, 2)
    make, data = MODELS[name]
    model = make()
    model.compile('sgd', 'mse', mode=None if kind == 'gpu' else COMPILED if make is convolution else QUICK)
    with Predictor(model) as predictor:
        for n in SIZES[:5] if kind == 'gpu' else SIZES:
            x = data(n)
            for batch_size in (None, 7)[:1 if n > 300 else 2]:
                assert_equal(predictor.predict(x, batch_size=batch_size),
                             model.predict(x, batch_size=batch_size or 32))
        x = data(100)
        batches = [x[i:i + 9] if not isinstance(x, list) else [a[i:i + 9] for a in x] for i in range(0, 100, 9)]
        for batch, outputs in zip(batches, predictor.map(iter(batches))):
            assert_equal(outputs, model.predict_on_batch(batch))


def test_random_sizes(cpu2):
    model = zoo.functional()
    with Predictor(model) as predictor:
        @examples(12)
        @given(st.integers(0, 3000), st.integers(1, 300))
        def check_one(n, batch_size):
            x = [zoo.noise(n, 6, seed=n), zoo.noise(n, 4, seed=n)]
            assert_equal(predictor.predict(x, batch_size=batch_size), model.predict(x, batch_size=batch_size))
        check_one()


class Batches(keras.utils.Sequence):
    """A sequence with items of different lengths, with targets and weights as for evaluation."""

    def __init__(self, x, members=3):
        self.x, self.members = x, members

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return (self.x[9 * i:9 * i + 9], None, None)[:self.members] if self.members else self.x[9 * i:9 * i + 9]


@pytest.mark.parametrize('members', [0, 2, 3])
def test_sequence(dense, members, capfd, monkeypatch):
    monkeypatch.setattr(progress, 'is_shown', lambda: True)  # test_progress.py has a terminal
    model, predictor, x, expected = dense
    assert_equal(predictor.predict(Batches(x, members), verbose=1), expected)
    shown = capfd.readouterr().err
    assert '70.0/70.0' in shown and 'samples/s' in shown
    assert_equal(np.concatenate(list(predictor.map(Batches(x, members)[i] for i in range(8)))), expected)
    with pytest.raises(ValueError, match='batch_size=9 was given with a Sequence'):
        predictor.predict(Batches(x), batch_size=9)


def test_dicts(cpu2):
    model, n = zoo.functional(), 40
    a, b = zoo.noise(n, 6), zoo.noise(n, 4)
    names = model.input_names
    with Predictor(model) as predictor:
        assert_equal(predictor.predict({names[1]: b, names[0]: a}), model.predict([a, b]))
        assert_equal(list(predictor.map([{names[1]: b, names[0]: a}]))[0], model.predict_on_batch([a, b]))
        with pytest.raises(ValueError, match=names[1]):
            predictor.predict({names[0]: a})


def test_arrays_on_disk(dense, tmp_path):
    import h5py
    model, predictor, x, expected = dense
    np.save(str(tmp_path / 'x.npy'), x)
    assert_equal(predictor.predict(np.load(str(tmp_path / 'x.npy'), mmap_mode='r')), expected)
    with h5py.File(str(tmp_path / 'x.h5'), 'w') as file:
        file['x'] = x
        assert_equal(predictor.predict(file['x']), expected)
        assert_equal(predictor.predict(keras.utils.HDF5Matrix(str(tmp_path / 'x.h5'), 'x')), expected)


def test_sparse_arrays(dense):
    model, predictor, x, expected = dense
    assert_equal(predictor.predict(sparse.csr_matrix(x)), expected)


def test_classes(cpu2):
    x = zoo.noise(70, 6)
    for units in (3, 1):
        model = Sequential([L.Dense(units, activation='sigmoid', input_shape=(6,))])
        with Predictor(model) as predictor:
            assert_equal(predictor.predict_proba(x), model.predict_proba(x))
            np.testing.assert_array_equal(predictor.predict_classes(x), model.predict_classes(x))
    with Predictor(zoo.nested()) as predictor, pytest.raises(AttributeError, match='is for a keras.Sequential'):
        predictor.predict_classes(x)


def test_models_that_were_never_compiled_or_are_parallel_or_subclassed(cpu2):
    class Own(Model):
        def __init__(self):
            super().__init__()
            self.inner = L.Dense(3)

        def call(self, inputs):
            return self.inner(inputs)

    x = zoo.noise(40, 6)
    plain, own = zoo.dense(), Own()
    expected = own.predict(x)
    with Predictor(multi_gpu_model(plain)) as predictor:
        assert_equal(predictor.predict(x), plain.predict(x))
    with Predictor(own) as predictor:
        assert_equal(predictor.predict(x), expected)


@pytest.mark.slow
def test_refresh(dense):
    """Training leaves the Predictor's weights as they are, and the Predictor says so, until refresh."""
    model, predictor, x, expected = dense
    model.compile('adam', 'mse')
    model.fit(x, zoo.one_hot(70), verbose=0)
    with pytest.warns(MgpuWarning, match='refresh') as told:
        assert_equal(predictor.predict(x), expected)
    assert told[0].filename == __file__
    predictor.refresh()
    assert abs(model.predict(x) - expected).max() > 1e-4
    assert_equal(predictor.predict(x), model.predict(x))


def test_the_model_goes_on_as_if_nothing_had_happened(cpu2):
    """Predicting moves neither the random streams nor the running averages of the model."""
    x, y = zoo.noise(40, 6), zoo.noise(40, 3)
    weights = []
    for predicts in (False, True):
        np.random.seed(0)
        model = Sequential([L.Dense(5, input_shape=(6,)), L.BatchNormalization(), L.Dropout(0.5), L.Dense(3)])
        model.compile('sgd', 'mse', mode=QUICK)
        if predicts:
            with Predictor(model) as predictor:
                predictor.predict(x)
        model.fit(x, y, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights):
        np.testing.assert_array_equal(ours, theirs)


def test_layers_that_draw_at_prediction(contexts):
    """Monte Carlo dropout draws anew for each batch, and draws the same for any number of contexts."""
    found = []
    for n in (1, 3):
        contexts('cpu', n)
        np.random.seed(0)
        a = L.Input((50,))
        with Predictor(Model(a, L.Dropout(0.5, seed=1)(a, training=True))) as predictor:
            found.append([predictor.predict(np.ones((40, 50)), batch_size=10) for _ in range(2)])
    np.testing.assert_array_equal(*found)
    first, second = found[0]
    assert (first != second).mean() > 0.4 and (first[:10] != first[10:20]).mean() > 0.4


def test_a_failing_batch(dense):
    model, predictor, x, expected = dense
    batches = [x[:10], x[10:20, :5], x[20:]]
    found = list(predictor.map(batches, on_error='yield'))
    assert_equal(np.concatenate([found[0], found[2]]), np.concatenate([expected[:10], expected[20:]]))
    assert found[1].index == 1
    with pytest.raises(PredictionError, match=r'batch 1 failed.*expected dense_.*shape \(6,\)'):
        list(predictor.map(batches))


def test_learning_phase_that_is_set(cpu2):
    """K.set_learning_phase makes the phase a number, which is a constant of the graph."""
    phase = K.learning_phase()
    try:
        K.set_learning_phase(0)
        model, x = Sequential([L.Dense(3, input_shape=(6,)), L.Dropout(0.5)]), zoo.noise(40, 6)
        with Predictor(model) as predictor:
            assert_equal(predictor.predict(x), model.predict(x))
    finally:
        K.common._LEARNING_PHASE = K.theano_backend._LEARNING_PHASE = phase


def test_what_cannot_be_predicted(cpu2):
    stateful = Sequential([L.LSTM(3, stateful=True, batch_input_shape=(4, 5, 4))])
    with pytest.raises(ValueError, match='is stateful.*multi_gpu_model'):
        Predictor(stateful)
    with pytest.raises(ValueError, match='is not built yet.*before Predictor'):
        Predictor(Sequential([L.Dense(3)]))
    with pytest.raises(ValueError, match='Predictor takes a keras.Model'):
        Predictor('model.h5')
    with pytest.raises(ContextError, match='gpus=5'):
        Predictor(zoo.dense(), gpus=5)
    with Predictor(zoo.dense(), gpus=['host1']) as predictor:
        assert len(predictor.replicas) == 1
        with pytest.raises(ValueError, match=r'map\(generator\)'):
            predictor.predict(zoo.noise(5, 6) for _ in range(3))
        with pytest.raises(ValueError, match='batch_size=0'):
            predictor.predict(zoo.noise(5, 6), batch_size=0)
    with pytest.raises(MgpuError, match='closed'):
        predictor.predict(zoo.noise(5, 6))
