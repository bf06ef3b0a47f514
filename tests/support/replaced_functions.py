"""Scripts that put functions of their own in the place of a model's: ``python replaced_functions.py`` runs them all.

Each returns the results of training, which have to be the same in plain Keras, over contexts, and in processes.
"""
import os
import sys

if __name__ == '__main__':
    os.environ['KERAS_BACKEND'] = 'theano'
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import theano_mgpu  # noqa: F401

import keras
import numpy as np
from keras import backend as K
from keras import callbacks
from keras.layers import Dense
from keras.models import Sequential
from keras.optimizers import SGD, Adam

X = np.random.RandomState(0).randn(22, 6)
Y = np.eye(3)[np.random.RandomState(1).randint(0, 3, 22)]
FIT = {'batch_size': 8, 'epochs': 2, 'shuffle': False, 'verbose': 0}
OPTIONS = {}  # for theano.function
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def compiled(cls=Sequential, optimizer=None):
    np.random.seed(5)
    model = cls([Dense(4, activation='tanh', input_shape=(6,)), Dense(3, activation='softmax')])
    model.compile(optimizer or SGD(.1, momentum=.9), 'categorical_crossentropy', metrics=['mae'], **OPTIONS)
    return model


def left(model, *further):
    found = [np.ravel(value) for value in list(further) + model.get_weights() + model.optimizer.get_weights()]
    return np.concatenate(found)


class Replay:
    """A train function that repeats samples of earlier batches: twice a call, with a longer batch."""

    def __init__(self, function):
        self.function, self.buffer = function, []

    def __call__(self, inputs):
        self.buffer.append([each[:3] for each in inputs])
        self.function(inputs)
        return self.function([np.concatenate([each] + [old[i] for old in self.buffer])
                              for i, each in enumerate(inputs)])


@case
def train_function_wrapped_before_the_first_batch():
    model = compiled()
    model._make_train_function()
    model.train_function = Replay(model.train_function)
    return left(model, *model.fit(X, Y, **FIT).history['loss'])


@case
def train_function_wrapped_after_some_batches():
    model = compiled(optimizer=Adam(.05))
    model.fit(X, Y, **FIT)
    model.train_function = Replay(model.train_function)
    return left(model, *model.fit(X, Y, **FIT).history['loss'])


@case
def train_function_scales_its_inputs_in_place():
    """Train with inputs that the train function scales in place; they may have been sent to a device before."""
    model = compiled()
    model._make_train_function()
    train = model.train_function

    def scaled(inputs):
        inputs[0] *= 2
        return train(inputs)
    model.train_function = scaled
    return left(model, *model.fit(X, Y, **FIT).history['loss'])


@case
def train_function_replaced_before_the_first_batch():
    """Train by a policy gradient: no step is the model's own."""
    model = compiled()
    reward, x, y = K.placeholder((None,)), model.inputs[0], model.targets[0]
    loss = K.mean(-K.log(K.sum(model.output * y, axis=1)) * reward)
    updates = model.optimizer.get_updates(loss, model.trainable_weights)
    step = K.function([x, y, reward], [loss, loss], updates=updates, **OPTIONS)
    model.train_function = lambda inputs: step(inputs[:3])
    return left(model, *model.fit(X, Y, sample_weight=np.arange(22.), **FIT).history['loss'])


@case
def train_function_replaced_after_some_batches():
    model = compiled()
    model.fit(X, Y, **FIT)
    model.train_function = lambda inputs: [np.array(len(inputs[0]) * 1.), np.array(0.)]
    return left(model, *model.fit(X, Y, **FIT).history['loss'])


@case
def all_functions_wrapped_in_a_subclass():
    class Counting(Sequential):
        def _make_train_function(self):
            self._wrap('train', super()._make_train_function)

        def _make_test_function(self):
            self._wrap('test', super()._make_test_function)

        def _make_predict_function(self):
            self._wrap('predict', super()._make_predict_function)

        def _wrap(self, kind, make):
            before = getattr(self, kind + '_function', None)
            make()
            made = getattr(self, kind + '_function')
            if before is None:
                def counting(inputs):
                    counts[kind] = counts.get(kind, 0) + len(inputs[0])
                    return made(inputs)
                setattr(self, kind + '_function', counting)
    counts = {}
    model = compiled(Counting)
    history = model.fit(X, Y, validation_data=(X[:9], Y[:9]), **FIT).history
    tested, predicted = model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, batch_size=5)
    return left(model, history['loss'], history['val_loss'], tested, predicted, counts['train'], counts['predict'])


@case
def test_and_predict_functions_replaced():
    model = compiled()
    model.fit(X, Y, **FIT)
    model._make_test_function()
    model._make_predict_function()
    test, predict = model.test_function, model.predict_function
    model.test_function = lambda inputs: [2 * each for each in test(inputs)]
    model.predict_function = lambda inputs: [each + 1 for each in predict(inputs)]
    history = model.fit(X, Y, validation_split=.3, callbacks=[callbacks.EarlyStopping(patience=0)], **FIT).history
    return left(model, history['val_loss'], model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X),
                model.train_on_batch(X, Y), model.test_on_batch(X, Y), model.predict_on_batch(X))


@case
def train_function_made_again():
    """Fit twice, with other trainable weights; the optimizer begins anew, as in Keras."""
    model = compiled()
    model.fit(X, Y, **FIT)
    model.layers[0].trainable = False
    model._collected_trainable_weights = model.trainable_weights
    model.train_function = None
    model.fit(X, Y, **FIT)
    return left(model)


@case
def a_weight_with_two_new_values():
    """Train a weight that its layer and the optimizer update; the layer's new value counts."""
    class Shrinking(Dense):
        def call(self, inputs):
            self.add_update([K.update(self.bias, self.bias * .5 + K.mean(inputs))], inputs)
            return super().call(inputs)
    np.random.seed(5)
    model = Sequential([Shrinking(4, activation='tanh', input_shape=(6,)), Dense(3, activation='softmax')])
    model.compile(SGD(.1, momentum=.9), 'categorical_crossentropy', **OPTIONS)
    return left(model, *model.fit(X, Y, **FIT).history['loss'])


if __name__ == '__main__':
    keras.backend.set_floatx('float64')
    for name in sys.argv[1:] or CASES:
        print(name, *['%.10g' % number for number in CASES[name]()], flush=True)
