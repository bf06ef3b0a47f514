"""Bugs that were found and fixed, each under its symptom: models of Keras, and notes about them."""
import theano_mgpu as mgpu

import numpy as np
import pytest
from support.modes import PYTHON
from support.small_models import data

pytestmark = pytest.mark.verified


def test_validation_in_fit_generator_leaves_the_progress_bar_of_the_training_alone(cpu2):
    """Keras hands its callbacks on to `evaluate`: "'<' not supported between instances of 'int' and 'NoneType'"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    x, y = np.ones((10, 3)), np.ones((10, 2))
    model = multi_gpu_model(Sequential([Dense(2, input_shape=(3,))]))
    model.compile('sgd', 'mse', mode=PYTHON)
    generator = ((x, y) for _ in range(20))
    history = model.fit_generator(generator, steps_per_epoch=2, epochs=2, verbose=2, validation_data=(x, y))
    assert len(history.history['val_loss']) == 2


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_keras_model_whose_layers_are_all_frozen_is_fitted(kind, contexts):
    """Keras runs such a model, for its metrics or running statistics: "params is empty: name the shared variables"."""
    from theano_mgpu.keras import multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    contexts(kind, 2)
    x, y = np.ones((10, 3)), np.ones((10, 2))
    template = Sequential([Dense(2, input_shape=(3,))])
    template.trainable = False
    template.compile('adam', 'mse', metrics=['mae'])
    before = template.get_weights()
    expected = template.evaluate(x, y, verbose=0)
    model = multi_gpu_model(template)
    for _ in range(2):
        np.testing.assert_allclose(model.train_on_batch(x, y), expected, rtol=1e-6)
    np.testing.assert_array_equal(template.get_weights()[0], before[0])
    assert model.optimizer.get_weights()[0] == 2  # steps are counted all the same


def with_flat_loss():
    """Return a variational autoencoder whose loss is a mean over all pixels plus a divergence of each sample."""
    from keras import backend as K
    from keras import layers as L
    from keras.models import Model
    x = L.Input((6,))
    code = L.Dense(2)(x)
    out = L.Dense(6, activation='sigmoid')(code)
    model = Model(x, out)
    divergence = -0.5 * K.sum(1 - K.square(code), axis=-1)
    model.add_loss(K.mean(6 * K.mean(K.binary_crossentropy(K.flatten(x), K.flatten(out)), axis=-1) + divergence))
    return model


@pytest.mark.slow
def test_a_mean_over_all_pixels_that_is_added_to_a_loss_of_each_sample_is_exact(cpu2, enabled):
    """The mean over all pixels was refused with "the loss mixes samples", but it is the mean of the replicas' means."""
    from theano_mgpu.keras import disable
    x = np.random.RandomState(1).rand(11, 6).astype('float32')
    found = []
    for several in (False, True):
        report = enabled() if several else disable()
        np.random.seed(3)
        model = with_flat_loss()
        model.compile('adam', mode='FAST_COMPILE')
        found.append([model.train_on_batch(x, None) for _ in range(3)] + model.get_weights())
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert report.notes == [] and len(model.train_function.function.contexts) == 2


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['sgd', 'adam'])
def test_a_gradient_that_is_zero_in_theory_is_no_difference(optimizer, cpu2):
    """The bias of a layer before a normalisation differed by a relative 2.0 in --verify."""
    from theano_mgpu.keras import verify

    from keras import layers as L
    from keras.models import Sequential
    np.random.seed(2)
    model = Sequential([L.Dense(5, input_shape=(6,), name='before'), L.BatchNormalization(), L.Activation('relu'),
                        L.Dense(3)])
    model.compile(optimizer, 'mse', mode='FAST_COMPILE')
    x, y = data(11, 6)[0], data(11, 3, seed=1)[0]
    report = verify(model, x, y)
    assert report.passed, str(report)
    assert report.arbitrary[0] == 'before/bias' and 'in their last digit' in str(report)
    assert {row.kind for row in report.rows} >= {'gradient', 'weight', 'optimizer'}


