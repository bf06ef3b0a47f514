"""Ops that give other results each time, and an MPI job of functions with such ops: ``rank_op_jobs.py PATH``."""
import json
import os
import sys
import threading
import warnings

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import theano_mgpu as mgpu
import theano_mgpu.keras

import numpy as np
import theano
import theano.tensor as T
from theano.ifelse import ifelse

from support import initial_weights

FOLDS = theano.Mode(linker='py', optimizer='fast_run')
X = np.arange(18.).reshape(6, 3) / 10


class NextBatch(theano.Op):
    """An op that takes the next batch, whatever its inputs are."""

    __props__ = ('folds',)
    draws, seed = 0, 0

    def __init__(self, folds=False):
        self.folds = folds

    def make_node(self, *inputs):
        return theano.Apply(self, list(map(T.as_tensor_variable, inputs)), [T.dvector()])

    def perform(self, node, inputs, outputs):
        NextBatch.draws += 1
        np.random.rand()  # of the numbers that a script draws, too
        outputs[0][0] = np.random.RandomState(NextBatch.seed + NextBatch.draws).rand(3)

    def do_constant_folding(self, node):
        return self.folds

    def grad(self, inputs, gradients):
        return [T.zeros_like(v) for v in inputs]


def in_graph(x, w, drawn):
    a = T.dmatrix()
    return theano.OpFromGraph([a], [a + drawn()])(x)


PLACES = {
    'without inputs': lambda x, w, drawn: x + drawn(), 'of a constant': lambda x, w, drawn: x + drawn(np.ones(2)),
    'of weights': lambda x, w, drawn: x + drawn(w), 'of a sum': lambda x, w, drawn: x + drawn(x.sum(axis=0)),
    'in a loop': lambda x, w, drawn: theano.scan(lambda s: s * drawn()[0], outputs_info=x, n_steps=3)[0][-1],
    'in a loop of weights': lambda x, w, drawn: x + theano.scan(lambda s: s * drawn(), outputs_info=w, n_steps=2)[0][1],
    'in a loop over samples': lambda x, w, drawn: theano.map(lambda row: row + drawn(), [x])[0],
    'in a branch': lambda x, w, drawn: x + ifelse(T.gt(x.sum(), 0), drawn(), drawn(w)), 'in an op of a graph': in_graph}


def made(make, place, folds=False, **options):
    """Return a function, made by `theano.function` or the like, that draws at a place; and its weights."""
    x, w, state = T.dmatrix('x'), theano.shared(np.ones(3), 'w'), theano.shared(np.zeros(3), 'state')
    drawn, outputs, new = NextBatch(folds), [], 0
    inner = PLACES[place](x, w, drawn) if place in PLACES else x
    if place == 'an output':
        outputs.append(drawn())
    elif place == 'a given':
        inner, options['givens'] = x + state, {state: drawn()}
    elif place == 'an update':
        new = drawn()
    elif place == 'a default update':
        state.default_update = state + drawn()
        inner = x * state.sum()
    loss = T.sqr(T.dot(inner, w) - 1).mean()
    updates = [(w, w - .05 * T.grad(loss, w) + new)]
    return make([x], [loss] + outputs, updates=updates, mode=FOLDS, name='train', **options), w


