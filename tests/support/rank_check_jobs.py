"""MPI jobs of tests with the flag `mgpu.check`, and with a ledger; see `rank_jobs`."""
import functools
import json
import os
import resource

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


def trained():
    return logarithmic(mode=PYTHON)[0]


def limited(path):
    """Let this process write no more than a few bytes to a file, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, resource.RLIM_INFINITY))


def enabled():
    """Return a function of plain Theano's interface over the contexts."""
    x, w = T.fmatrix('x'), theano.shared(np.ones(3, 'float32'), name='w')
    return theano.function([x], T.dot(x, w).sum(), updates=[(w, T.cast(w + .1 * x.sum(axis=0), 'float32'))],
                           mode=PYTHON, name='enabled')


def unwritten(path):
    """Train with ledgers that rank 0 cannot write, or not any more; each rank notes its errors, and goes on."""
    mgpu.init('a->cpu')
    theano.config.mgpu.ledger_every = 2
    errors = {}
    for make in (trained, enabled):
        if make is enabled:
            mgpu.enable(always=True, tell=str)
        for failure in (os.remove, limited):
            theano.config.mgpu.ledger = ledger = '%s.%s.%s' % (path, make.__name__, failure.__name__)
            step, at = make(), 4 * (mgpu.rank() == 0)
            met = error_of(step, at, functools.partial(failure, ledger))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            errors['%s, %s' % (make.__name__, failure.__name__)] = [*(met or ()), float(step(X[0]))]
    mgpu.disable()
    theano.config.mgpu.ledger = '%s.none/ledger' % path
    try:
        trained()
    except mgpu.MgpuError as error:
        errors['no folder'] = 0, type(error).__name__, str(error), 0
    with open('%s.%d' % (path, mgpu.rank()), 'w') as file:
        json.dump(errors, file)


def recorded_on_rank_0(path):
    """Call a function that is not divided on rank 0 alone, with a ledger."""
    mgpu.init('a->cpu')
    theano.config.mgpu.ledger, theano.config.mgpu.ledger_every = path, 1
    mgpu.enable(tell=str)
    factor, rate = T.fscalar('factor'), theano.shared(np.float32(1), name='rate')
    decay = theano.function([factor], updates=[(rate, rate * factor)], mode=PYTHON, name='decay')
    for _ in range(3 * (mgpu.rank() == 0)):
        decay(.5)
