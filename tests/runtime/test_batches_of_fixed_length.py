"""Bugs that were found and fixed, each under its symptom: batches of a fixed length or that cannot be divided."""
import contextlib

import theano_mgpu as mgpu

import numpy as np
import pytest
import theano.tensor as T
from support.small_models import data

pytestmark = pytest.mark.verified
FIXED = 10


def noisy(v):
    from keras import backend as K
    return v + K.random_normal((FIXED, 2))


def fixed_models():
    """Return {name: (model with FIXED written into it, contexts that it runs on, whether it draws random numbers)}."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Sequential

    def dense(n, fixed=True):
        return L.Dense(n, **({'batch_input_shape': (FIXED, 6)} if fixed else {'input_shape': (6,)}))

    def shaped(function, shape):
        return L.Lambda(function, output_shape=shape, name='fixed')
    return {
        'reshape': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, 2, 4)), (2, 4)), L.Flatten(),
                                        L.Dense(3)]), 2, False),
        'reshape to what is left': (lambda: Sequential([dense(8), shaped(lambda v: K.reshape(v, (FIXED, -1)), (8,)),
                                                        L.Dense(3)]), 2, False),
        'reshape, batch_input_shape not given': (lambda: Sequential([
            dense(8, False), shaped(lambda v: K.reshape(v, (FIXED, 8)), (8,)), L.Dense(3)]), 2, False),
        'filled': (lambda: Sequential([dense(2), shaped(lambda v: v * T.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                   2, False),
        'variable': (lambda: Sequential([dense(2), shaped(lambda v: v * K.ones((FIXED, 2)), (2,)), L.Dense(3)]),
                     2, False),
        # FIXED rows of 6 are whole rows of 4 together, not in parts.
        'merged': (lambda: Sequential([dense(6), shaped(lambda v: K.reshape(K.softmax(K.reshape(v, (-1, 4))), (-1, 6)),
                                                  (6,)), L.Dense(3)]), 1, False),
        'noise_shape': (lambda: Sequential([L.Dropout(0.5, noise_shape=(FIXED, 1), batch_input_shape=(FIXED, 6)),
                                            L.Dense(3)]), 2, True),
        'random_normal': (lambda: Sequential([dense(2), shaped(noisy, (2,)), L.Dense(3)]), 2, True),
        'random_normal, batch_input_shape not given': (lambda: Sequential([dense(2, False), shaped(noisy, (2,)),
                                                                           L.Dense(3)]), 2, True),
    }


def trained(model, x, y, size=FIXED, mode='FAST_COMPILE'):
    """Train, test and predict; return everything that this leaves behind."""
    from keras import backend as K
    model.compile('adam', 'mse', mode=mode)
    losses = [model.train_on_batch(x[i:i + size], y[i:i + size]) for _ in range(2) for i in range(0, len(x), size)]
    return [losses, model.evaluate(x, y, batch_size=size, verbose=0), model.predict(x, batch_size=size)] \
        + [K.get_value(w) for w in model.weights + model.optimizer.weights]


@pytest.mark.slow_but_with('variable-cpu')
@pytest.mark.parametrize('name,kind', [(name, 'cpu') for name in (
    'reshape, batch_input_shape not given', 'filled', 'variable', 'merged', 'noise_shape', 'random_normal',
    'reshape', 'reshape to what is left', 'random_normal, batch_input_shape not given')] + [
        ('merged', 'gpu'), ('random_normal', 'gpu')])
def test_a_model_with_the_length_of_its_batches_written_into_it_trains(name, kind, contexts, enabled):
    """"Input dimension mis-match", "total size of new array must be unchanged": sub-batches are shorter."""
    from theano_mgpu.keras import disable
    names = [context.name for context in contexts(kind, 2)]
    make, n_contexts, draws = fixed_models()[name]
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = make()
        found.append(trained(model, x, y, mode='FAST_COMPILE' if kind == 'cpu' else None))
    for one, other in zip(*found):
        assert np.shape(one) == np.shape(other) and np.isfinite(other).all()
        if not draws:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    functions = model.train_function, model.test_function, model.predict_function
    assert [len(function.function.contexts) for function in functions] == [n_contexts] * 3
    assert [context.name for context in report.usages[0].contexts] == names[:n_contexts]
    notes = [note for note in report.notes if 'runs on one context' in note]
    assert len(notes) == (n_contexts == 1)
    assert all('replica 0' in note and model.name in note and note in str(report) for note in notes)
    if 'not given' not in name:
        assert not [note for note in report.notes if 'not exactly as on one' in note]


@pytest.mark.slow  # convolutions are compiled: 15 s on each kind where they are not cached
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_convolutions_of_a_fixed_batch_train(kind, contexts, enabled):
    """"could not broadcast input array from shape (5, ...) into shape (10, ...)": of the length given to the op."""
    from theano_mgpu.keras import disable

    from keras import layers as L
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = data(2 * FIXED, 6, 6, 2)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = Sequential([L.Conv2D(2, 3, padding='same', activation='tanh', batch_input_shape=(FIXED, 6, 6, 2)),
                            L.AveragePooling2D(), L.UpSampling2D(), L.Flatten(), L.Dense(3)])
        found.append(trained(model, x, y, mode=None))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
    assert len(model.train_function.function.contexts) == 2
    assert not report.notes


@pytest.mark.slow
@pytest.mark.unverified
def test_a_batch_that_is_at_fault_does_not_take_a_model_off_its_contexts(cpu2, enabled):
    """One `predict_on_batch` of no rows left a model to plain Keras for good."""
    from keras import layers as L
    from keras.models import Model, Sequential
    report = enabled()
    model = Sequential([L.Dense(3, input_shape=(6,))])
    with contextlib.suppress(ValueError):  # a BLAS refuses it in Theano's product of matrices
        assert model.predict_on_batch(np.zeros((0, 6), 'float32')).shape == (0, 3)
    report.notes.clear()
    assert model.predict_on_batch(np.zeros((10, 6), 'float32')).shape == (10, 3)
    a, b = L.Input((6,)), L.Input((6,))
    both = Model([a, b], L.add([a, b]))
    with pytest.raises(ValueError, match='mis-match|broadcast'):
        both.predict_on_batch([np.zeros((8, 6)), np.zeros((6, 6))])
    both.predict_on_batch([np.zeros((8, 6))] * 2)
    fixed = fixed_models()['merged'][0]()
    with pytest.raises(ValueError, match='reshape'):
        fixed.predict_on_batch(data(7, 6)[0])  # no rows of 4: fails on one context, too
    assert [len(each.predict_function.function.contexts) for each in (model, both, fixed)] == [2, 2, 2]
    assert not report.notes
    fixed.predict_on_batch(data(FIXED, 6)[0])
    assert len(fixed.predict_function.function.contexts) == 1 and 'runs on one context' in report.notes[0]


def test_a_batch_of_another_length_than_the_fixed_one_fails_as_in_plain_keras(cpu2, enabled):
    from theano_mgpu.keras import disable
    for several in (False, True):
        enabled() if several else disable()
        model = fixed_models()['reshape'][0]()
        assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
        with pytest.raises(ValueError, match='reshape|size'):
            model.predict_on_batch(data(7, 6)[0])
    assert model.predict_on_batch(data(FIXED, 6)[0]).shape == (FIXED, 3)
    assert len(model.predict_function.function.contexts) == 2


def test_an_error_after_batches_that_were_divided_is_raised(cpu2, enabled):
    """A model that has trained over its contexts is not moved by an error that comes later."""
    from keras import layers as L
    from keras.models import Sequential
    enabled()
    model = Sequential([L.Lambda(lambda v: T.opt.Assert('too large')(v, T.all(v < 9)), output_shape=(6,),
                                 input_shape=(6,)), L.Dense(3)])
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    x, y = data(8, 6)[0], data(8, 3)[0]
    model.train_on_batch(x, y)
    with pytest.raises(AssertionError, match='too large'):
        model.train_on_batch(x + 9, y)
    assert len(model.train_function.function.contexts) == 2


def test_a_first_batch_that_cannot_be_divided_is_an_error_if_strict(cpu2, enabled):
    enabled(strict=True)
    model = fixed_models()['merged'][0]()
    model.compile('sgd', 'mse', mode='FAST_COMPILE')
    before = model.get_weights()
    with pytest.raises(mgpu.BatchError, match='this batch cannot be divided: .*: Reshape'):
        model.train_on_batch(*[data(FIXED, n)[0] for n in (6, 3)])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.slow
def test_a_parallel_model_whose_batch_cannot_be_divided_runs_on_one_context(cpu2):
    from theano_mgpu.keras import multi_gpu_model
    x, y = data(2 * FIXED, 6)[0], data(2 * FIXED, 3, seed=1)[0]
    found = []
    for parallel in (False, True):
        np.random.seed(3)
        model = fixed_models()['merged'][0]()
        if not parallel:
            found.append(trained(model, x, y))
            continue
        model = multi_gpu_model(model)
        with pytest.warns(mgpu.MgpuWarning, match='runs on one context') as caught:
            found.append(trained(model, x, y))
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert [context.name for context in model.contexts] == ['host0']
    warning, = [each for each in caught if each.category is mgpu.MgpuWarning]
    assert warning.filename == __file__