def test_a_model_that_is_verified_prints_once(cpu2, capsys):
    """The values of its first batch were printed for one device, for each context, and for each context again."""
    from theano_mgpu.keras import disable, enable

    from keras import backend as K
    from keras.layers import Dense, Lambda
    from keras.models import Sequential
    enable(always=True, verify=True)
    try:
        model = Sequential([Dense(2, input_shape=(3,)), Lambda(lambda x: K.print_tensor(x, 'hidden'))])
        model.compile('sgd', 'mse', mode=PYTHON)
        for _ in range(2):
            model.train_on_batch(np.ones((7, 3)), np.ones((7, 2)))
    finally:
        disable()
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith('hidden') for line in lines] == ([True] + [False] * 6) * 2  # one array of seven rows each


@pytest.mark.slow_but_with('None')
@pytest.mark.parametrize('name', [None, 'policy_step'])
def test_a_step_of_k_function_is_divided_whether_or_not_it_has_a_name(name, cpu2):
    """A step without a name stayed on one device, unlisted: "no Theano function was compiled: nothing was divided"."""
    from keras import backend as K
    from keras.layers import Dense
    from keras.models import Sequential
    from keras.optimizers import SGD

    def trained():
        np.random.seed(7)
        model = Sequential([Dense(5, activation='tanh', input_shape=(4,)), Dense(3, activation='softmax')])
        actions, rewards = K.placeholder((None, 3)), K.placeholder((None,))
        loss = K.mean(-K.log(K.sum(model.output * actions, axis=1)) * rewards)
        updates = SGD(.05, momentum=.9).get_updates(params=model.trainable_weights, loss=loss)
        step = K.function([model.input, actions, rewards], [loss], updates=updates, mode=PYTHON,
                          **({'name': name} if name else {}))
        K.eval(K.ones((2,)))  # for its own use, Keras makes a function here
        losses = [step([np.random.randn(n, 4), np.eye(3)[np.random.randint(0, 3, n)], np.random.randn(n)])[0]
                  for n in (29, 13, 2)]
        return losses + model.get_weights()
    expected = trained()
    report = mgpu.enable(always=True)
    try:
        found = trained()
    finally:
        mgpu.disable()
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    usage, = report.usages
    assert usage.samples == 44 and (usage.name == name or usage.name.startswith('test_keras_models.py:'))


def test_weights_that_are_made_after_an_error_have_their_own_names():
    """An error of an optimizer, or of `enable(strict=True)`, left Keras within the scope "training"."""
    from keras.layers import Dense
    from keras.models import Sequential
    from keras.optimizers import SGD

    class Failing(SGD):
        def get_updates(self, loss, params):
            raise ValueError('no step')
    model = Sequential([Dense(2, input_shape=(3,))])
    model.compile(Failing(), 'mse', mode=PYTHON)
    with pytest.raises(ValueError, match='no step'):
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    assert Dense(2, input_shape=(3,), name='last').name == 'last'
    model = Sequential([Dense(2, input_shape=(3,), name='last')])
    assert [weight.name for weight in model.weights] == ['last/kernel', 'last/bias']


def test_an_error_while_the_first_batch_compiles_a_model_is_that_of_keras():
    """It ended with: 'NoneType' object has no attribute 'functions'."""
    from theano_mgpu.keras import disable, enable

    from keras.layers import Dense
    from keras.metrics import Mean
    from keras.models import Model

    class Twice(Model):
        def __init__(self):
            super().__init__()
            self.dense = Dense(2)
            self.mean, self.other = Mean(name='metric_1'), Mean(name='metric_1')

        def call(self, x):
            self.add_metric(self.mean(x), name='metric_1')
            return self.dense(x)
    enable(always=True)
    try:
        model = Twice()
        model.compile('sgd', 'mse', mode=PYTHON)
        with pytest.raises(ValueError, match='metric'):
            model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    finally:
        disable()


def test_a_parallel_model_is_counted_in_the_report_of_the_present_enable(cpu2):
    """A model of multi_gpu_model that was compiled anew was counted in the report of an enable() before."""
    from theano_mgpu.keras import disable, enable, multi_gpu_model

    from keras.layers import Dense
    from keras.models import Sequential
    model, x = multi_gpu_model(Sequential([Dense(2, input_shape=(3,))])), np.ones((4, 3))
    try:
        for _ in range(2):
            report = enable(always=True)
            model.compile('sgd', 'mse', mode=PYTHON)
            model.train_on_batch(x, x[:, :2])
            assert [(usage.name.split()[1], usage.samples) for usage in report.usages] == [('train', 4)]
            disable()
    finally:
        disable()
