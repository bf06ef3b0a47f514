"""Errors that a script catches, in calls of Theano functions and of Keras models; a line for each call.

Usage: error_cases.py FILE. Each process appends its rank to the name.
"""
import os
import sys

import theano_mgpu  # noqa: F401  installs the version fixes

import keras
import numpy as np
import theano
import theano.tensor as T
from keras import layers as L

FLOAT = theano.config.floatX


class Refused(ValueError):
    """An error that cannot be made from its text alone."""

    def __init__(self, value, limit):
        super().__init__('%g is more than %g' % (value, limit))
        self.value = value


class Checked(theano.scalar.UnaryScalarOp):
    """An op of the user's, in Python, that checks each number."""

    def impl(self, number):
        if number > 90:
            raise Refused(number, 90)
        if number > 80:
            raise FloatingPointError('%g overflows' % number)
        if number > 70:
            raise MemoryError('no memory for %g' % number)
        return number

    def grad(self, inputs, gradients):
        return gradients

    def c_code(self, *args):
        raise theano.gof.utils.MethodNotDefined()


checked = T.Elemwise(Checked(theano.scalar.same_out, name='checked'))
lines = []


def attempt(name, call, *args, **kwargs):
    try:
        found = call(*args, **kwargs)
        text = '%.5g' % np.sum(found.history['loss'] if hasattr(found, 'history') else found)
    except BaseException as error:
        text = '%s: %s' % (type(error).__name__, str(error).partition('\n')[0])
    lines.append('%s: %s' % (name, text))


def one(*shape, **values):
    """Return ones of a shape, and in its last row `last`."""
    made = np.ones(shape, FLOAT)
    made[-1:] = values.get('last', 1)
    return made


def theano_cases():
    x, y, n = T.matrix('x'), T.matrix('y'), T.ivector('n')
    w = theano.shared(np.ones((5, 2), FLOAT), name='w')
    f = theano.function([x], T.opt.Assert('too big')(T.dot(x, w), T.lt(x.shape[0], 9)).sum())
    attempt('assert', f, one(11, 5))
    attempt('assert of values', f, one(7, 5))
    f = theano.function([x], T.opt.Assert('negative')(T.dot(x, w), T.all(x > 0)).sum())
    attempt('assert in the last row', f, one(7, 5, last=-1))
    f = theano.function([x, y], (x + y).sum())
    attempt('lengths', f, one(7, 5), one(6, 5))
    attempt('widths', f, one(7, 5), one(7, 4))
    attempt('good', f, one(7, 5), one(7, 5))
    f = theano.function([n], w[n].sum())
    attempt('row', f, np.array([0, 1, 2, 9], 'int32'))
    attempt('row of the first half', f, np.array([7, 1, 2, 1], 'int32'))
    f = theano.function([x], T.dot(x, w).sum())
    for name, value in [('inner dimension', one(7, 4)), ('number of dimensions', one(7)), ('dtype', one(7, 5) * 1j),
                        ('text', 'text'), ('none', None)]:
        attempt(name, f, value)
    attempt('no argument', f)
    attempt('unknown name', f, z=one(7, 5))
    f = theano.function([x], T.reshape(x, (x.shape[0], 2)).sum())
    attempt('reshape', f, one(7, 5))
    loss = checked(T.dot(x, w)).sum()
    train = theano.function([x], loss, updates=[(w, w - 0.01 * T.grad(loss, w))])
    for name, value in [('first', 1), ('memory', 16.5), ('floating point', 18.7), ('own', 30), ('after', 1)]:
        attempt('training, ' + name, train, one(9, 5, last=value))
        attempt('weights', w.get_value)

    f = theano.function([x], (x * T.nlinalg.matrix_inverse(T.dot(w.T, w) * 0).sum()).sum())
    attempt('singular', f, one(7, 5))


