"""MPI jobs of tests with the flag `mgpu.check`, and with a ledger; see `rank_jobs`."""
import json

import theano_mgpu as mgpu

import numpy as np
import theano
import theano.tensor as T

from support.modes import PYTHON

X = np.random.RandomState(0).rand(12, 11, 3).astype('float32')


def logarithmic(**options):
    """Return a training function with the logarithm of a layer, and its parameters."""
    x = T.fmatrix('x')
    w, v = theano.shared(X[0, :3, :2].copy(), name='layer/w'), theano.shared(X[1, :2, :1].copy(), name='v')
    loss = T.log(T.dot(x, w)).dot(v).mean()
    step = mgpu.training_function([x], loss, [w, v], lambda gradients: [
        (param, T.cast(param - .001 * gradient, 'float32')) for param, gradient in zip((w, v), gradients)],
        name='train', **options)
    return step, w, v


def error_of(step, at=0, flip=None):
    """Train; before the step `at`, call `flip`. Return the step that has failed, and the text of its error."""
    for i, batch in enumerate(X, 1):
        if i == at:
            flip()
        try:
            step(batch)
        except mgpu.MgpuError as error:
            return [i, type(error).__name__, ' '.join([str(error), *getattr(error, '__notes__', ())])]


def flip_bit(value):
    value.view('uint32')[1, 0] ^= 1


def checked(path, update_on, at):
    """Train with another value on the last rank from a step on, then with a zero in a batch; note the errors."""
    mgpu.init('a->cpu')
    theano.config.mgpu.check = 2
    step, w, _ = logarithmic(mode=PYTHON, update_on=update_on)
    is_last = mgpu.rank() == mgpu.size() - 1
    errors = [error_of(step, int(at) * is_last, lambda: flip_bit(w.container.storage[0]))]
    w.set_value(X[0, :3, :2])
    X[4, 8] = 0
    errors.append(error_of(step))
    with open('%s.%d' % (path, mgpu.rank()), 'w') as file:
        json.dump(errors, file)