class Queue(theano.Op):
    """An op that takes the next item of a list, which has an end."""

    __props__ = ()
    items = []

    def make_node(self):
        return theano.Apply(self, [], [T.dscalar()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.asarray(Queue.items.pop(0))

    def do_constant_folding(self, node):
        return False


def without_batch(make):
    """Return a function without inputs that trains on what it draws."""
    w = theano.shared(np.ones(3), 'w')
    loss = T.sqr(T.dot(NextBatch()(), w) - 1)
    return make([], [loss], updates=[(w, w - .05 * T.grad(loss, w))], mode=FOLDS, name='without batch'), w


def flat(*arrays):
    return np.concatenate([np.ravel(each) for each in arrays]).tolist()


FEW = 'without inputs', 'of a sum', 'a default update', 'no batch'
EVERYWHERE = *FEW, 'in a loop', 'in an op of a graph', 'an output', 'a given'


def outcomes(make, places=EVERYWHERE, **options):
    """Return, for each function, the figures of two calls and the weights after them; and the draws."""
    found = {}
    for place in places:
        if place == 'no batch' and make is mgpu.function:
            continue
        NextBatch.draws = 0
        f, w = without_batch(make) if place == 'no batch' else made(make, place, **options)
        outputs = [each for _ in range(2) for each in f(*[X] * (place != 'no batch'))]
        found[place] = flat(*outputs, w.get_value()), NextBatch.draws
    return found


def error_of(f, *arguments):
    try:
        return f(*arguments).tolist()
    except Exception as error:
        return type(error).__name__


def of_a_queue(make):
    """Return what a call gives where the queue of the other rank is empty, and then the queue of rank 0."""
    x, w = T.dmatrix('x'), theano.shared(np.ones(3), 'w')
    f = make([x], (x + Queue()()).sum(), updates=[(w, w + Queue()())], mode=FOLDS, name='of a queue')
    Queue.items = [] if mgpu.rank() else [1.]
    return [error_of(f, X), error_of(f, X), w.get_value().tolist()]


def with_a_state():
    """Return what functions give whose input has an update, and a copy of one, and one without outputs."""
    step = theano.In(T.dscalar('step'), value=0., update=Queue()() + 1)
    f = theano.function([step], step.variable + Queue()() * 0, mode=FOLDS, name='with a state')
    g = f.copy(name='copy')
    Queue.items = [] if mgpu.rank() else [4., 4., 5., 5., 6., 6.]
    return [float(np.ravel(each())[0]) for each in (f, f, g, g)]


def alone():
    """Return the draws of a function of each rank that no other one calls, once in a thread: it waits for nobody."""
    f = theano.function([], NextBatch()() * T.ones((100000, 1)), mode=FOLDS, name='of rank %d' % mgpu.rank())
    NextBatch.draws, thread = 0, threading.Thread(target=f)
    for _ in range(3 - mgpu.rank()):
        f()
    thread.start()
    thread.join()
    return NextBatch.draws


def placed(device=mgpu.device, make=mgpu.function):
    """Return the losses of a model on two devices of rank 0, and the weights after them; and the draws."""
    NextBatch.draws = 0
    x = T.dmatrix('x')
    with device('a'):
        w = theano.shared(np.ones((3, 3)), 'w')
        h = T.tanh(T.dot(x + NextBatch()(), w))
    with device('b'):
        v = theano.shared(np.ones(3), 'v')
        rows = T.sqr(T.dot(h, v) - 1)
    updates = [(p, p - .1 * gradient) for p, gradient in zip((w, v), T.grad(rows.mean(), [w, v]))]
    f = make([x], rows, updates=updates, mode=FOLDS)
    return flat(f(X), f(X), w.get_value(), v.get_value()), NextBatch.draws


def of_keras():
    """Return the losses, weights and predictions of a Keras model with such an op in a layer; and the draws."""
    import keras
    np.random.seed(0)
    NextBatch.draws, data = 0, np.random.rand(20, 3).astype('float32')
    model = keras.Sequential([keras.layers.Dense(3, input_shape=(3,)), keras.layers.Lambda(
        lambda h: h + T.cast(NextBatch()(), 'float32'), output_shape=(3,))])
    model.compile('sgd', 'mse')
    losses = model.fit(data, data, batch_size=8, epochs=2, shuffle=False, verbose=0).history['loss']
    return flat(losses, *model.get_weights(), model.predict(data, batch_size=8)), NextBatch.draws


def train(path):
    """Write what all functions give on this rank."""
    mgpu.init('a->cpu;b->cpu')
    warnings.simplefilter('ignore')
    NextBatch.seed = 1000 * mgpu.rank()
    np.random.seed(0)
    ways = {'mgpu.function': dict(outcomes(mgpu.function), placed=placed()),
            'sharded update': outcomes(mgpu.function, FEW, update_on='sharded')}
    random = [np.random.rand()]
    found = {'queue': of_a_queue(mgpu.function)}
    for always in False, True:
        mgpu.enable(always=always, tell=str)
        ways['enabled, always=%s' % always] = dict(outcomes(theano.function, FEW), keras=of_keras())
        random.append(np.random.rand())
    found.update({'enabled queue': of_a_queue(theano.function), 'state': with_a_state(), 'alone': alone(),
                  'ways': ways, 'random': random})
    with open('%s.%d' % (path, mgpu.rank()), 'w') as file:
        json.dump(found, file)


QUEUE = [float(X.sum()) + 18, 'IndexError', [2., 2., 2.]]
FOUND = [{'queue': QUEUE, 'enabled queue': QUEUE, 'state': [0., 5., 0., 6.], 'alone': 4},
         {'queue': QUEUE, 'enabled queue': QUEUE, 'state': [0., 5., 0., 6.], 'alone': 3}]

if __name__ == '__main__':
    initial_weights.draw_by_numpy()
    train(sys.argv[1])