class Failing(keras.callbacks.Callback):
    """A callback that raises an error at the end of a batch."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_batch_end(self, batch, logs=None):
        if batch == 1:
            raise self.error


def batches(last=None, width=5):
    for _ in range(3):
        yield one(8, width), one(8, 2)
    if last is not None:
        raise last


def keras_cases():
    def limited(v):
        return T.opt.Assert('too large')(v, T.all(v < 9))
    model = keras.Sequential([L.Lambda(limited, output_shape=(5,), input_shape=(5,)),
                              L.Dense(2, kernel_initializer='ones')])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), 'mse', metrics=['mae'])
    words = keras.Sequential([L.Embedding(6, 2, input_length=3, embeddings_initializer='ones'), L.Flatten()])
    words.compile('sgd', 'mse')
    a, b = L.Input((5,)), L.Input((5,))
    both = keras.Model([a, b], L.add([a, b]))
    x, y = one(20, 5), one(20, 2)
    for when in ('at first', 'later'):
        attempt('values %s' % when, model.train_on_batch, one(8, 5, last=10), y[:8])
        attempt('values of test %s' % when, model.test_on_batch, one(8, 5, last=10), y[:8])
        attempt('fit %s' % when, model.fit, one(20, 5, last=10), y, batch_size=6, epochs=2, verbose=0, shuffle=False)
        attempt('evaluate %s' % when, model.evaluate, one(20, 5, last=10), y, verbose=0)
        attempt('predict %s' % when, model.predict, one(20, 5, last=10))
        attempt('word %s' % when, words.predict, np.array([[1, 2, 3]] * 7 + [[1, 2, 77]]))
        attempt('lengths of inputs %s' % when, both.predict_on_batch, [one(8, 5), one(6, 5)])
        attempt('no rows %s' % when, model.predict_on_batch, x[:0])
        attempt('good %s' % when, model.train_on_batch, x[:8], y[:8])
        attempt('words %s' % when, words.predict, np.ones((8, 3)))
        attempt('both %s' % when, both.predict, [x, x])
    for name, arguments, options in [
            ('width', (x[:, :4], y), {}), ('lengths', (x, y[:7]), {}), ('targets', (x, one(20, 3)), {}),
            ('two inputs', ([x, x], y), {}), ('validation', (x, y), {'validation_data': (x,)}),
            ('steps', (x, y), {'steps_per_epoch': 2, 'batch_size': 3}), ('option', (x, y), {'epoch': 2}),
            ('class weights', (x, y), {'class_weight': {0: 1}}), ('weights', (x, y), {'sample_weight': x})]:
        attempt('fit, ' + name, model.fit, *arguments, verbose=0, **options)
    attempt('evaluate, width', model.evaluate, x[:, :4], y, verbose=0)
    attempt('predict, width', model.predict, x[:, :4])
    for error in (ZeroDivisionError('own'), Refused(2, 1), StopIteration('own'), KeyboardInterrupt(), SystemExit(3)):
        name = type(error).__name__
        attempt('callback, ' + name, model.fit, x, y, batch_size=5, verbose=0, callbacks=[Failing(error)])
        for workers in (0, 1):
            attempt('generator, %s, %d' % (name, workers), model.fit_generator, batches(error), 9, epochs=1, verbose=0,
                    workers=workers) if isinstance(error, Exception) or not workers else None
    attempt('callback that writes', model.fit, x, y, verbose=0, callbacks=[keras.callbacks.CSVLogger('/nowhere/x.csv')])
    if os.environ.get('OMPI_COMM_WORLD_RANK') != '0':  # in one process, or on one rank of two
        last = [Failing(IndexError('of the last rank'))]
    else:
        last = [keras.callbacks.Callback()]
    before = model.get_weights(), model.optimizer.get_weights()
    attempt('callback of one rank', model.fit, x, y, batch_size=5, verbose=0, callbacks=last)
    model.set_weights(before[0])  # rank 0 goes on to the next batch that the ranks divide or compare
    model.optimizer.set_weights(before[1])
    for workers in (0, 1):
        attempt('end of data, %d' % workers, model.fit_generator, batches(), 9, epochs=1, verbose=0, workers=workers)
        attempt('end of test, %d' % workers, model.evaluate_generator, batches(), 9, workers=workers)
        attempt('end of prediction, %d' % workers, model.predict_generator, batches(), 9, workers=workers)
        attempt('width of batches, %d' % workers, model.fit_generator, batches(width=4), 2, verbose=0, workers=workers)
    attempt('no tuple', model.fit_generator, iter([one(8, 5)] * 9), 9, verbose=0)
    attempt('no number of steps', model.fit_generator, batches(), verbose=0)
    attempt('one item', model.fit_generator, iter([(1, 2, 3, 4)]), 2, verbose=0, workers=0)
    attempt('after all', model.fit, x, y, batch_size=6, epochs=2, verbose=0, shuffle=False)
    for weights in model.get_weights() + model.optimizer.get_weights():
        lines.append('%.6g' % np.sum(weights))


if __name__ == '__main__':
    theano_cases()
    keras_cases()
    with open('%s.%s' % (sys.argv[1], os.environ.get('OMPI_COMM_WORLD_RANK', 0)), 'w') as file:
        file.write('\n'.join(lines))
