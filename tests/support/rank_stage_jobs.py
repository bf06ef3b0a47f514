"""Jobs of rank_jobs.py: steps with several stages, and updates that are divided in unusual ways."""
import threading
import time

import theano_mgpu as mgpu
from theano_mgpu.comm.mpi import MpiCommunicator

import numpy as np
import theano
import theano.tensor as T

from .modes import PYTHON
from .rank_network import shared, write

BATCH = np.random.RandomState(0).randn(8, 6).astype('float32'), np.arange(8, dtype='int32')


def early_sums(path, kind):
    """Train two branches: one waits for values from all ranks; the gradient of the other one is early."""
    mgpu.init('a->cpu')
    slow_down_exchange_thread()
    x, n = T.matrix('x'), T.ivector('n')
    w, v = params = parameters(2)
    hidden = T.dot(x, w)
    hidden = {'norm': lambda: (hidden - hidden.mean(axis=0)) / T.sqrt(hidden.var(axis=0) + np.float32(1e-3)),
              'integers': lambda: hidden * T.cast(n.sum(), 'float32') * np.float32(.01)}[kind]()
    loss = (T.tanh(hidden) ** 2).mean() + (T.tanh(T.dot(x, v)) ** 2).mean()
    inputs = [x, n] if kind == 'integers' else [x]
    step = mgpu.training_function(inputs, loss, params, descend, mode=PYTHON)
    for _ in range(2):
        step(*BATCH[:len(inputs)])
    write(path, [param.get_value() for param in params])


def slow_down_exchange_thread():
    """Delay each sum that rank 1 adds on another thread than the main one."""
    add = MpiCommunicator.all_reduce

    def all_reduce(self, arrays):
        if self.rank == 1 and threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        add(self, arrays)
    MpiCommunicator.all_reduce = all_reduce


def reshaped(path, update_on, *columns):
    """Train a parameter that gets another shape between steps."""
    mgpu.init('a->cpu')
    x, params = T.matrix('x'), parameters(2)
    loss = sum((T.tanh(T.dot(x, param)) ** 2).mean() for param in params)
    step = mgpu.training_function([x], loss, params, descend, mode=PYTHON, update_on=update_on)
    found = [step(BATCH[0])]
    for n in map(int, columns):
        params[0].set_value(np.random.RandomState(n).randn(6, n).astype('float32'))
        found += [step(BATCH[0]), step(BATCH[0])]
    write(path, found + [param.get_value() for param in params])


def two_functions(path, update_on):
    """Train the same parameters and momenta by two functions; each divides them in its own way."""
    mgpu.init('a->cpu')
    x, params = T.matrix('x'), parameters(3)
    momenta = {param: theano.shared(0 * param.get_value()) for param in params}
    loss = sum((T.tanh(T.dot(x, param)) ** 2).mean() for param in params)

    def momentum(gradients, params):
        new = {param: np.float32(.9) * momenta[param] + gradient for param, gradient in zip(params, gradients)}
        return [pair for param in params for pair in ((momenta[param], new[param]), (param, param - new[param]))]
    steps = [mgpu.training_function([x], loss, order, momentum, mode=PYTHON, update_on=update_on)
             for order in (params, params[::-1], params[1:])]
    for step in steps + steps:
        step(BATCH[0])
    write(path, [variable.get_value() for variable in [*params, *momenta.values()]])


def slices(path, update_on):
    """Train with new values that read a slice, on which replicas agree; it is no array."""
    mgpu.init('a->cpu')
    x, params = T.matrix('x'), parameters(2)
    loss = sum((T.tanh(T.dot(x, param)) ** 2).mean() for param in params)

    def updates(gradients, params):
        ends = (loss * params[0])[[0, 1], :x.shape[1] - 3]
        return [(param, new + ends.sum()) for param, new in descend(gradients, params)]
    step = mgpu.training_function([x], loss, params, updates, mode=PYTHON, update_on=update_on)
    for batch in (BATCH[0], BATCH[0][:3], BATCH[0]):
        step(batch)
    write(path, [param.get_value() for param in params])


def parameters(n):
    """Return parameters of one shape."""
    return [shared(np.random.RandomState(seed), 6, 4, name='w%d' % seed) for seed in range(n)]


def descend(gradients, params):
    return [(param, param - np.float32(.1) * gradient) for param, gradient in zip(params, gradients)]
